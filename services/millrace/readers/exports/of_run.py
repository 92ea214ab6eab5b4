"""The exports of a run that its orchestrator keeps going (W&B, OpenTelemetry), and the keeper of their processes."""

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.backoff import Backoff
from millrace.decoding import decode_object
from millrace.errors import MillraceError
from millrace.processes.channel import ChildLink
from millrace.runlog.records.run_record import RunRecord
from millrace.storage.scratch import scratch_parent
from millrace.telemetry import waits

# Keeps a process going that writes a run somewhere else while it goes on. Nothing of the run waits for it.

logger = logging.getLogger(__name__)

STOP_S = 3.0
"""How long a run that has ended waits for its exporter where this process stops."""
MAX_REPORT_BYTES = 1 << 20
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
        warn: Callable[[str, str], Awaitable[object]],
        log_path: Path | None = None,
    ) -> None:
        """Create the keeper of one run's export; `run` is the run's name. Nothing starts before `start`.

        `warn` gets the reason and the text of a problem that a person has to solve, once until it is solved. What
        foreign libraries print is appended to `log_path`, or goes where ours goes.
        """
        self._log_path = log_path
        self._run = run
        self._to = destination
        self._warn_user = warn
        self._process: ChildLink | None = None
        self._wait = waits.LastingWait()
        self._warned: set[str] = set()
        self._is_refused = False
        self._done = asyncio.Event()
        self._is_ending = False
        self._task: asyncio.Task[None] | None = None

    def start(self, **order: Any) -> None:
        """Start the exporting process in the background, and again when it dies.

        It gets `order` (JSON) and the run's name, and later the end of the run.
        """
        order |= {"run": self._run, "is_ended_by_parent": True}
        self._task = asyncio.create_task(self._keep(order), name=f"export of {self._run} to {self._to.name}")

    async def finish(self) -> None:
        """Have the rest written, since the run has ended, and wait for that, at most `finish_s` seconds of the
        destination.

        The wait is `STOP_S` where the destination takes nothing. What is not written then is logged.
        """
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
        """End the exporting process; the next one writes what it has not written.

        If the run `has_ended`, wait `STOP_S` for it to write the rest first.
        """
        if self._task is None:
            return
        if has_ended:
            self._begin_end()
        if self._is_ending and not self._done.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._done.wait(), STOP_S)
        self._task.cancel()
        await asyncio.wait((self._task,), timeout=STOP_S)
        self._wait.over()

    async def _keep(self, order: dict[str, Any]) -> None:
        """Run the exporting process, and start it again when it dies, until it has written everything."""
        deaths = 0
        while not self._done.is_set():
            try:
                await self._once(order)
            except OSError as error:
                logger.warning("the exporter cannot be started", extra={"error": str(error)})
            except Exception:  # the edge of this task, which nobody awaits before the run ends: logged, and tried again
                logger.exception("the exporter failed", extra={"run": self._run, "to": self._to.name})
            if not self._done.is_set():
                deaths += 1
                self._wait.on(f"the exporter to {self._to.name} to be started again", key="restart")
                text = f"the process that writes to {self._to.name} died; it is started again"
                await self._warn_once(f"{self._to.reasons}_EXPORTER_DIED", text)
                await asyncio.sleep(_RESTART.after(deaths))
        self._wait.over()

    async def _once(self, order: dict[str, Any]) -> None:
        """Start one exporting process with this order, and handle its reports until it ends."""
        with contextlib.ExitStack() as stack:
            log = None if self._log_path is None else stack.enter_context(self._log_path.open("ab"))
            process = await ChildLink.start(self._to.module, order, stderr=log)
        self._process = process
        try:
            # The run may have ended while no process was there.
            if self._is_ending:
                self._end_process()
            while (data := await process.receive(most=MAX_REPORT_BYTES)) is not None:
                report = decode_object(data, what="a report of the exporter", reason="REPORT_UNREADABLE")
                await self._handle_report(report)
        finally:
            self._process = None
            # Also after an orderly end: libraries such as W&B's start processes of their own.
            await process.end()

    def _begin_end(self) -> None:
        """Note that the run has ended, and say so to the process, once."""
        if not self._is_ending:
            self._is_ending = True
            self._end_process()

    def _end_process(self) -> None:
        """Tell the process, if there is one, that the run has ended: a frame after the order says so."""
        if self._process is not None:
            self._process.post(b"end")

    async def _handle_report(self, report: dict[str, Any]) -> None:
        """Handle a report of the process: register what it waits for as a wait, and warn of what a person has to solve.

        The state "done" ends the export. With any state that is none of "opening", "waiting" and "done", the wait is
        over, and a problem that comes again is warned of again.
        """
        state, reason, text = (str(report.get(name, "")) for name in ("state", "reason", "text"))
        self._is_refused = state == "waiting" or (self._is_refused and state == "opening")
        if state == "opening":
            self._wait.on(f"{self._to.name} to open the run", key="opening")
        elif state == "waiting":
            self._wait.on(f"{self._to.name}: {text[:300]}", key="waiting")
            message = f"nothing reaches {self._to.name}, the run goes on without it: {text}"
            await self._warn_once(reason or f"{self._to.reasons}_UNREACHABLE", message)
        elif state == "done":
            self._done.set()
        else:
            self._wait.over()
            self._warned.clear()

    async def _warn_once(self, reason: str, text: str) -> None:
        """Warn with a reason and a text, once for each reason until the destination takes rows again."""
        if reason in self._warned or self._is_ending:
            return
        self._warned.add(reason)
        with contextlib.suppress(MillraceError):
            await self._warn_user(reason, text)


