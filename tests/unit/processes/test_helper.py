"""A process that works for another one: questions, shared memory, and every way in which one of the two ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from millrace.processes.channel import HelperDiedError, HelperProcess
from millrace.processes.shared_memory import SharedMemory
from millrace.processes.table import is_running
from millrace_testing.polling import until

MODULE = "millrace_testing.echo_helper"
SILENT_S = 60.0


@pytest.fixture
def helper() -> Iterator[HelperProcess]:
    started = HelperProcess.start(MODULE, env=os.environ)
    yield started
    started.close()


def test_questions_of_any_length_are_answered_in_order(helper: HelperProcess) -> None:
    for text in ("ü", "x" * (1 << 20), ""):
        assert helper.ask({"do": "echo", "text": text}, silent_s=SILENT_S) == {"echo": text}


def test_what_one_process_writes_the_other_reads(helper: HelperProcess) -> None:
    memory = SharedMemory()
    first, small = memory.allocate(5)
    _, large = memory.allocate(80 << 20)  # a segment of its own
    second, last = memory.allocate(6)
    small[:], last[:] = b"begin", b"behind"
    large[-1:] = b"x"
    for at, length, text in ((first, 5, "begin"), (second, 6, "behind")):
        question = {"do": "read", "size_bytes": memory.size_bytes, "at": at, "length": length}
        assert helper.ask(question, [memory.fileno()], silent_s=SILENT_S) == {"echo": text}
    memory.close()
    memory.close()
    assert bytes(small) == b"begin"  # what is mapped stays


def test_it_beats_while_it_works(helper: HelperProcess) -> None:
    beats: list[object] = []
    helper.ask({"do": "sleep", "seconds": 0.5}, silent_s=SILENT_S, on_beat=beats.append)
    assert beats and beats[0] == {"busy": True}


def test_a_kill_under_a_question_is_told(helper: HelperProcess) -> None:
    helper.ask({"do": "echo", "text": ""}, silent_s=SILENT_S)
    threading.Timer(0.3, os.kill, (helper.pid, signal.SIGTERM)).start()
    with pytest.raises(HelperDiedError, match="signal SIGTERM"):
        helper.ask({"do": "sleep", "seconds": 600}, silent_s=SILENT_S)


def test_an_exit_and_an_end_before_the_question_are_told(helper: HelperProcess) -> None:
    for _ in range(2):
        with pytest.raises(HelperDiedError, match="exit code 7"):
            helper.ask({"do": "exit", "code": 7}, silent_s=SILENT_S)


def test_one_that_is_stopped_is_killed(helper: HelperProcess) -> None:
    helper.ask({"do": "echo", "text": ""}, silent_s=SILENT_S)
    os.kill(helper.pid, signal.SIGSTOP)
    with pytest.raises(HelperDiedError, match=r"said nothing for 0\.5 s and was killed"):
        helper.ask({"do": "echo", "text": ""}, silent_s=0.5)
    assert not is_running(helper.pid)


def test_who_asks_hears_that_it_was_ended(helper: HelperProcess) -> None:
    helper.ask({"do": "echo", "text": ""}, silent_s=SILENT_S)
    threading.Timer(0.3, helper.end).start()
    with pytest.raises(HelperDiedError, match="signal SIGKILL"):
        helper.ask({"do": "sleep", "seconds": 600}, silent_s=SILENT_S)


async def test_it_dies_with_its_parent_in_the_middle_of_its_work() -> None:
    code = (
        "import os, sys, threading; from millrace.processes.channel import HelperProcess\n"
        f"helper = HelperProcess.start({MODULE!r}, env=os.environ)\n"
        "helper.ask({'do': 'echo', 'text': ''}, silent_s=60)\n"
        "print(helper.pid, flush=True)\n"
        "helper.ask({'do': 'sleep', 'seconds': 600}, silent_s=600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    time.sleep(0.2)
    assert is_running(pid)
    parent.kill()
    parent.wait(10)
    await until(lambda: not is_running(pid), timeout_s=30)
