"""A stack's directory stays locked until the last process of the stack before is gone."""

import subprocess
import sys
import time

import pytest

from millrace.errors import InvalidStateError
from millrace.local.directory import hold_directory

HOLD = (
    "import fcntl, sys, time; f = open(sys.argv[1], 'a+'); fcntl.flock(f, fcntl.LOCK_EX); print('held', flush=True); "
)


def _leftover(path, *, seconds: float) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", f"{HOLD}time.sleep({seconds})", str(path / ".lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


async def test_what_a_killed_stack_left_behind_is_waited_for(tmp_path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait(30)
    (tmp_path / ".lock").write_text(str(gone.pid))
    notes: list[str] = []
    with _leftover(tmp_path, seconds=1.0) as leftover:
        began = time.monotonic()
        (await hold_directory(tmp_path, note=notes.append)).close()
        assert time.monotonic() - began > 0.5
        leftover.wait(30)
    assert notes == [f"waiting for the processes of the stack before (pid {gone.pid}, killed) to end"]


async def test_a_living_stack_is_not_waited_for(tmp_path) -> None:
    with _leftover(tmp_path, seconds=30.0) as living:
        (tmp_path / ".lock").write_text(str(living.pid))
        with pytest.raises(InvalidStateError, match=f"another stack \\(pid {living.pid}\\) runs in"):
            await hold_directory(tmp_path, note=lambda _: None)
        living.kill()