TRACES = Destination(
    module="millrace.readers.exports.traces",
    name="the collector of traces",
    reasons="TRACES",
    rest="nothing: the traces of the last steps are lost",
    finish_s=30.0,
)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


class RunExports:
    """What is exported of one run under one claim, as its config and the environment say."""

    def __init__(
        self, record: RunRecord, *, store_url: str, prefix: str, warn: Callable[[str, str], Awaitable[object]]
    ) -> None:
        """Start the exports that the run's config and the environment ask for.

        `warn` gets the reason and the text of what somebody has to change.
        """
        self._running: list[Exporter] = []
        self._order = {"store_url": store_url, "prefix": prefix, "uid": record.uid}
        self._warn = warn
        config = record.config or {}
        if config.get("wandb"):
            directory = _directory(config, record.name, record.uid)
            self._start(record.name, WANDB, config=config, directory=str(directory))
        if traces_wanted(os.environ):
            self._start(record.name, TRACES)

    def _start(self, run: str, destination: Destination, **order: Any) -> None:
        """Start the export of the run called `run` to one destination; `order` is added to what its process gets."""
        exporter = Exporter(run, destination, warn=self._warn)
        exporter.start(**self._order, **order)
        self._running.append(exporter)

    async def finish(self) -> None:
        """Have the exports write the rest, since the run has ended, and wait a bounded time for that."""
        await asyncio.gather(*(exporter.finish() for exporter in self._running))

    async def close(self, *, has_ended: bool) -> None:
        """End the exporting processes; if the run has ended, what a moment allows is written first."""
        await asyncio.gather(*(exporter.close(has_ended=has_ended) for exporter in self._running))


def traces_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether OpenTelemetry's variables name an endpoint or exporter for traces, and do not disable it."""
    exporter = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return False
    return bool(exporter) or any(environ.get(name) for name in _ENDPOINTS)


def _directory(config: dict[str, Any], run: str, uid: str) -> Path:
    """Return the directory of W&B's own files: that of the run's results, if it is here and WANDB_DIR is not set.

    Else it is the directory `uid` below WANDB_DIR, or below the scratch directory. `run` is the run's name.
    """
    results = Path(str(config.get("output_dir") or "outputs")) / run
    if "WANDB_DIR" not in os.environ and results.is_dir():
        return results
    return Path(os.environ.get("WANDB_DIR") or scratch_parent() / "wandb") / uid
