"""A program that leads a session and process group of its own: start it, describe its end, kill its group.

So a Ctrl-C in the terminal reaches the parent alone, which decides about the order of the shutdown, and all that the
program has started can be signalled at once.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol


class Process(Protocol):
    """A started process, of any parent: a program (`asyncio.subprocess.Process`) or a `ForkedProcess`."""

    @property
    def pid(self) -> int:
        """Return the pid, which is that of the session and process group, too."""
        ...

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended it; None while it lives."""
        ...

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code, or minus the number of the signal."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """Send the signal; ProcessLookupError if the process has ended."""
        ...


async def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int | IO[bytes] | None = None,
    stderr: int | IO[bytes] | None = None,
    pass_fds: Sequence[int] = (),
) -> asyncio.subprocess.Process:
    """Start a program in a session and process group of its own, and return it; `argv[0]` is the program.

    It has the environment `env` alone (None: that of this process), the files `pass_fds` and no others. Its input is
    empty by default; output and error go where ours go. Raises FileNotFoundError if there is no such program.
    """
    return await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        pass_fds=tuple(pass_fds),
    )


def describe_exit(returncode: int | None) -> str:
    """Return a process's return code in words, such as `exit code 17`, or `signal SIGKILL` for -9."""
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-returncode}"


def kill_group(leader: int) -> None:
    """Send SIGKILL to the process group of this leader (its pid).

    A group that is gone, or another user's, is no error.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


# Has the kernel signal this process when its parent dies, however that dies (Linux; elsewhere nothing is asked for).
#
# As a program it becomes another one that is asked to end (SIGTERM) when the process that started this one is gone:
#
# python -I -S sessions.py PARENT_PID PROGRAM ARGUMENTS...
#
# That is for programs that are not ours and know no lifeline, such as Redis, started from a process with the threads
# of gRPC, in which no fork hook may run; what is asked for in between outlives the exec. By "parent" the kernel means
# the thread that started the process: it has to live as long as that.

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec only async-signal-safe work is allowed.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Have the kernel send this process the signal `number` when its parent dies; do nothing except on Linux.

    `parent` is the process id that the parent should have: if it is no longer the parent, exit at once. May be called
    as `preexec_fn`. Raises OSError if the kernel refuses.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # Compared after the request: a parent that died before it causes no signal.
    if parent is not None and os.getppid() != parent:
        os._exit(128 + number)  # the parent, which would read a message, is gone


def main(parent: str, program: str, *arguments: str) -> None:
    """Replace this process by `program` with `arguments`; the kernel sends it SIGTERM when the process `parent` (a pid)
    ends.

    Exits with a message if `parent` has ended already.
    """
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before the kernel was asked
        sys.exit("the process that started this one has ended")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
