"""Keeps a process going that writes a run somewhere else while it goes on. Nothing of the run waits for it."""

import asyncio
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, MillraceError
from millrace.processes import sessions
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

STOP_S = 3.0
"""How long a run that has ended waits for its exporter where this process stops."""
_RESTART = Backoff(1.0, 60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Destination:
    """Where a process writes to, and how the run's events call what goes wrong with it."""

    module: str
    """What runs, see `millrace.readers.exports.process`."""
    name: str
    """In words, such as `W&B`."""
    reasons: str
    """What the reasons of its warnings begin with, such as `WANDB`."""
    rest: str
    """What may be done where a run ended before everything was taken."""
    finish_s: float
    """How long a run that has ended waits for that."""


WANDB = Destination(
    module="millrace.readers.exports.live",
    name="W&B",
    reasons="WANDB",
    rest="`millrace run export RUN --to wandb` writes the rest",
    finish_s=60.0,
)


class Exporter:
    """The exporter of one run, to one destination."""

    def __init__(
        self,
        run: str,
        destination: Destination,
        *,
        tell: Callable[[str, str], Awaitable[object]],
        log_path: Path | None = None,
    ) -> None:
        """`tell` gets the reason and the text of what somebody has to mend, once until all is well again.

        What foreign libraries print goes to `log_path`, or where ours goes.
        """
        self._log_path = log_path
        self._run = run
        self._to = destination
        self._tell_user = tell
        self._process: asyncio.subprocess.Process | None = None
        self._wait = waits.LastingWait()
        self._told: set[str] = set()
        self._is_refused = False
        self._done = asyncio.Event()
        self._is_ending = False
        self._task: asyncio.Task[None] | None = None

    def start(self, **order: Any) -> None:
        """Begin; the process gets the order, the run's name, and to know that it is told the end of the run."""
        order |= {"run": self._run, "is_told": True}
        self._task = asyncio.create_task(self._keep(order), name=f"export of {self._run} to {self._to.name}")

    async def finish(self) -> None:
        """The run has ended: let the rest be written, for a while; for a moment only where nothing is taken anyway."""
        if self._task is None:
            return
        self._begin_end()
        limit_s = STOP_S if self._is_refused else self._to.finish_s
        taking = waits.waiting(f"{self._to.name} to take the rest of the run", deadline_s=limit_s)
        with contextlib.suppress(TimeoutError), taking:
            async with asyncio.timeout(limit_s):
                await self._done.wait()
        if not self._done.is_set():
            logger.warning(
                "not everything of the run was exported",
                extra={"run": self._run, "to": self._to.name, "remedy": self._to.rest},
            )

    async def close(self, *, has_ended: bool = False) -> None:
        """End the process; what it has not written is left to the next one, and there is none where the run has ended.

        Then what a moment allows is written.
        """
        if self._task is None:
            return
        if has_ended:
            self._begin_end()
        if self._is_ending and not self._done.is_set():
            await asyncio.wait((asyncio.create_task(self._done.wait()),), timeout=STOP_S)
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=STOP_S)
        self._wait.over()

    async def _keep(self, order: dict[str, Any]) -> None:
        deaths = 0
        while not self._done.is_set():
            try:
                await self._once(order)
            except OSError as error:
                logger.warning("the exporter cannot be started", extra={"error": str(error)})
            except Exception:  # the edge of this task, which nobody awaits before the run ends: said, and tried again
                logger.exception("the exporter failed", extra={"run": self._run, "to": self._to.name})
            if not self._done.is_set():
                deaths += 1
                self._wait.on(f"the exporter to {self._to.name} to be started again", key="restart")
                text = f"the process that writes to {self._to.name} died; it is started again"
                await self._tell(f"{self._to.reasons}_EXPORTER_DIED", text)
                await asyncio.sleep(_RESTART.after(deaths))
        self._wait.over()

    async def _once(self, order: dict[str, Any]) -> None:
        """Run one process to its end."""
        with contextlib.ExitStack() as stack:
            process = await sessions.start(
                [sys.executable, "-m", self._to.module],
                env=None,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=None if self._log_path is None else stack.enter_context(self._log_path.open("ab")),
            )
        self._process = process
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(order).encode() + b"\n")
            if self._is_ending:
                self._end_process()
            async for report in _reports(process):
                await self._heard(report)
            await process.wait()
        finally:
            self._process = None
            sessions.kill_group(process.pid)
            await asyncio.wait((asyncio.create_task(process.wait()),), timeout=STOP_S)

    def _begin_end(self) -> None:
        if not self._is_ending:
            self._is_ending = True
            self._end_process()

    def _end_process(self) -> None:
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.write(b"end\n")

    async def _heard(self, report: dict[str, Any]) -> None:
        """Show as a wait what the process waits for, and say in the log of the run what somebody has to mend."""
        state, reason, text = (str(report.get(name, "")) for name in ("state", "reason", "text"))
        self._is_refused = state == "waiting" or (self._is_refused and state == "opening")
        if state == "opening":
            self._wait.on(f"{self._to.name} to open the run", key="opening")
        elif state == "waiting":
            self._wait.on(f"{self._to.name}: {text[:300]}", key="waiting")
            said = f"nothing reaches {self._to.name}, the run goes on without it: {text}"
            await self._tell(reason or f"{self._to.reasons}_UNREACHABLE", said)
        elif state == "done":
            self._done.set()
        else:
            self._wait.over()
            self._told.clear()

    async def _tell(self, reason: str, text: str) -> None:
        """One event per reason, until W&B answers again."""
        if reason in self._told or self._is_ending:
            return
        self._told.add(reason)
        with contextlib.suppress(MillraceError):
            await self._tell_user(reason, text)


async def _reports(process: asyncio.subprocess.Process) -> AsyncIterator[dict[str, Any]]:
    """What the process says; lines that are no reports are foreign output."""
    assert process.stdout is not None
    while True:
        try:
            line = await process.stdout.readline()
        except ValueError:  # longer than a line may be
            continue
        if not line:
            return
        if (report := decode_report(line)) is not None:
            yield report


# What the exporter of a run says to the orchestrator: JSON lines.


def decode_report(line: bytes) -> dict[str, Any] | None:
    """The report of a line; None for what a foreign library has written in between."""
    try:
        return decode_object(line, what="a report of the exporter", reason="REPORT_UNREADABLE")
    except CorruptObjectError:
        return None
