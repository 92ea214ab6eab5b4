"""A play says where it is, and so does the message of one that runs into its deadline."""

import asyncio
import contextlib
import importlib.util
from pathlib import Path

from millrace.env_server import engine_access
from millrace.env_server.adapters.failures import own_line, remember_code

MODULE = """
import asyncio

async def env_response():
    await asyncio.sleep(60)
"""


async def test_what_a_play_stands_at_longest_is_its_place() -> None:
    async def play(*places: str) -> engine_access.Standing:
        mine = engine_access.begin()
        for place in places:
            blocks.enter_context(engine_access.at(place))
            await asyncio.sleep(0.01)
        return mine

    blocks = contextlib.ExitStack()
    plays = await asyncio.gather(
        asyncio.create_task(play("the engine", "reward function 'slow'")),
        asyncio.create_task(play("reward function 'slow'")),
        asyncio.create_task(play()),
    )
    assert dict(engine_access.places(plays)) == {
        "the engine": 1,
        "reward function 'slow'": 1,
        "the environment's own code": 1,
    }
    assert plays[1].describe("").endswith("s at reward function 'slow'")
    blocks.close()
    assert plays[0].longest is None
    with engine_access.at("nowhere"):  # outside of a play
        assert plays[2].longest is None


async def test_a_play_that_waits_in_its_own_code_names_the_line(tmp_path: Path) -> None:
    path = tmp_path / "slow_env.py"
    path.write_text(MODULE)
    spec = importlib.util.spec_from_loader("slow_env", loader=None, origin=str(path))
    assert spec is not None
    namespace: dict = {}
    exec(compile(MODULE, str(path), "exec"), namespace)

    async def play() -> None:
        await namespace["env_response"]()

    remember_code(spec)
    task = asyncio.create_task(play())
    try:
        await asyncio.sleep(0)
        assert own_line(task) == "slow_env.py:5 in env_response"
        assert engine_access.Standing().describe(own_line(task)) == "in slow_env.py:5 in env_response"
    finally:
        task.cancel()
