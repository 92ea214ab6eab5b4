"""The supervisor against real processes: obedient ones, stubborn ones, and ones that start others."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from millrace.errors import NotFoundError
from millrace.processes import table
from millrace.processes.reaper import TERM_GRACE_S
from millrace.processes.supervisor import ProcessSpec, Supervisor, tail
from millrace_testing.local.programs import OBEDIENT, PARENT, STUBBORN, spec, until_up
from millrace_testing.patience import patient


def grandchild(directory: Path, name: str) -> int:
    return int(next(line for line in tail(directory / f"{name}.log") if len(line.split()) == 2).split()[1])


async def test_stop_leaves_nothing_behind(tmp_path):
    async with Supervisor(term_grace_s=1.0) as supervisor:
        await supervisor.start(spec("obedient", OBEDIENT, tmp_path))
        await supervisor.start(spec("stubborn", STUBBORN, tmp_path))
        await supervisor.start(spec("parent", PARENT, tmp_path))
        await until_up(tmp_path, "obedient", "stubborn", "parent")
        pids = [child.pid for child in supervisor.children.values()] + [grandchild(tmp_path, "parent")]
        assert all(table.is_running(pid) for pid in pids)
        began = time.monotonic()
    assert time.monotonic() - began < 6
    assert not [pid for pid in pids if table.is_running(pid)]
    assert table.marked(supervisor.stack_id) == set()
    assert supervisor.children["obedient"].process.returncode == -signal.SIGTERM
    assert supervisor.children["stubborn"].process.returncode == -signal.SIGKILL


async def test_tiers_stop_in_order_and_hurry_skips_the_grace(tmp_path):
    async with Supervisor(term_grace_s=60.0) as supervisor:
        await supervisor.start(spec("redis", OBEDIENT, tmp_path, tier=0))
        await supervisor.start(spec("stubborn", STUBBORN, tmp_path))
        await until_up(tmp_path, "redis", "stubborn")
        began = time.monotonic()
        stop = asyncio.create_task(supervisor.stop())
        await asyncio.sleep(0.3)
        assert supervisor.children["redis"].is_alive and supervisor.children["stubborn"].is_alive
        supervisor.skip_grace.set()
        await stop
        assert time.monotonic() - began < patient(6)


async def test_death_is_reported_with_name_code_and_last_lines(tmp_path):
    async with Supervisor() as supervisor:
        await supervisor.start(spec("obedient", OBEDIENT, tmp_path))
        await supervisor.start(spec("trainer", "print('loading'); raise SystemExit('no such model: x')", tmp_path))
        async with asyncio.timeout(20):
            error = await supervisor.wait_death()
    assert error.process_name == "trainer" and error.exit_code == 1
    assert "trainer died: exit code 1" in error.message
    assert "  | no such model: x" in error.message
    assert str(tmp_path / "trainer.log") in (error.remedy or "")


async def test_death_by_signal_is_named(tmp_path):
    async with Supervisor() as supervisor:
        child = await supervisor.start(spec("engine", OBEDIENT, tmp_path))
        os.kill(child.pid, signal.SIGKILL)
        async with asyncio.timeout(20):
            assert "engine died: signal SIGKILL" in (await supervisor.wait_death()).message


async def test_missing_program(tmp_path):
    async with Supervisor() as supervisor:
        broken = ProcessSpec(name="redis", argv=["/nowhere/valkey"], env={}, log_path=tmp_path / "redis.log")
        with pytest.raises(NotFoundError, match="cannot start redis: /nowhere/valkey does not exist"):
            await supervisor.start(broken)


async def test_running_again_works(tmp_path):
    for _ in range(2):
        async with Supervisor(term_grace_s=2.0) as supervisor:
            await supervisor.start(spec("obedient", OBEDIENT, tmp_path))
            await until_up(tmp_path, "obedient")
        assert table.marked(supervisor.stack_id) == set()


HOST = """
import asyncio, sys
from pathlib import Path
from millrace_testing.local.programs import OBEDIENT, PARENT, STUBBORN, spec, until_up
from millrace.processes.supervisor import Supervisor

async def main():
    directory = Path({directory!r})
    async with Supervisor(stack_id="{stack}") as supervisor:
        await supervisor.start(spec("obedient", OBEDIENT, directory))
        await supervisor.start(spec("stubborn", STUBBORN, directory))
        await supervisor.start(spec("parent", PARENT, directory))
        await until_up(directory, "obedient", "stubborn", "parent")
        print("ready", flush=True)
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_sigkill_of_the_supervisor_leaves_nothing_behind(tmp_path):
    stack = f"test-{os.getpid()}-{time.monotonic_ns()}"
    code = HOST.format(directory=str(tmp_path), stack=stack)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline().strip() == "ready"
        assert len(table.marked(stack)) == 4
        host.send_signal(signal.SIGKILL)
    ends = time.monotonic() + TERM_GRACE_S + table.KILL_WAIT_S
    while table.marked(stack) and time.monotonic() < ends:
        time.sleep(0.05)
    assert table.marked(stack) == set()


TELLS = """
import signal, sys, time
def told(*_):
    print("TERM", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, told)
print("up", flush=True)
time.sleep(600)
"""
# Leads a group, has a child in a session of its own (as env-servers have), and takes a while to end.
LINGERS = f"""
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {TELLS!r}], start_new_session=True)
def asked(*_):
    time.sleep(0.5)
    print("child", child.poll(), flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, asked)
print("parent", flush=True)
time.sleep(600)
"""


def test_only_leaders_are_asked_and_the_rest_is_killed_once_they_are_gone(tmp_path):
    """A child that ended before its parent would be news to it: an env-server would suspect the task of a worker."""
    stack = f"test-{os.getpid()}-{time.monotonic_ns()}"
    with subprocess.Popen(
        [sys.executable, "-c", LINGERS],
        env={**os.environ, table.STACK_MARK: stack},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert {process.stdout.readline(), process.stdout.readline()} == {"up\n", "parent\n"}
        groups = {process.pid: table.start_ticks(process.pid)}
        began = time.monotonic()
        assert table.end_all(stack, groups, term_grace_s=20.0) == set()
        assert time.monotonic() - began < 10  # the child was not waited for
        assert process.stdout.read() == "child None\n"  # it lived when its parent ended, and was never asked
    assert process.returncode == 0


def test_group_members_are_found_when_the_marker_is_gone(tmp_path):
    """Valkey overwrites its environment to set its title; its process group still finds it."""
    clean = {key: value for key, value in os.environ.items() if key != table.STACK_MARK}
    process = subprocess.Popen([sys.executable, "-c", OBEDIENT], env=clean, start_new_session=True, stdout=-3)
    try:
        ticks = table.start_ticks(process.pid)
        assert table.members({process.pid: ticks}) == {process.pid}
        assert table.members({process.pid: ticks + 1}) == set()  # a reused pid is somebody else's
        assert table.end_all("no-such-stack", {process.pid: ticks}, term_grace_s=2.0) == set()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.wait(60)
    assert process.returncode == -signal.SIGTERM
