"""The fork server: its children are like other processes to supervisor, reaper and `ps`; without it all goes on."""

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from millrace.local import stack
from millrace.processes import supervisor as supervisor_module
from millrace.processes import table
from millrace.processes.forked import ForkedProcess, ForkServerClient
from millrace.processes.supervisor import Child, ProcessSpec, Supervisor, describe_death

GOOD, BAD = "millrace_testing.local.forked_service", "millrace_testing.local.broken_service"
WITHIN_S = 30.0
PATH = os.pathsep.join(sys.path)


@pytest.fixture
async def supervisor(tmp_path: Path) -> AsyncIterator[Supervisor]:
    env = {**os.environ, "PYTHONPATH": PATH, "OF_SERVER": "1"}
    server = ForkServerClient({GOOD: [GOOD, "json"], BAD: [BAD]}, log_path=tmp_path / "fork-server.log")
    async with Supervisor() as supervisor:
        supervisor.start_fork_server(server, env=env)
        yield supervisor


def spec_of(tmp_path: Path, what: str, *, module: str = GOOD, name: str = "service") -> ProcessSpec:
    code = f"import {module}, sys; sys.exit({module}.main())"
    return ProcessSpec(
        name=name,
        argv=[sys.executable, "-c", code],
        env={"PYTHONPATH": PATH, "WHO": name, "WHAT": what},
        log_path=tmp_path / f"{name}.log",
        module=module,
    )


def is_forked(child: Child) -> bool:
    return isinstance(child.process, ForkedProcess)


async def said(child: Child) -> dict:
    """Return what the newest life of a service has said of itself."""
    assert child.spec.log_path is not None
    async with asyncio.timeout(WITHIN_S):
        while True:
            for line in reversed(child.spec.log_path.read_text().splitlines()):
                if line.startswith("{") and (found := json.loads(line))["pid"] == child.pid:
                    return found
            await asyncio.sleep(0.05)


async def exit_code(child: Child) -> int:
    async with asyncio.timeout(WITHIN_S):
        return await asyncio.shield(child.exited)


async def test_a_forked_service_is_a_process_like_others(supervisor: Supervisor, tmp_path: Path) -> None:
    one = await supervisor.start(spec_of(tmp_path, "sleep", name="one"))
    two = await supervisor.start(spec_of(tmp_path, "sleep", name="two"))
    first, second = await said(one), await said(two)
    assert is_forked(one) and is_forked(two)
    assert (first["who"], second["who"]) == ("one", "two")
    assert not first["left"], "it has its own environment alone"
    assert first["session"] == one.pid != second["session"]
    assert first["dice"] != second["dice"], "random numbers are its own"
    shown = Path(f"/proc/{one.pid}/cmdline").read_bytes()
    assert shown.rstrip(b"\0").split(b"\0") == [os.fsencode(word) for word in one.spec.argv]
    assert table.marked(one.mark, variable=table.PROCESS_MARK) == {one.pid}
    assert {one.pid, two.pid} <= table.marked(supervisor.stack_id)


async def test_what_is_preloaded_later_is_there_in_the_next_one(supervisor: Supervisor, tmp_path: Path) -> None:
    first = await supervisor.start(spec_of(tmp_path, "sleep", name="first"))
    assert not (await said(first))["has_wave"]
    assert supervisor.fork_server is not None
    supervisor.fork_server.preload(GOOD, "wave")
    second = await supervisor.start(spec_of(tmp_path, "sleep", name="second"))
    assert is_forked(second) and (await said(second))["has_wave"]


@pytest.mark.parametrize(("what", "code"), [("exit 0", 0), ("exit 7", 7), ("raise", 1)])
async def test_how_it_ends_is_known(supervisor: Supervisor, tmp_path: Path, what: str, code: int) -> None:
    child = await supervisor.start(spec_of(tmp_path, what))
    assert is_forked(child) and await exit_code(child) == code
    assert await supervisor.next_death() is child
    assert ("as asked" in "\n".join(describe_death(child).last_lines)) == (what == "raise")


async def test_what_it_leaves_for_its_end_is_done(supervisor: Supervisor, tmp_path: Path) -> None:
    child = await supervisor.start(spec_of(tmp_path, "goodbyes"))
    assert is_forked(child) and await exit_code(child) == 0
    said = child.spec.log_path.read_text().splitlines()[1:]
    assert said.index("of a thread") < said.index("of an exit handler") and "of a library" in said


