"""A stack's directory stays locked until the last process of the stack before is gone."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from millrace.errors import InvalidStateError
from millrace.local import directory
from millrace.local.directory import StackId, hold_directory, place_of
from millrace.processes import table

# Opens the lock and sleeps; `hold` also takes it.
PROGRAM = """
import fcntl, sys, time
file = open(sys.argv[1], "a+")
if sys.argv[2] == "hold":
    fcntl.flock(file, fcntl.LOCK_EX)
print("up", flush=True)
time.sleep(float(sys.argv[3]))
"""


def dead_stack(path: Path) -> StackId:
    """Return the id of a stack in the directory whose supervisor has ended."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    return StackId(supervisor=gone.pid, start_ticks=1, place=place_of(path), random="r")


@contextmanager
def leftover(path: Path, *, what: str = "hold", seconds: float = 60.0, mark: str = "") -> Iterator[subprocess.Popen]:
    environ = {**os.environ, table.STACK_MARK: mark} if mark else None
    command = [sys.executable, "-c", PROGRAM, str(path / ".lock"), what, str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def impatient(monkeypatch) -> None:
    monkeypatch.setattr(directory, "LEAVING_S", 1.0)
    monkeypatch.setattr(directory, "BEGIN_S", 0.3)


async def test_what_a_killed_stack_left_behind_is_waited_for_and_named(tmp_path) -> None:
    gone, notes = dead_stack(tmp_path), []
    (tmp_path / ".lock").write_text(str(gone))
    with leftover(tmp_path, seconds=1.0) as process:
        began = time.monotonic()
        (await hold_directory(tmp_path, StackId.new(tmp_path), note=notes.append)).close()
        assert time.monotonic() - began > 0.5
        assert process.wait(30) == 0, "it was given its time"
    (note,) = notes
    who = f"waiting for what the killed stack (pid {gone.supervisor}) has left behind: pid {process.pid} (python"
    assert note.startswith(who)


async def test_what_does_not_end_is_ended_and_named(tmp_path, impatient) -> None:
    gone, notes = dead_stack(tmp_path), []
    (tmp_path / ".lock").write_text(str(gone))
    with leftover(tmp_path) as process, leftover(tmp_path, what="only open") as waiting:
        os.kill(process.pid, signal.SIGSTOP)
        own = StackId.new(tmp_path)
        with await hold_directory(tmp_path, own, note=notes.append):
            assert process.wait(60) == -signal.SIGKILL
            assert (tmp_path / ".lock").read_text() == str(own)
            assert waiting.poll() is None, "who has the file open does not hold the lock"
    assert [note.partition(" what the")[0] for note in notes] == ["waiting for", "ending"]
    assert f"pid {process.pid} (" in notes[1]


async def test_a_living_stack_is_not_waited_for(tmp_path) -> None:
    living = StackId.new(tmp_path)
    with leftover(tmp_path) as process:
        (tmp_path / ".lock").write_text(str(living))
        with pytest.raises(InvalidStateError, match=f"another stack \\(pid {os.getpid()}\\) runs in"):
            await hold_directory(tmp_path, StackId.new(tmp_path), note=pytest.fail)
        assert process.poll() is None


async def test_a_process_that_got_the_number_of_the_supervisor_is_not_taken_for_it(tmp_path, impatient) -> None:
    reused = StackId(supervisor=os.getpid(), start_ticks=1, place=place_of(tmp_path), random="r")
    with leftover(tmp_path) as process:
        (tmp_path / ".lock").write_text(str(reused))
        (await hold_directory(tmp_path, StackId.new(tmp_path), note=lambda _: None)).close()
        assert process.wait(60) == -signal.SIGKILL


async def test_a_holder_that_does_not_say_who_it_is_is_left_alone(tmp_path, impatient) -> None:
    with leftover(tmp_path) as process:
        with pytest.raises(InvalidStateError, match=f"left behind: pid {process.pid} \\(") as caught:
            await hold_directory(tmp_path, StackId.new(tmp_path), note=pytest.fail)
        assert caught.value.reason == "STACK_RUNNING" and process.poll() is None


async def test_marked_leftovers_that_hold_no_lock_are_ended(tmp_path) -> None:
    notes: list[str] = []
    elsewhere = StackId.new(tmp_path / "another")
    with (
        leftover(tmp_path, what="only open", mark=str(dead_stack(tmp_path))) as marked,
        leftover(tmp_path, what="only open", mark=str(elsewhere)) as other,
    ):
        (await hold_directory(tmp_path, StackId.new(tmp_path), note=notes.append)).close()
        assert marked.wait(60) == -signal.SIGKILL and other.poll() is None
    assert len(notes) == 1 and f"pid {marked.pid} (" in notes[0]


async def test_a_removed_lock_file_does_not_let_a_second_stack_in(tmp_path) -> None:
    with leftover(tmp_path, mark=str(StackId.new(tmp_path))) as service:
        (tmp_path / ".lock").unlink()
        with pytest.raises(InvalidStateError, match=f"another stack \\(pid {os.getpid()}\\) runs in"):
            await hold_directory(tmp_path, StackId.new(tmp_path), note=pytest.fail)
        assert service.poll() is None


async def test_of_two_that_begin_at_once_one_gets_the_directory(tmp_path) -> None:
    async def begin() -> object:
        try:
            return await hold_directory(tmp_path, StackId.new(tmp_path), note=lambda _: None)
        except InvalidStateError as error:
            return error

    found = await asyncio.gather(*(begin() for _ in range(4)))
    refused = [each for each in found if isinstance(each, InvalidStateError)]
    assert len(refused) == 3 and all("another stack" in error.message for error in refused)
    for each in found:
        if not isinstance(each, InvalidStateError):
            each.close()  # type: ignore[attr-defined]


async def test_a_stack_that_takes_the_lock_meanwhile_is_not_ended_as_a_leftover(
    tmp_path, impatient, monkeypatch
) -> None:
    """Two stacks wait for what a third one has left behind. The slower one looks for it while the faster one begins."""
    lock, holders, other = tmp_path / ".lock", directory.holders, StackId.new(tmp_path)
    lock.write_text(str(dead_stack(tmp_path)))
    with leftover(tmp_path) as faster:

        def found(file) -> set[int]:
            pids = holders(file)
            lock.write_text(str(other))  # its supervisor is this process
            return pids

        monkeypatch.setattr(directory, "LEAVING_S", 0.0)
        monkeypatch.setattr(directory, "holders", found)
        with pytest.raises(InvalidStateError, match="another stack"):
            await hold_directory(tmp_path, StackId.new(tmp_path), note=lambda _: None)
        assert faster.poll() is None


async def test_a_stack_says_who_it_is_before_it_ends_leftovers(tmp_path) -> None:
    """Else who waits for the stack before takes this one for one of its leftovers."""
    lock, gone, said = tmp_path / ".lock", dead_stack(tmp_path), []
    lock.write_text(str(gone))
    own = StackId.new(tmp_path)
    with leftover(tmp_path, what="only open", mark=str(gone)):
        (await hold_directory(tmp_path, own, note=lambda _: said.append(lock.read_text()))).close()
    assert said == [str(own)]


async def test_a_stack_that_was_faster_is_seen_by_who_still_waits(tmp_path, impatient) -> None:
    """It has the lock, and its own processes hold it: they are no leftovers of the stack before."""
    lock = tmp_path / ".lock"
    lock.write_text(str(dead_stack(tmp_path)))
    with leftover(tmp_path) as faster:
        waiting = asyncio.create_task(hold_directory(tmp_path, StackId.new(tmp_path), note=lambda _: None))
        await asyncio.sleep(0.3)
        lock.write_text(str(StackId.new(tmp_path)))  # its supervisor is this process
        with pytest.raises(InvalidStateError, match="another stack"):
            await waiting
        assert faster.poll() is None
