"""A started stack of fake services loses real processes, and has them back."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.local import keeper
from millrace.local.stack import LocalStack, StackOptions
from millrace.processes import table
from millrace_testing.polling import until

pytestmark = pytest.mark.long

SERVICES = ("orchestrator", "env-server", "inference", "trainer")
MODULES = {name: f"millrace_testing.local.fake_{name.replace('-', '_')}" for name in SERVICES}


@contextlib.asynccontextmanager
async def stack_in(directory: Path, **options) -> AsyncIterator[tuple[LocalStack, list[str]]]:
    notes: list[str] = []
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    async with LocalStack(
        StackOptions(directory=directory, **options), note=notes.append, environ=environ, modules=MODULES
    ) as stack:
        await stack.start()
        yield stack, notes


def pids(stack: LocalStack) -> dict[str, int]:
    return json.loads((stack.directory / "stack.json").read_text())["pids"]


async def serves(stack: LocalStack, name: str) -> None:
    """The health check of a service (or PING) succeeds again."""
    assert stack.keeper is not None
    async with asyncio.timeout(40):
        while await stack.keeper.probes[name]() is not keeper.Answer.SERVING:
            await asyncio.sleep(0.05)


async def test_everything_that_is_killed_comes_back(tmp_path):
    async with stack_in(tmp_path) as (stack, notes):
        before = pids(stack)
        assert set(before) == {"redis", *MODULES}
        # The env-server's worker leads a session of its own: it must not outlive its parent's death.
        family = table.marked(stack.supervisor.children["env-server"].mark, variable=table.PROCESS_MARK)
        assert len(family) == 2
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: not set(pids(stack).values()) & set(before.values()))
        for name in before:
            await serves(stack, name)
        assert not [pid for pid in family if table.is_running(pid)]
        assert stack.keeper is not None and set(stack.keeper.restarts().values()) == {1}
        for name in before:
            assert f"{name} died: signal SIGKILL; started again (restart 1)" in notes
        log = (stack.logs / "stack.log").read_text()
        assert "trainer died: signal SIGKILL; started again (restart 1)" in log
        assert await stack.guard(asyncio.sleep(0, "still here")) == "still here"
    assert table.marked(stack.supervisor.stack_id) == set()


async def test_an_orderly_end_is_restarted_at_once(tmp_path):
    async with stack_in(tmp_path) as (stack, notes):
        for count in (1, 2, 3, 4, 5, 6):  # more than a crash loop is long
            await serves(stack, "inference")
            await until(lambda: stack.keeper.lives["inference"].ready_at is not None)
            os.kill(pids(stack)["inference"], signal.SIGTERM)
            text = f"inference ended: exit code 0; started again (restart {count})"
            await until(lambda text=text: text in notes)


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(keeper, "PERIOD_S", 0.3)
    monkeypatch.setattr(keeper, "NAME_AFTER_S", 1.0)
    monkeypatch.setattr(keeper, "KILL_AFTER_S", 3.0)


@pytest.mark.parametrize("name", ["trainer", "redis"])
async def test_a_frozen_process_is_named_then_killed_and_started_again(tmp_path, impatient, name):
    async with stack_in(tmp_path) as (stack, notes):
        frozen = pids(stack)[name]
        os.kill(frozen, signal.SIGSTOP)
        await until(lambda: pids(stack)[name] != frozen)
        await serves(stack, name)
    told = [note for note in notes if note.startswith(name)]
    assert "has not answered its health check" in told[0] and "(it is stopped by a signal" in told[0]
    assert told[1].endswith(": killing it")
    assert told[2] == f"{name} died: signal SIGKILL; started again (restart 1)"
    assert [note for note in notes if "killing" in note] == [told[1]], "nobody else was killed"


async def test_without_liveness_a_frozen_process_is_left_alone(tmp_path, impatient):
    async with stack_in(tmp_path, has_liveness=False) as (stack, notes):
        frozen = pids(stack)["trainer"]
        os.kill(frozen, signal.SIGSTOP)
        await asyncio.sleep(5)  # longer than what would have killed it
        assert table.is_stopped(frozen) and notes == []
