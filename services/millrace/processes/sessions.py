"""A program that leads a session and process group of its own: start it, describe its end, kill its group.

So a Ctrl-C in the terminal reaches the parent alone, which decides about the order of the shutdown, and all that the
program has started can be signalled at once.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Protocol


class Process(Protocol):
    """A started process, of any parent: a program (`asyncio.subprocess.Process`) or a `ForkedProcess`."""

    @property
    def pid(self) -> int:
        """Of it, and of its session and process group."""
        ...

    @property
    def returncode(self) -> int | None:
        """None while it lives; negative: the signal that ended it."""
        ...

    async def wait(self) -> int:
        """Until it has ended."""
        ...

    def send_signal(self, signal: int, /) -> None:
        """ProcessLookupError if it has ended."""
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
    """Start a program with the environment `env` alone (None: that of this process), and no other open files."""
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
    """`exit code 17` or `signal SIGKILL`."""
    if returncode is None or returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"signal {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-returncode}"


def kill_group(leader: int) -> None:
    """SIGKILL the process group; that it is gone is fine."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
