"""From a claimed run to its closing header, whatever is played in between: recover, play, close, end.

    run ──▶ restore ──▶ STARTING ──▶ `_play`: environments ──▶ take over ──▶ RUNNING ──▶ everything is played
             │  closed already            │ pause: PAUSED, all is given back │ cancel         │
             └────────────────▶ end ◀─────┴──────────── STOPPING, closing header ◀────────────┘

The next driver, here or elsewhere, begins at the same place: nothing is handed over but the log.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar, TypeVar

from millrace.errors import ConflictError, InternalError, MillraceError, all_errors, is_of_storage
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.assembly import RunParts
from millrace.orchestrator.drive.housekeeping import Housekeeper
from millrace.orchestrator.drive.trainer_watch import TrainerFailedError
from millrace.orchestrator.intents import DesiredState
from millrace.orchestrator.play.failures import RolloutsFailedError
from millrace.race import first_of
from millrace.rollouts.types import Rollout
from millrace.runlog.records.run_record import load_origin
from millrace.runlog.recover import load_closings, load_history
from millrace.runlog.retention import RetentionRule
from millrace.telemetry import faults
from millrace.v1 import run_pb2

logger = logging.getLogger(__name__)

TRAINER_SPARE_S = 10.0
"""After a takeover past the closing header: how long a trainer that is not needed may take to show up."""

T = TypeVar("T")


class RunStoppedError(Exception):
    """The run was asked to end or to pause while something else was waited for. Never leaves this module."""


class RunDriver(ABC):
    """Drives one run under one epoch. `apply` may be called at any time."""

    PLAYED: ClassVar[str]
    """Why a run that succeeds changes to STOPPING."""
    WRITTEN: ClassVar[str]
    """Why it changes to SUCCEEDED."""

    def __init__(self, parts: RunParts) -> None:
        """Make the driver of a claimed run from its parts, before anything of the log is read."""
        self._parts = parts
        self._context = parts.context
        self._writer = parts.writer
        self._events = parts.context.events
        self._keeper = Housekeeper(parts)
        self._desired = DesiredState()
        self._asked_to_stop = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._is_restored = False  # before that, the next header is not known
        self._base_step = 0
        self._superseded: list[batch_pb2.BatchHeader] = []
        """Closing headers that did not end the run, as it was reopened."""
        self.is_paused = False
        """The drive ended with the run paused."""
        self.is_preempted = False
        """The drive ended with the run queued again: it paused for another run."""
        self._preempted_at = 0.0
        self.has_ended = False
        """The terminal state is in the log: nobody drives the run after this."""

    @property
    def parts(self) -> RunParts:
        """Return the parts of the driven run."""
        return self._parts

    def progress(self) -> run_pb2.RunProgress | None:
        """Return the progress of a run whose events do not say it; None if they do."""
        return None

    @abstractmethod
    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Play the run from STARTING to STOPPING and return the rollouts that the trainer shall score at the end.

        Long-lived work is started in `tasks` and appended to `background`, which the caller cancels.
        """

    def apply(self, desired: DesiredState) -> None:
        """Take over what the user asks of the run; what is to be retained follows the new rule from now on.

        A pause or a cancellation stops the loop at its next turn.
        """
        self._desired = desired
        self._keeper.rule = RetentionRule.of(self._context.record.settings, desired.retention)
        if desired.is_cancelled:
            self._cancelled.set()
        is_preempted = desired.preempted_epoch >= self._context.epoch.number
        if is_preempted and not self._preempted_at:
            self._preempted_at = time.monotonic()
        if desired.is_cancelled or desired.is_paused or is_preempted:
            self._asked_to_stop.set()
            self._parts.book.changed.set()

    async def run(self) -> None:
        """Drive the run to its closing header and its terminal state, or to its pause.

        A lost lease or epoch, a log that is gone or cannot be read, and an outage or refusal of Redis or the store, are
        raised: the run stays open, and its next driver continues from the log. Everything else fails the run.
        """
        try:
            await self._drive()
        except asyncio.CancelledError:
            await self._keeper.archive_last()
            raise
        except Exception as error:  # the edge of a run: a defect there must not end the other runs
            # A task group raises all errors together; one after which another driver can continue decides.
            first = _decisive(error)
            # Before the log is read, no closing header can be written: its step and chain are unknown.
            if _is_handed_over(first) or not self._is_restored:
                raise first from error
            fields = {"run": self._context.record.name, "error": str(first)}
            logger.error("run failed", extra=fields, exc_info=None if isinstance(first, MillraceError) else error)
            await self._fail(_as_millrace(first))
        finally:
            try:
                if self._parts.turns is not None and (self.has_ended or self.is_paused):
                    await self._parts.turns.leave()
            finally:
                await self._parts.envs.close()
                self._context.registry.release(self._context.record.uid)

    async def _drive(self) -> None:
        """Restore the run from the log and drive it to its end or its pause, with turns on the devices if it shares
        them.
        """
        await self._restore()
        if self._parts.turns is None:
            await self._drive_restored()
            return
        # Around the whole drive, because the trainer has its last turn after the closing header.
        async with asyncio.TaskGroup() as tasks:
            turns = tasks.create_task(lasting(self._parts.turns.run))
            await self._drive_restored()
            turns.cancel()

    async def _drive_restored(self) -> None:
        """Play the run and write its closing header, unless the log has one; then end it, unless it is paused."""
        was_closed = self._writer.closing is not None
        if not was_closed:
            # Nothing is opened for a run that shall pause: its state is written, and it is given back.
            if self._desired.is_paused and not self._desired.is_cancelled:
                await self._pause()
                return
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(lasting(start)) for start in self._background()]
                await self._play_and_close(tasks, background)
                for task in background:
                    task.cancel()
        if not self.is_paused:
            await self._end(was_closed=was_closed)

    async def _restore(self) -> None:
        """Load from the store what is committed of the run, continue after that, and append to Redis what it lacks."""
        run_log = self._context.log
        origin = await asyncio.to_thread(load_origin, run_log.store, run_log.names)
        self._base_step = origin.base_step
        committed = await load_history(run_log)
        self._writer.restore(committed, origin=origin)
        self._superseded = await asyncio.to_thread(load_closings, run_log, committed)
        self._is_restored = True
        await self._keeper.start()

    def _background(self) -> list[Callable[[], Coroutine[Any, Any, None]]]:
        """Return the functions of the work that goes on in the background of the drive until it is cancelled."""
        keeper = self._keeper
        return [
            self._parts.policies.run,
            lambda: self._parts.trainer.run(is_closing=lambda: self._writer.is_closing),
            keeper.follow_policies,
            keeper.watch_workers,
            keeper.watch_log,
            keeper.trim_consumed,
            keeper.retire,
            keeper.archive_events,
            keeper.remove_damaged,
        ]

    async def _play_and_close(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> None:
        """Play until the last step, a cancellation or a pause; write the closing header after the first two.

        `tasks` and `background` are those of `_play`.
        """
        evaluation: list[Rollout] = []
        outcome, reason, why = batch_pb2.RUN_OUTCOME_SUCCEEDED, "run_ended", self.PLAYED
        try:
            how = "resumed" if self._events.state == run_pb2.RUN_STATE_PAUSED else "claimed by an orchestrator"
            await self._events.state_changed(run_pb2.RUN_STATE_STARTING, how)
            evaluation = await self._play(tasks, background)
        except RunStoppedError:
            if not self._cancelled.is_set():
                # Before the state is PAUSED: a run that is paused must hold no worker.
                await self._parts.envs.stop_all(self._keeper.log_instance)
                await self._pause()
                return
            # From here on only a cancellation is left. An empty list of groups stops everything of the run.
            outcome, reason, why = batch_pb2.RUN_OUTCOME_CANCELLED, "cancelled", "cancelled on request"
            await self._parts.envs.cancel([])
            await self._abandon(reason)
        await self._events.state_changed(run_pb2.RUN_STATE_STOPPING, why)
        await self._writer.close(outcome=outcome, reason=reason, evaluation=evaluation)
        await self._keeper.archive_now()

    async def _take_over(self) -> None:
        """Take over finished rollouts and the plays that env-servers still work on, after waiting for the env-servers.

        They are only waited for after another orchestrator drove the run.
        """
        parts = self._parts
        if self._context.epoch.number > 1:
            await parts.envs.wait_for_return()
        playing = await parts.envs.playing(self._keeper.log_instance)
        await parts.intake.take_over(parts.stream, playing)

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; if the run shall pause or end meanwhile, cancel it and raise RunStoppedError."""
        return await self._unless(self._asked_to_stop, work)

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`; if `event` is set before, cancel `work` and raise RunStoppedError."""
        working, _ = await first_of(work, event.wait())
        if working is None:
            raise RunStoppedError
        return working.result()

    async def _pause(self) -> None:
        """Write the event of the state PAUSED, unless the run has it, and archive the events.

        A run that pauses for another one is QUEUED instead. The orchestrator that resumes the run continues from the
        log.
        """
        self.is_paused = True
        if self._preempted_at and not self._desired.is_paused:
            seconds = time.monotonic() - self._preempted_at
            why = f"preempted for {self._desired.preempted_for}; the pause took {seconds:.1f} s"
            await self._events.state_changed(run_pb2.RUN_STATE_QUEUED, why)
            self.is_preempted = True
            faults.reach(faults.Point.ORCHESTRATOR_PREEMPTED)
            await self._keeper.archive_now()
            return
        reason = f"paused on request: {self._desired.reason}" if self._desired.reason else "paused on request"
        if self._events.state != run_pb2.RUN_STATE_PAUSED:
            await self._events.state_changed(run_pb2.RUN_STATE_PAUSED, reason)
        await self._keeper.archive_now()

    async def _end(self, *, was_closed: bool) -> None:
        """Wait until the trainer has read the closing header, then record the terminal state that the header names.

        A failed run does not wait. A trainer that does not finish is reported, and changes nothing.
        `was_closed` says that an earlier driver wrote the header.
        """
        closing = self._writer.closing
        assert closing is not None
        if closing.outcome == batch_pb2.RUN_OUTCOME_FAILED:
            error = run_pb2.RunError(
                reason=closing.error_reason,
                message=closing.error_message,
                component=closing.error_component,
                remedy=closing.error_remedy,
            )
            await self._record_end(run_pb2.RUN_STATE_FAILED, closing.error_message, error=error)
            return
        succeeded = closing.outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
        why = self.WRITTEN if succeeded else "cancelled on request"
        # After a takeover nobody may know that the trainer had finished: the last checkpoint says so as well.
        is_written = was_closed and await self._keeper.newest_checkpoint() >= closing.final_version
        try:
            await self._parts.trainer.wait_finished(
                is_needed=succeeded and not is_written, spare_s=TRAINER_SPARE_S if succeeded else 0.0
            )
        except InternalError as error:
            why = "the trainer did not say that it has written everything"
            await self._events.warning(error.reason, str(error))
        state = run_pb2.RUN_STATE_SUCCEEDED if succeeded else run_pb2.RUN_STATE_CANCELLED
        # The same numbers as in the last report of failures.
        failed = self._parts.failures.describe() if succeeded else ""
        await self._record_end(state, f"{why}; {failed}" if failed else why)

    async def _record_end(self, state: run_pb2.RunState, why: str, *, error: run_pb2.RunError | None = None) -> None:
        """Write the event of the terminal state `state`, archive it, and write the seal after it.

        `why` is in words, `error` why the run failed. Failed rollouts that were not reported yet are reported before.
        """
        # Before the terminal state, after which a watcher reads no further event.
        for count in self._parts.failures.report(is_final=True):
            await self._events.rollouts_failed(count)
        # Damage that this finds is reported before the event of the end, after which watchers read no further.
        await self._keeper.archive_now()
        await self._events.state_changed(state, why, error=error, chain_hash=self._writer.chain.hex())
        self.has_ended = True
        await self._keeper.archive_now()
        # The seal comes after the archive of the event of the end, which it names.
        faults.reach(faults.Point.ORCHESTRATOR_BEFORE_SEAL)
        await self._keeper.seal(run_pb2.RunState.Name(state).removeprefix("RUN_STATE_"))

    async def _fail(self, error: MillraceError) -> None:
        """Write the closing header of a failed run, with its error, unless the log has one.

        Then record the state FAILED.
        """
        detail = run_pb2.RunError(
            reason=error.reason, message=error.message, component=_component(error), remedy=error.remedy or ""
        )
        if self._writer.closing is None:
            await self._parts.envs.cancel([])
            await self._abandon("run_failed")
            await self._writer.close(outcome=batch_pb2.RUN_OUTCOME_FAILED, reason="run_failed", error=detail)
        await self._record_end(run_pb2.RUN_STATE_FAILED, error.message, error=detail)

    async def _abandon(self, reason: str) -> None:
        """Take what the log still has of a predecessor's rollouts, before the closing header drops every open play.

        The plays in the book are resolved later, by `BatchWriter.close`. If the environments are not open yet, no
        rollout has a play: then the ordinals that the predecessor left open are resolved here, as dropped for `reason`.
        """
        intake = self._parts.intake
        if not intake.has_begun or intake.is_taking_over:
            await self._parts.stream.catch_up()
        if not intake.has_begun:
            self._parts.book.abandon(intake.noted, reason=reason)


async def lasting(start: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Await `start()`, work that ends by cancellation only; raise InternalError if it returns.

    The drive would go on without it.
    """
    task, work = asyncio.current_task(), start()
    assert task is not None
    try:
        await work
    except asyncio.CancelledError:
        # `cancelling` counts the requests to cancel this task, such as the drive's. Without one, `work` was cancelled
        # from within: it has ended by itself, which is a defect as well.
        if task.cancelling():
            raise
    raise InternalError(
        f"a part of the orchestrator ({work.__qualname__}) has ended, though nobody ended it",
        remedy="this is a defect: report it with the orchestrator's log",
    )


def _decisive(error: Exception) -> Exception:
    """Return the first error, inside groups too, after which another driver can continue the run.

    Else the first of all.
    """
    errors = [inner for inner in all_errors(error) if isinstance(inner, Exception)]
    return next(filter(_is_handed_over, errors), errors[0])


def _is_handed_over(error: Exception) -> bool:
    """Return whether another driver can continue a run after `error`."""
    return isinstance(error, ConflictError) or is_of_storage(error)


def _as_millrace(error: Exception) -> MillraceError:
    """Return the error itself if it is one of Millrace, else an InternalError that names it."""
    if isinstance(error, MillraceError):
        return error
    return InternalError(
        f"the orchestrator failed: {type(error).__name__}: {error}", remedy="look at the orchestrator's log"
    )


def _component(error: MillraceError) -> str:
    """Return the component that an error is about, for the run's record of its failure.

    It is "trainer", "env-server" or "orchestrator".
    """
    if isinstance(error, TrainerFailedError):
        return "trainer"
    if isinstance(error, RolloutsFailedError):
        return "env-server"
    return "env-server" if error.reason.startswith(("ENV_", "TASK_SET", "EVAL_")) else "orchestrator"
