"""From a claimed run to its closing header: recover, find workers, open environments, loop, evaluate, close.

    run ──▶ restore ──▶ STARTING ──▶ environments, policy ──▶ adopt ──▶ RUNNING ──▶ loop ──▶ last evaluation
             │  closed already                 │ pause: PAUSED, all is given back │ cancel         │
             └──────────────────────▶ end ◀────┴──────────── STOPPING, closing header ◀────────────┘

Who drives the run next, here or elsewhere, begins at the same place: nothing is handed over but the log.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from millrace.errors import (
    CapacityError,
    ConflictError,
    InternalError,
    InvalidStateError,
    MillraceError,
    UnavailableError,
    all_errors,
)
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.assembly import RunParts, make_loop
from millrace.orchestrator.collector import Collector
from millrace.orchestrator.housekeeping import Housekeeper
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.trainer_watch import TrainerFailedError
from millrace.orchestrator.wishes import Wish
from millrace.rollouts.types import Rollout
from millrace.runlog.origin import load_origin
from millrace.runlog.recover import load_history
from millrace.telemetry import faults, waits
from millrace.v1 import run_pb2

log = logging.getLogger(__name__)

SERVED_POLL_S = 0.05
POLICY_OVERDUE_S = 600.0
"""Age from which the wait for a policy is overdue: the trainer may be loading a large model."""
TRAINER_SPARE_S = 10.0
"""After a takeover behind the closing header: how long a trainer that is not needed may take to show up."""

T = TypeVar("T")


class RunStoppedError(Exception):
    """The run was asked to end or to pause while something else was waited for. Never leaves this module."""


class RunDriver:
    """Drives one run under one epoch. `heed` may be called at any time."""

    PLAYED, WRITTEN = "every step is done", "the trainer has written everything"
    """Why a run that succeeds changes to STOPPING and to SUCCEEDED."""

    def __init__(self, parts: RunParts, *, done_evals: frozenset[tuple[str, int]] = frozenset()) -> None:
        """`done_evals` are the environments and steps whose evaluation the log holds."""
        self._parts = parts
        self._ledger = parts.ledger
        self._events = parts.events
        self._keeper = Housekeeper(parts)
        self._done_evals = done_evals
        self._wish = Wish()
        self._asked_to_stop = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._is_restored = False  # before that nobody knows which header would come next
        self.is_paused = False
        """The drive ended with the run paused."""

    @property
    def parts(self) -> RunParts:
        """What it drives."""
        return self._parts

    def heed(self, wish: Wish) -> None:
        """Pause or end the run if that is wished; it stops at the next turn of the loop."""
        self._wish = wish
        if wish.is_cancelled:
            self._cancelled.set()
        if wish.is_cancelled or wish.is_paused:
            self._asked_to_stop.set()
            self._parts.changed.set()

    async def run(self) -> None:
        """Drive the run to its closing header and its terminal state, or to its pause.

        A lost lease or epoch, a log that is gone or cannot be read, and an outage of Redis or the store, are raised:
        the run stays open, and whoever claims it next continues from the log. Everything else fails the run.
        """
        try:
            await self._drive()
        except asyncio.CancelledError:
            await self._keeper.archive_last()
            raise
        except Exception as error:  # the edge of a run: a defect there must not end the other runs
            first = _decisive(error)
            if isinstance(first, ConflictError | UnavailableError | CapacityError) or not self._is_restored:
                raise first from error
            log.error("run failed", extra={"run": self._parts.record.name, "error": str(first)}, exc_info=error)
            await self._fail(_as_millrace(first))
        finally:
            await self._parts.envs.close()
            self._parts.registry.release(self._parts.record.uid)

    async def _drive(self) -> None:
        await self._restore()
        was_closed = self._ledger.closing is not None
        if not was_closed:
            if self._wish.is_paused and not self._wish.is_cancelled:
                await self._pause()
                return
            async with asyncio.TaskGroup() as tasks:
                background = [tasks.create_task(work) for work in self._background()]
                await self._play_and_close(tasks, background)
                for task in background:
                    task.cancel()
        if not self.is_paused:
            await self._end(was_closed=was_closed)

    async def _restore(self) -> None:
        """Take over what the store has of the run, and bring Redis up to date with it."""
        run_log = self._parts.log
        origin = await asyncio.to_thread(load_origin, run_log.store, run_log.names)
        committed = await load_history(run_log)
        self._ledger.restore(committed, origin=origin, table=self._parts.table)
        self._is_restored = True
        await self._keeper.start()

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        keeper = self._keeper
        return [
            self._parts.policies.run(),
            self._parts.trainer.run(is_closing=lambda: self._ledger.is_closing),
            keeper.follow_policies(),
            keeper.watch_workers(),
            keeper.watch_log(),
            keeper.trim_batches(),
            keeper.archive_events(),
            keeper.mend_damage(),
        ]

    async def _play_and_close(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> None:
        """Play until the last step, a cancellation or a pause; the first two end with the closing header."""
        evaluation: list[Rollout] = []
        outcome, reason, why = batch_pb2.RUN_OUTCOME_SUCCEEDED, "run_ended", self.PLAYED
        try:
            how = "resumed" if self._events.state == run_pb2.RUN_STATE_PAUSED else "claimed by an orchestrator"
            await self._events.state_changed(run_pb2.RUN_STATE_STARTING, how)
            evaluation = await self._play(tasks, background)
        except RunStoppedError:
            if not self._cancelled.is_set():
                await self._parts.envs.stop_all(self._keeper.log_instance)
                await self._pause()
                return
            outcome, reason, why = batch_pb2.RUN_OUTCOME_CANCELLED, "cancelled", "cancelled on request"
            await self._parts.envs.cancel([])
            await self._abandon(reason)
        await self._events.state_changed(run_pb2.RUN_STATE_STOPPING, why)
        await self._ledger.close(
            self._parts.table, outcome=outcome, reason=reason, final_version=self._ledger.step, evaluation=evaluation
        )
        await self._keeper.archive_now()

    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Everything between STARTING and STOPPING; returns the rollouts of the final evaluation."""
        loop = await self._unless_stopped(self._start())
        collector = self._keeper.collector = Collector(
            stream=self._parts.stream,
            loop=loop,
            evals=self._parts.evals,
            ledger=self._ledger,
            envs=self._parts.envs,
        )
        if self._parts.epoch.number > 1:
            await self._parts.envs.let_return()
        await collector.adopt(self._keeper.log_instance)
        background.append(tasks.create_task(self._parts.stream.follow()))
        await self._events.state_changed(run_pb2.RUN_STATE_RUNNING, "workers, environments and policy are ready")
        settings = self._parts.rl.orchestrator.eval
        if settings is not None and self._ledger.step == 0 and not settings.skip_first_step:
            await self._unless_stopped(self._evaluate_missing(0))
        background.append(tasks.create_task(self._evaluate_periodically()))
        await loop.run()
        if self._asked_to_stop.is_set():
            if not self._cancelled.is_set():
                await self._unless(self._cancelled, loop.drain())
            raise RunStoppedError
        await self._unless_stopped(self._wait_served(self._ledger.step))
        return await self._unless_stopped(self._evaluate(self._ledger.step))

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or end it and raise RunStoppedError when the run shall stop meanwhile."""
        return await self._unless(self._asked_to_stop, work)

    async def _unless(self, event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
        working = asyncio.create_task(work)
        stopped = asyncio.create_task(event.wait())
        try:
            await asyncio.wait({working, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RunStoppedError
            return working.result()
        finally:
            for task in (working, stopped):
                task.cancel()
            await asyncio.gather(working, stopped, return_exceptions=True)

    async def _start(self) -> RolloutLoop:
        """Wait for environments and for the start policy to be served; build the loop."""
        envs = self._parts.envs
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(envs.open_all(self._parts.specs))
            tasks.create_task(self._wait_served(0))
        for name in self._parts.evals.names:
            if envs.envs[name].num_eval == 0:
                await self._events.warning(
                    "EVAL_ON_TRAINING_TASKS",
                    f"environment {name!r} has no held-out tasks: it is evaluated on its training tasks",
                )
        return make_loop(self._parts, is_stopping=self._asked_to_stop.is_set)

    async def _evaluate_periodically(self) -> None:
        """Evaluate beside training whenever a version that is a multiple of the interval is served."""
        settings = self._parts.rl.orchestrator.eval
        if settings is None:
            return
        step = self._ledger.step // settings.interval * settings.interval
        if step == 0 or all((env, step) in self._done_evals for env in self._parts.evals.names):
            step += settings.interval  # else a predecessor was at it: do again what the log does not have
        while step < self._parts.max_steps:
            await self._wait_served(step, overdue_s=0.0)  # it comes when it comes: nothing is held up
            try:
                await self._evaluate_missing(step)
            except InvalidStateError as error:
                await self._events.warning(error.reason, str(error))
            step = max(step, self._ledger.step // settings.interval * settings.interval) + settings.interval

    async def _evaluate_missing(self, step: int) -> None:
        """Evaluate with the policy of `step` what the log does not have of it."""
        for env in self._parts.evals.names:
            if (env, step) not in self._done_evals:
                report, _ = await self._parts.evals.evaluate(env, step=step, min_version=step)
                await self._events.eval_completed(report)

    async def _evaluate(self, step: int) -> list[Rollout]:
        """Evaluate every evaluated environment with the policy of `step`; returns the OK rollouts."""
        rollouts: list[Rollout] = []
        for env in self._parts.evals.names:
            report, good = await self._parts.evals.evaluate(env, step=step, min_version=step)
            await self._events.eval_completed(report)
            rollouts += good
        return rollouts

    async def _pause(self) -> None:
        """Say that the run is paused; who resumes it continues from the log."""
        self.is_paused = True
        reason = f"paused on request: {self._wish.reason}" if self._wish.reason else "paused on request"
        if self._events.state != run_pb2.RUN_STATE_PAUSED:
            await self._events.state_changed(run_pb2.RUN_STATE_PAUSED, reason)
        await self._keeper.archive_now()

    async def _end(self, *, was_closed: bool) -> None:
        """Let the trainer consume the closing header, then record the terminal state that the header says."""
        closing = self._ledger.closing
        assert closing is not None
        if closing.outcome == batch_pb2.RUN_OUTCOME_FAILED:
            error = run_pb2.RunError(
                reason=closing.error_reason, message=closing.error_message, component=closing.error_component
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
        await self._record_end(state, why)

    async def _record_end(self, state: run_pb2.RunState, why: str, *, error: run_pb2.RunError | None = None) -> None:
        """The terminal state, its event archived, and the seal behind it."""
        await self._keeper.archive_now()  # what that finds is told before the end, where watchers still listen
        await self._events.state_changed(state, why, error=error, chain_hash=self._ledger.chain.hex())
        await self._keeper.archive_now()
        faults.reach(faults.Point.ORCHESTRATOR_BEFORE_SEAL)
        await self._keeper.seal(run_pb2.RunState.Name(state).removeprefix("RUN_STATE_"))

    async def _fail(self, error: MillraceError) -> None:
        """Close the run as failed, unless it is closed; the header says why even if the events are lost."""
        mended = f"`millrace run resume {self._parts.record.name}` goes on with the run once the cause is removed"
        detail = run_pb2.RunError(reason=error.reason, message=f"{error}; {mended}", component=_component(error))
        if self._ledger.closing is None:
            await self._parts.envs.cancel([])
            await self._abandon("run_failed")
            await self._ledger.close(
                self._parts.table,
                outcome=batch_pb2.RUN_OUTCOME_FAILED,
                reason="run_failed",
                final_version=self._ledger.step,
                error=detail,
            )
        await self._record_end(run_pb2.RUN_STATE_FAILED, error.message, error=detail)

    async def _abandon(self, reason: str) -> None:
        """The run ends: if nobody has read its rollouts yet, what a predecessor left open is dropped as well."""
        if self._keeper.collector is None:
            left: list[Rollout] = []
            self._parts.stream.take = left.append
            await self._parts.stream.catch_up()
            self._ledger.abandon(left, reason=reason)

    async def _wait_served(self, version: int, *, overdue_s: float = POLICY_OVERDUE_S) -> None:
        policies = self._parts.policies
        with waits.waiting(f"policy {version} to be served", waits_on="trainer", deadline_s=overdue_s) as wait:
            while (served := policies.served_version()) is None or served < version:
                wait.update(waits_on=policies.up_to(version))
                await asyncio.sleep(SERVED_POLL_S)


def _decisive(error: Exception) -> Exception:
    """Of the errors that ended a drive, the one that says whether the run can go on elsewhere; else the first."""
    errors = [inner for inner in all_errors(error) if isinstance(inner, Exception)]
    handed_over = (inner for inner in errors if isinstance(inner, ConflictError | UnavailableError | CapacityError))
    return next(handed_over, errors[0])


def _as_millrace(error: Exception) -> MillraceError:
    if isinstance(error, MillraceError):
        return error
    return InternalError(
        f"the orchestrator failed: {type(error).__name__}: {error}", remedy="look at the orchestrator's log"
    )


def _component(error: MillraceError) -> str:
    if isinstance(error, TrainerFailedError):
        return "trainer"
    return "env-server" if error.reason.startswith(("ENV_", "TASK_SET", "EVAL_")) else "orchestrator"
