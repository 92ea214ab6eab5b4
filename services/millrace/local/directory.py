"""A directory is one stack's at a time: until its last process is gone, not only its supervisor."""

import asyncio
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from millrace.errors import InvalidStateError
from millrace.local.reaper import is_running
from millrace.telemetry import waits

LEFTOVERS_S = 20.0
"""Longest wait for what a killed stack has left behind; its reaper needs at most 8 s."""
_POLL_S = 0.1


async def hold_directory(directory: Path, *, note: Callable[[str], None]) -> IO[str]:
    """Lock the directory; InvalidStateError (STACK_RUNNING) if another stack has it.

    The lock is one of the kernel's on an open file that the supervisor's reaper shares (`Supervisor.kept_open`): after
    a SIGKILL of the supervisor it is held until the reaper has ended the processes, which still write to the same
    append-only file, store and spool. For that one waits, and says so.
    """
    file = (directory / ".lock").open("a+")
    ends = time.monotonic() + LEFTOVERS_S
    with waits.waiting("the processes of the stack before to end", waits_on="operator", deadline_s=LEFTOVERS_S):
        is_told = False
        while not _try(file):
            holder = _holder(file)
            if not holder.isdigit() or is_running(int(holder)) or time.monotonic() > ends:
                file.close()
                raise InvalidStateError(
                    f"another stack (pid {holder or 'unknown'}) runs in {directory}",
                    reason="STACK_RUNNING",
                    remedy="end it with Ctrl-C, or choose another directory",
                )
            if not is_told:
                note(f"waiting for the processes of the stack before (pid {holder}, killed) to end")
                is_told = True
            await asyncio.sleep(_POLL_S)
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(file: IO[str]) -> str:
    file.seek(0)
    return file.read().strip()
