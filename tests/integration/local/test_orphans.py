"""A stack loses its reaper, its supervisor, or both at once: nothing trains on, and no two stacks share a directory.

Real processes: the services are the small fakes of this folder, the Redis is a real one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.processes import table
from millrace_testing import patience
from millrace_testing.local.stack_commands import environment, free_port, leftovers
from millrace_testing.polling import block_until

GONE_WITHIN_S = 10.0
"""The promise: what has neither supervisor nor reaper has ended."""
OF_STACK = 9
"""The command, its reaper, the fork server, five processes, an environment's worker."""


class Up:
    """`millrace up` in a directory."""

    def __init__(self, project: Path, directory: Path, output: Path) -> None:
        self.directory, self.output = directory, output
        ports = ["--listen", f"127.0.0.1:{free_port()}", "--http-port", str(free_port())]
        with output.open("w") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millrace_testing.local.fake_cli", "up", "--dir", str(directory), *ports],
                cwd=project,
                env=environment(project),
                stdout=sink,
                stderr=sink,
            )

    def ready(self) -> "Up":
        block_until(
            lambda: self.process.poll() is not None or self._place().get("pid") == self.process.pid, what="a stack"
        )
        assert self.process.poll() is None, self.output.read_text()
        return self

    def _place(self) -> dict:
        path = self.directory / "stack.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def pids(self) -> dict[str, int]:
        return self._place()["pids"]

    @property
    def reaper(self) -> psutil.Process:
        """Return the newest one: that of before may be about to be collected."""
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if child.status() != psutil.STATUS_ZOMBIE and "reaper.py" in _line(child)]
        assert len(found) == 1, found
        return found[0]

    def kill_both(self) -> None:
        """SIGKILL to supervisor and reaper; neither sees the other die."""
        watcher = self.reaper.pid
        os.kill(self.process.pid, signal.SIGSTOP)
        os.kill(watcher, signal.SIGKILL)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


@pytest.fixture
def up(tmp_path) -> Iterator:
    made: list[Up] = []

    def start() -> Up:
        made.append(Up(tmp_path, tmp_path / "stack", tmp_path / f"up-{len(made)}.out"))
        return made[-1]

    yield start
    for each in made:
        each.process.kill()
        each.process.wait(10)
    block_until(lambda: not leftovers(tmp_path), what="everything to end")


@pytest.mark.long
def test_a_killed_reaper_is_replaced_and_its_successor_knows_all_processes(up, tmp_path):
    stack = up().ready()
    for _ in range(2):
        before = stack.reaper
        before.kill()
        told = "the reaper died: signal SIGKILL; another one runs (pid "
        block_until(
            lambda before=before: psutil.Process(stack.process.pid).children() and _is_replaced(stack, before),
            what=told,
        )
    log = stack.directory / "logs" / "stack.log"
    block_until(lambda: log.read_text().count(told) >= 2, timeout_s=10, what="a line of the log per reaper")
    assert log.read_text().count(told) == 2
    stack.process.kill()
    stack.process.wait(10)
    block_until(lambda: not leftovers(tmp_path), what="all processes to end", timeout_s=15)


def _is_replaced(stack: Up, before: psutil.Process) -> bool:
    try:
        return stack.reaper.pid != before.pid
    except (AssertionError, psutil.Error):
        return False


def test_killed_together_everything_ends_and_the_next_stack_starts(up, tmp_path):
    first = up().ready()
    before = first.pids
    assert len(leftovers(tmp_path)) == OF_STACK
    first.kill_both()
    began = time.monotonic()
    second = up()  # on other ports, while what is left of the first still lives
    block_until(lambda: not any(map(table.is_running, before.values())), what="the first stack to end")
    print(f"gone after {time.monotonic() - began:.1f} s")
    assert time.monotonic() - began < patience.patient(GONE_WITHIN_S)
    second.ready()
    assert not set(second.pids.values()) & set(before.values())
    assert len(leftovers(tmp_path)) == OF_STACK, "of the first stack's environment's worker nothing is left either"


@pytest.mark.long
def test_what_cannot_notice_is_ended_by_the_next_stack_before_it_starts(up, tmp_path):
    first = up().ready()
    frozen = first.pids["trainer"]
    os.kill(frozen, signal.SIGSTOP)
    first.kill_both()
    second = up()
    redis = tmp_path / "stack" / "redis" / "redis.url"
    untouched = redis.read_text()
    while table.is_running(frozen):
        assert redis.read_text() == untouched, "a second Redis begins while something of the first stack lives"
        assert second.process.poll() is None, second.output.read_text()
        time.sleep(0.02)
    second.ready()
    said = second.output.read_text()
    assert f"waiting for what the killed stack (pid {first.process.pid}) has left behind: pid " in said
    trainer = f"pid {frozen} (millrace_testing.local.fake_trainer)"
    assert f"ending what the killed stack (pid {first.process.pid}) has left behind: {trainer}" in said
    assert len(leftovers(tmp_path)) == OF_STACK


@pytest.mark.long
def test_services_that_are_still_starting_end_as_well(up, tmp_path):
    first = up()
    block_until(lambda: len(leftovers(tmp_path)) >= 4, what="processes")
    first.kill_both()
    block_until(lambda: not leftovers(tmp_path), what="all processes to end", timeout_s=patience.patient(GONE_WITHIN_S))
    up().ready()
