"""How the end of a worker is told, and what its processes use."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import psutil
import pytest

from millrace.env_server.isolation import limits as census
from millrace.env_server.isolation.limits import NO_LIMITS, Usage, WorkerLimits, describe_death
from millrace.env_server.isolation.limits import DeathCause as Cause
from millrace.processes.table import kill_session
from millrace_testing.polling import block_until


@pytest.mark.parametrize(
    ("returncode", "killed", "cause", "how"),
    [
        (3, None, Cause.ITSELF, "exit code 3, peak memory 200 MiB"),
        (-11, None, Cause.ITSELF, "killed by SIGSEGV, peak memory 200 MiB"),
        (-9, None, Cause.OUTSIDE, "killed by SIGKILL, peak memory 200 MiB"),
        (-15, None, Cause.ASKED, "killed by SIGTERM, peak memory 200 MiB"),
        (
            -9,
            (Cause.LIMIT, "ended by its memory limit"),
            Cause.LIMIT,
            "ended by its memory limit, peak memory 200 MiB",
        ),
        (-9, (Cause.FROZEN, "frozen"), Cause.FROZEN, "frozen, peak memory 200 MiB"),
    ],
)
def test_a_death_names_exit_code_or_signal_and_memory(returncode, killed, cause, how) -> None:
    death = describe_death(returncode, killed=killed, peak_bytes=200 << 20)
    assert (death.cause, death.how) == (cause, how)
    assert death.is_from_outside == (cause in (Cause.FROZEN, Cause.OUTSIDE, Cause.ASKED))


def test_limits_name_themselves() -> None:
    limits = WorkerLimits(memory_bytes=1 << 30, max_processes=3)
    assert limits.exceeded_by(Usage(num_processes=3, rss_bytes=1 << 30)) == ""
    assert limits.exceeded_by(Usage(num_processes=4)) == (
        "ended by its limit of processes: it had 4 and MILLRACE_ENV_MAX_PROCESSES is 3"
    )
    assert NO_LIMITS.exceeded_by(Usage(num_processes=10_000, rss_bytes=1 << 50)) == ""


def test_shared_pages_count_once() -> None:
    """Many copies of one process are no reason to end it: their resident memory is the same pages."""
    own = Path("/proc/self/statm").read_text().split()
    rss = int(own[1]) * os.sysconf("SC_PAGE_SIZE")
    limits = WorkerLimits(memory_bytes=8 * rss)
    assert limits.exceeded_by(Usage(num_processes=1, rss_bytes=9 * rss, pids=(os.getpid(),))) == ""
    assert "ended by its memory limit: it held" in WorkerLimits(memory_bytes=1 << 20).exceeded_by(
        Usage(num_processes=1, rss_bytes=rss, pids=(os.getpid(),))
    )


@pytest.mark.parametrize(("call", "is_ready"), [("while True: pass", True), ("time.sleep(600)", False)])
def test_a_process_that_computes_is_ready_to_run_and_one_that_sleeps_is_not(call: str, is_ready: bool) -> None:
    """Whether or not it gets a processor: a busy machine is no reason to take a computing call for one that waits."""
    code = f"import time\nprint('up', flush=True)\n{call}"
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None and process.stdout.readline()
        block_until(lambda: census.Census().usage(process.pid).is_ready is is_ready)
        assert [census.Census().usage(process.pid).is_ready for _ in range(5)] == [is_ready] * 5
    finally:
        kill_session(process.pid)
        process.wait()


async def test_children_that_left_the_session_are_counted_and_ended() -> None:
    """A session leader with a child in its session, and one in a session of its own."""
    code = (
        "import subprocess, sys, time\n"
        "for new in (False, True):\n"
        "    subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=new)\n"
        "print('up', flush=True)\n"
        "time.sleep(600)\n"
    )
    leader = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert leader.stdout is not None
        await asyncio.to_thread(leader.stdout.readline)
        usage = census.Census().usage(leader.pid)
        assert usage.num_processes == 3 and usage.rss_bytes > 3 << 20 and leader.pid in usage.pids
    finally:
        await asyncio.to_thread(kill_session, leader.pid)
        leader.wait()
    assert leader.returncode == -9
    assert census.Census().usage(leader.pid).num_processes == 0
    for pid in usage.pids:
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z"


async def test_no_child_is_left_of_a_process_that_starts_others_while_it_is_ended() -> None:
    """Each leaves the session: whoever is started after the last look would be nobody's once its parent is dead."""
    mark = f"sleeper-{uuid4().hex}"
    sleeper = f"import time; time.sleep(120)  # {mark}"
    code = (
        "import os, sys\n"
        "for number in range(400):\n"
        "    if number == 30: print('up', flush=True)\n"
        f"    os.posix_spawn(sys.executable, [sys.executable, '-S', '-c', {sleeper!r}], os.environ, setsid=True)\n"
        "os.wait()\n"
    )
    leader = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)

    def sleepers() -> list[int]:
        found = [p for p in psutil.process_iter(["cmdline", "status"]) if mark in " ".join(p.info["cmdline"] or [])]
        return [p.pid for p in found if p.info["status"] != psutil.STATUS_ZOMBIE and p.pid != leader.pid]

    try:
        assert leader.stdout is not None
        await asyncio.to_thread(leader.stdout.readline)
        await asyncio.to_thread(kill_session, leader.pid)
        leader.wait(timeout=60)
        assert sleepers() == []
    finally:
        for pid in sleepers():
            os.kill(pid, signal.SIGKILL)
