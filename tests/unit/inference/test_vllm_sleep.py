"""vLLM sleeps while the trainer has the device: when it has memory, what it refuses meanwhile, and how that ends."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import InvalidStateError, UnavailableError
from millrace.inference import pauses
from millrace.inference.engine import EngineState
from millrace.inference.pauses import OPERATOR, SLEEP, CallerPause
from millrace.inference.vllm import rest
from millrace.inference.vllm.engine import VllmEngine
from millrace.telemetry import waits
from millrace_testing.inference import vllm_fakes as fakes
from millrace_testing.polling import until

client, gate, engine = fakes.client, fakes.gate, fakes.engine
policy, update = fakes.policy, fakes.update


async def test_it_wakes_before_the_next_version_and_is_not_asked_twice(engine: VllmEngine, client: Any) -> None:
    for _ in range(2):
        await engine.pause(SLEEP)
    assert client.is_asleep and client.is_paused
    for _ in range(2):
        await engine.resume(SLEEP)
    assert client.pauses() == ["sleep", "wake"] and not client.is_asleep
    await update(engine)
    assert engine.status().identity == fakes.SECOND and not client.is_paused


async def test_nothing_touches_its_memory_meanwhile(engine: VllmEngine, client: Any, tmp_path: Path) -> None:
    await engine.pause(SLEEP)
    for refused in (engine.check(policy()), engine.load_directory(None)):
        with pytest.raises(UnavailableError, match="the engine sleeps") as told:
            await refused
        assert told.value.reason == "ENGINE_ASLEEP"
    before = client.num_verified
    await asyncio.sleep(0.1)  # five looks of the background's verification
    assert client.num_verified == before
    assert engine.status().state is EngineState.READY, "what it holds is as good as before"
    await engine.resume(SLEEP)
    await update(engine)


async def test_an_operators_pause_outlasts_it(engine: VllmEngine, client: Any) -> None:
    await engine.pause(OPERATOR)
    await engine.pause(SLEEP)
    await engine.resume(SLEEP)
    assert client.is_paused and not client.is_asleep
    await engine.resume(OPERATOR)
    assert not client.is_paused
    assert client.pauses() == ["pause", "sleep", "wake", "pause", "resume"]


async def test_memory_that_is_there_later_is_taken_then(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rest, "_RETRY_S", 0.01)
    await engine.pause(SLEEP)
    client.fails, client.error = "wake", RuntimeError("CUDA Error: out of memory")
    await engine.resume(SLEEP)
    assert client.pauses() == ["sleep", "wake", "wake"] and not client.is_paused
    await update(engine)


@pytest.mark.parametrize(("world_size", "within_s"), [(1, 0.0), (2, 60.0)], ids=["too late", "one rank of two"])
async def test_memory_that_is_not_there_again_restarts_it(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch, world_size: int, within_s: float
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(rest, "ask_restart", lambda reason: asked.append(reason) or True)
    monkeypatch.setattr(rest, "WAKES_WITHIN_S", within_s)
    client.vllm_config.parallel_config.world_size = world_size
    await engine.pause(SLEEP)
    for _ in range(2):
        client.fails, client.error = "wake", RuntimeError("CUDA Error: out of memory")
        with pytest.raises(RuntimeError, match="out of memory"):
            await engine.resume(SLEEP)
    assert engine.status().state is EngineState.FAILED and "out of memory" in engine.status().error
    assert asked == ["vLLM does not get its memory on the device again: RuntimeError: CUDA Error: out of memory"]
    before = client.num_verified
    await asyncio.sleep(0.1)
    assert client.num_verified == before, "nothing reads what is not there, though nobody pauses it any more"


async def test_a_wake_that_comes_while_it_falls_asleep_lets_nothing_read_in_between(
    engine: VllmEngine, client: Any
) -> None:
    reached, going_on = client.block("sleep")
    falling = asyncio.create_task(engine.pause(SLEEP))
    async with asyncio.timeout(5):
        await reached.wait()
        waking = asyncio.create_task(engine.resume(SLEEP))
        before = client.num_verified
        await asyncio.sleep(0.1)
        assert client.num_verified == before
        with pytest.raises(UnavailableError, match="the engine sleeps"):
            await engine.check(policy())
        going_on.set()
        await asyncio.gather(falling, waking)
    assert not client.is_asleep and not client.is_paused


@pytest.mark.parametrize(("device", "refuses"), [("cuda", True), ("cpu", False)])
async def test_a_vllm_without_sleep_mode_refuses_unless_it_has_no_device(
    engine: VllmEngine, client: Any, device: str, refuses: bool
) -> None:
    client.model_config.enable_sleep_mode, client.vllm_config.device_config.device_type = False, device
    caller = CallerPause(engine, holder=SLEEP)
    if refuses:
        with pytest.raises(InvalidStateError, match="MILLRACE_VLLM_FLAGS") as refused:
            await caller.pause("r")
        assert refused.value.reason == "SLEEP_NOT_ENABLED"
        assert not caller.is_on and not client.pauses() and engine.status().state is EngineState.READY
    else:
        await caller.pause("r")
        assert caller.is_on and client.pauses() == ["sleep"]
        await caller.resume()
    assert not caller.is_on and not engine.status().is_paused


async def test_a_sleep_that_nobody_ends_is_visible_and_ends(
    engine: VllmEngine, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = CallerPause(engine, holder=SLEEP)
    await caller.pause("run1")
    await asyncio.sleep(0)
    told = [each for each in waits.snapshot("me") if "asleep while the trainer of run1" in each.reason]
    assert [each.waits_on for each in told] == ["trainer"]
    assert not await caller.over(timeout_s=0.01)
    monkeypatch.setattr(pauses, "PAUSE_LIMIT_S", 0.05)
    await caller.pause("run1")  # prolongs it
    assert await caller.over(timeout_s=5)
    await until(lambda: not client.is_paused and not client.is_asleep, timeout_s=5)