async def test_one_that_has_ended_before_its_start_is_heard_of_is_known(supervisor: Supervisor, tmp_path: Path) -> None:
    await exit_code(await supervisor.start(spec_of(tmp_path, "exit 0", name="first")))  # everything is loaded
    starting = asyncio.create_task(supervisor.start(spec_of(tmp_path, "exit 7")))
    for _ in range(20):
        await asyncio.sleep(0)  # it is asked for
    time.sleep(0.5)
    child = await starting
    assert is_forked(child) and await exit_code(child) == 7


async def test_one_that_is_given_up_while_its_start_is_heard_of_is_ended(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    await exit_code(await supervisor.start(spec_of(tmp_path, "exit 0", name="first")))  # everything is loaded
    server = supervisor.fork_server
    assert server is not None
    spec = spec_of(tmp_path, "sleep")
    fork = server.fork(
        GOOD, spec.argv, env=spec.env, marks={table.PROCESS_MARK: "given-up"}, files={}, timeout_s=WITHIN_S
    )
    forking = asyncio.create_task(fork)
    await asyncio.sleep(0)  # it is asked for
    began = time.monotonic()
    while not table.marked("given-up", variable=table.PROCESS_MARK):
        assert time.monotonic() - began < WITHIN_S
        time.sleep(0.01)  # the event loop stands still: the answer is taken after this, and its taker woken after that
    time.sleep(0.2)
    for _ in range(2):
        await asyncio.sleep(0)
    forking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forking
    async with asyncio.timeout(WITHIN_S):
        while table.marked("given-up", variable=table.PROCESS_MARK):
            await asyncio.sleep(0.05)


async def test_a_killed_one_is_known_by_its_signal(supervisor: Supervisor, tmp_path: Path) -> None:
    child = await supervisor.start(spec_of(tmp_path, "sleep"))
    await said(child)
    os.kill(child.pid, signal.SIGTERM)
    assert await exit_code(child) == -signal.SIGTERM


async def test_what_cannot_be_imported_is_started_by_itself_and_shows_why(
    supervisor: Supervisor, tmp_path: Path
) -> None:
    child = await supervisor.start(spec_of(tmp_path, "sleep", module=BAD))
    assert not is_forked(child) and await exit_code(child) == 1
    assert "a library is missing" in child.spec.log_path.read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_without_the_server_all_goes_on(
    supervisor: Supervisor, tmp_path: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "FORK_S", 0.5)
    server = supervisor.fork_server
    assert server is not None and server.pid is not None
    old = await supervisor.start(spec_of(tmp_path, "sleep", name="old"))
    await said(old)
    await asyncio.sleep(0.2)  # everything is loaded
    before = server.pid
    os.kill(before, number)
    new = await supervisor.start(spec_of(tmp_path, "sleep", name="new"))
    assert (await said(new))["who"] == "new"
    assert old.is_alive, "what it has forked lives on"
    os.kill(old.pid, signal.SIGKILL)
    assert await exit_code(old) == -signal.SIGKILL, "its end is noticed without the server"
    assert server.pid not in (None, before), "another one was started"
    async with asyncio.timeout(WITHIN_S):
        while not is_forked(await supervisor.start(spec_of(tmp_path, "exit 0", name="later"))):
            await asyncio.sleep(0.1)


async def test_a_stop_ends_children_and_server(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": PATH}
    async with Supervisor() as supervisor:
        supervisor.start_fork_server(ForkServerClient({GOOD: [GOOD]}, log_path=tmp_path / "server.log"), env=env)
        child = await supervisor.start(spec_of(tmp_path, "sleep"))
        await said(child)
        assert supervisor.fork_server is not None
        pids = {child.pid, supervisor.fork_server.pid}
    assert not table.marked(supervisor.stack_id)
    assert not any(table.is_running(pid) for pid in pids if pid)


def test_who_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [*stack.NEEDS, "somebody.else"]
    assert list(stack.needs(wanted, {})) == list(stack.NEEDS)
    assert stack.needs(wanted, {stack.VARIABLE: "0"}) == {}
    monkeypatch.setattr(stack, "GPUS", ("/dev/null",))
    assert set(stack.needs(wanted, {})) == set(stack.NEEDS) - set(stack.WITH_TORCH)
