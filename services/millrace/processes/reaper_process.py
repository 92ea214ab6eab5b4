"""The reaper's process, seen from the supervisor: started before anything else, and replaced when it dies."""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence

from millrace.processes import reaper, sessions
from millrace.processes.table import KILL_WAIT_S

_AGAIN_S = 1.0
"""Between two reapers of which the first did not even live that long."""


class WatchedReaper:
    """Keeps one reaper running that knows every process group. A dead one is replaced at once."""

    def __init__(
        self,
        stack_id: str,
        *,
        groups: Callable[[], dict[int, int]],
        note: Callable[[str], None],
        kept_open: Sequence[int],
    ) -> None:
        """`groups` are the leaders to tell a new one, with their start ticks; `note` is told of each that died.

        `kept_open` are files that it keeps open: the directory's lock, and the write end of the lifeline.
        """
        self._stack_id = stack_id
        self._groups = groups
        self._note = note
        self._kept_open = tuple(kept_open)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None before `start`."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start it, and look after it until `end`."""
        self._process = await self._spawn()
        self._watch = asyncio.create_task(self._replace(), name="watch of the reaper")

    def tell(self, line: str) -> None:
        """Say one line to it. One that has just died is told by what its successor is given."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())

    async def end(self, *, is_done: bool) -> None:
        """Let it go; without `is_done` it ends what is left of the stack. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        if is_done:
            process.stdin.write(b"done\n")
        process.stdin.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(reaper.TERM_GRACE_S + KILL_WAIT_S + 1):
                await process.wait()

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await sessions.start(
            [sys.executable, "-I", reaper.__file__, self._stack_id],
            env=None,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=self._kept_open,
        )
        assert process.stdin is not None
        for leader, ticks in self._groups().items():
            process.stdin.write(f"add {leader} {ticks}\n".encode())
        return process

    async def _replace(self) -> None:
        loop = asyncio.get_running_loop()
        # unregistered wait: a pause between two reapers of which the first died at once; it is noted
        while self._process is not None:
            began = loop.time()
            code = await self._process.wait()
            how = sessions.describe_exit(code)
            if loop.time() - began < _AGAIN_S:
                await asyncio.sleep(_AGAIN_S)
            try:
                self._process = await self._spawn()
            except OSError as error:  # out of processes or memory: until it works, only the services watch
                self._note(f"the reaper died: {how}, and cannot be started again: {error.strerror}")
                await asyncio.sleep(_AGAIN_S)
                continue
            self._note(f"the reaper died: {how}; another one runs (pid {self._process.pid})")
