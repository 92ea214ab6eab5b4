"""From a claimed run to its closing header: recover, find workers, open environments, loop, evaluate, close."""

import asyncio
import logging
import math
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from millrace.algorithms import ALGORITHMS
from millrace.config.schema import RLConfig
from millrace.errors import (
    CapacityError,
    FencedError,
    InternalError,
    InvalidStateError,
    MillraceError,
    UnavailableError,
    all_errors,
)
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.orchestrator.admission import AdmissionRule
from millrace.orchestrator.collector import Collector
from millrace.orchestrator.dispatcher import Dispatcher, RunIdentity
from millrace.orchestrator.env_pool import EnvPool, OpenedEnv, env_spec
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.groups import Group, GroupTable
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.policy_driver import PolicyDriver
from millrace.orchestrator.run_view import RunRecord
from millrace.orchestrator.tasks import TaskOrder, TaskSource
from millrace.orchestrator.trainer_watch import TrainerFailedError, TrainerWatch
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rollouts.types import Rollout
from millrace.runlog import Epoch, Lease, RunLog, load_committed, reappend_committed
from millrace.telemetry import waits
from millrace.v1 import run_pb2

log = logging.getLogger(__name__)

SERVED_POLL_S = 0.05
WORKER_POLL_S = 5.0
TRIM_S = 10.0


T = TypeVar("T")


class RunCancelledError(Exception):
    """The run was cancelled while something else was waited for. Never leaves this module."""


class RunDriver:
    """Drives one run under one epoch. `cancel` may be called at any time."""

    def __init__(
        self,
        *,
        record: RunRecord,
        run_log: RunLog,
        epoch: Epoch,
        lease: Lease,
        registry: WorkerRegistry,
        events: RunEvents,
    ) -> None:
        self._record = record
        self._config = RLConfig.model_validate(record.config)
        self._log = run_log
        self._epoch = epoch
        self._registry = registry
        self._events = events
        self._changed = asyncio.Event()
        self._cancelled = asyncio.Event()
        self._max_steps = self._config.max_steps or math.inf
        settings = self._config.orchestrator
        identity = RunIdentity(uid=record.uid, epoch=epoch.number, generation=run_log.generation)
        self._trainer = TrainerWatch(run_uid=record.uid, registry=registry)
        self._envs = EnvPool(run_uid=record.uid, epoch=epoch.number, registry=registry)
        self._policies = PolicyDriver(
            run_uid=record.uid, epoch=epoch.number, registry=registry, events=events, on_change=self._changed.set
        )
        self._table = GroupTable()
        self._ledger = Ledger(
            run_log=run_log,
            epoch=epoch,
            lease=lease,
            run_hash=record.run_hash,
            envs=self._envs,
            events=events,
            seq_len=settings.seq_len,
        )
        self._evals = Evaluator(run=identity, config=settings, envs=self._envs, policies=self._policies)
        self._dispatcher = Dispatcher(run=identity, config=settings, envs=self._envs, policies=self._policies)
        self._train_specs = [env_spec(env.name, env.id, env.args) for env in settings.env]
        evaluated = [] if settings.eval is None else settings.eval.env
        known = {spec.name for spec in self._train_specs}
        self._specs = [
            *self._train_specs,
            *(env_spec(env.name, env.id, env.args) for env in evaluated if env.name not in known),
        ]

    def cancel(self) -> None:
        """Ask the run to end; it closes at the next turn of the loop."""
        self._cancelled.set()
        self._changed.set()

    async def run(self) -> None:
        """Drive the run to its closing header and its terminal state.

        A lost lease or epoch, and an outage of Redis or the store, are raised: the run stays open, and whoever claims
        it next continues from the log. Everything else fails the run.
        """
        try:
            await self._drive()
        except Exception as error:  # the edge of a run: a defect there must not end the other runs
            first = _decisive(error)
            if isinstance(first, FencedError | UnavailableError | CapacityError):
                raise first from error
            log.error("run failed", extra={"run": self._record.name, "error": str(first)}, exc_info=error)
            await self._fail(_as_millrace(first))
        finally:
            await self._envs.close()
            self._registry.release(self._record.uid)

    async def _drive(self) -> None:
        self._ledger.restore(*await load_committed(self._log))
        await reappend_committed(self._log, self._epoch)
        if self._ledger.closing is None:
            await self._events.state_changed(run_pb2.RUN_STATE_STARTING, "claimed by an orchestrator")
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(work)
                    for work in (
                        self._policies.run(),
                        self._follow_policies(),
                        self._trainer.run(),
                        self._watch_workers(),
                        self._trim_batches(),
                    )
                ]
                try:
                    evaluation = await self._play(tasks, background)
                    outcome, reason = batch_pb2.RUN_OUTCOME_SUCCEEDED, "run_ended"
                except RunCancelledError:
                    evaluation, outcome, reason = [], batch_pb2.RUN_OUTCOME_CANCELLED, "cancelled"
                    await self._envs.cancel([])
                succeeded = outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
                why = "every step is done" if succeeded else "cancelled on request"
                await self._events.state_changed(run_pb2.RUN_STATE_STOPPING, why)
                await self._ledger.close(
                    self._table, outcome=outcome, reason=reason, final_version=self._ledger.step, evaluation=evaluation
                )
                for task in background:
                    task.cancel()
        await self._end()

    async def _play(self, tasks: asyncio.TaskGroup, background: list[asyncio.Task[None]]) -> list[Rollout]:
        """Everything between STARTING and STOPPING; returns the rollouts of the final evaluation."""
        loop = await self._unless_cancelled(self._start())
        collector = Collector(log=self._log, loop=loop, evals=self._evals, ledger=self._ledger, envs=self._envs)
        await collector.adopt()
        background.append(tasks.create_task(collector.run()))
        await self._events.state_changed(run_pb2.RUN_STATE_RUNNING, "workers, environments and policy are ready")
        settings = self._config.orchestrator.eval
        if settings is not None and self._ledger.step == 0 and not settings.skip_first_step:
            await self._unless_cancelled(self._evaluate(0))
        background.append(tasks.create_task(self._evaluate_periodically()))
        await loop.run()
        if self._cancelled.is_set():
            raise RunCancelledError
        await self._unless_cancelled(self._wait_served(self._ledger.step))
        return await self._unless_cancelled(self._evaluate(self._ledger.step))

    async def _unless_cancelled(self, work: Coroutine[Any, Any, T]) -> T:
        """Await `work`, or end it and raise RunCancelledError when the run is cancelled meanwhile."""
        working = asyncio.create_task(work)
        cancelled = asyncio.create_task(self._cancelled.wait())
        try:
            await asyncio.wait({working, cancelled}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise RunCancelledError
            return working.result()
        finally:
            for task in (working, cancelled):
                task.cancel()
            await asyncio.gather(working, cancelled, return_exceptions=True)

    async def _start(self) -> RolloutLoop:
        """Wait for environments and for the start policy to be served; build the loop."""
        settings = self._config.orchestrator
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._envs.open_all(self._specs))
            tasks.create_task(self._wait_served(0))
        opened = {spec.name: self._envs.envs[spec.name] for spec in self._specs}
        for name in self._evals.names:
            if opened[name].num_eval == 0:
                await self._events.warning(
                    "EVAL_ON_TRAINING_TASKS",
                    f"environment {name!r} has no held-out tasks: it is evaluated on its training tasks",
                )
        order = self._task_order(opened)

        def make_group(ordinal: int, planned_step: int) -> Group:
            task = order.task(ordinal)
            return Group(
                task=task,
                group_size=settings.rollouts_per_example,
                planned_step=planned_step,
                is_scored_whole=opened[task.env].requires_group,
            )

        return RolloutLoop(
            max_steps=self._max_steps,
            rule=AdmissionRule(
                groups_per_step=settings.batch_size // settings.rollouts_per_example,
                async_level=settings.async_level,
                max_off_policy_steps=settings.max_off_policy_steps,
                oversampling_factor=settings.oversampling_factor,
                max_steps=self._config.max_steps,
            ),
            make_group=make_group,
            tasks=order,
            table=self._table,
            dispatcher=self._dispatcher,
            policies=self._policies,
            ledger=self._ledger,
            events=self._events,
            algorithm=ALGORITHMS[settings.algo.type](),
            filter_zero_advantages=settings.filter_zero_advantages,
            seq_len=settings.seq_len,
            changed=self._changed,
            is_cancelled=self._cancelled.is_set,
        )

    def _task_order(self, opened: Mapping[str, OpenedEnv]) -> TaskOrder:
        """The order over the training tasks of every environment."""
        settings = self._config.orchestrator
        sources = [
            TaskSource(
                env=env.name,
                num_tasks=opened[env.name].num_train,
                digest=opened[env.name].train_digest,
                weight=env.weight,
            )
            for env in settings.env
        ]
        return TaskOrder(sources, seed=settings.seed)

    async def _evaluate_periodically(self) -> None:
        """Evaluate beside training whenever a version that is a multiple of the interval is served."""
        settings = self._config.orchestrator.eval
        while settings is not None:
            step = (self._ledger.step // settings.interval + 1) * settings.interval
            if step >= self._max_steps:
                return
            await self._wait_served(step)
            try:
                await self._evaluate(step)
            except InvalidStateError as error:
                await self._events.warning(error.reason, str(error))

    async def _evaluate(self, step: int) -> list[Rollout]:
        """Evaluate every evaluated environment with the policy of `step`; returns the OK rollouts."""
        rollouts: list[Rollout] = []
        for env in self._evals.names:
            report, good = await self._evals.evaluate(env, step=step, min_version=step)
            await self._events.eval_completed(report)
            rollouts += good
        return rollouts

    async def _end(self) -> None:
        """Let the trainer consume the closing header, then record the terminal state that the header says."""
        closing = self._ledger.closing
        assert closing is not None
        if closing.outcome == batch_pb2.RUN_OUTCOME_FAILED:
            error = run_pb2.RunError(
                reason=closing.error_reason, message=closing.error_message, component=closing.error_component
            )
            await self._events.state_changed(run_pb2.RUN_STATE_FAILED, closing.error_message, error=error)
            return
        succeeded = closing.outcome == batch_pb2.RUN_OUTCOME_SUCCEEDED
        why = "the trainer has written everything" if succeeded else "cancelled on request"
        try:
            await self._trainer.wait_finished(is_needed=succeeded)
        except InternalError as error:
            why = "the trainer did not say that it has written everything"
            await self._events.warning(error.reason, str(error))
        state = run_pb2.RUN_STATE_SUCCEEDED if succeeded else run_pb2.RUN_STATE_CANCELLED
        await self._events.state_changed(state, why)

    async def _fail(self, error: MillraceError) -> None:
        """Close the run as failed, unless it is closed; the header says why even if the events are lost."""
        detail = run_pb2.RunError(reason=error.reason, message=str(error), component=_component(error))
        if self._ledger.closing is None:
            await self._envs.cancel([])
            await self._ledger.close(
                self._table,
                outcome=batch_pb2.RUN_OUTCOME_FAILED,
                reason="run_failed",
                final_version=self._ledger.step,
                error=detail,
            )
        await self._events.state_changed(run_pb2.RUN_STATE_FAILED, error.message, error=detail)

    async def _wait_served(self, version: int) -> None:
        with waits.waiting(f"policy {version} to be served", waits_on="trainer"):
            while (served := self._policies.served_version()) is None or served < version:  # noqa: ASYNC110 - bounded
                await asyncio.sleep(SERVED_POLL_S)

    async def _follow_policies(self) -> None:
        """Take every published version from the policy stream."""
        cursor = "0"
        while True:
            for entry in await self._log.read("policies", after=cursor, block_s=5.0):
                cursor = entry.id
                policy = policy_pb2.PolicyEntry.FromString(entry.d)
                self._policies.publish(policy)
                self._ledger.lineage = policy.lineage

    async def _watch_workers(self) -> None:
        """Wake the loop when workers change, tell them the watermark, open environments where servers joined."""
        while True:
            changed = self._registry.changed
            self._registry.set_watermark(self._record.uid, self._ledger.frontier.resolved_below)
            if self._envs.envs and not self._envs.is_complete(self._specs):
                await self._envs.refresh(self._specs)
            try:
                async with asyncio.timeout(WORKER_POLL_S):
                    await changed.wait()
            except TimeoutError:
                pass
            self._changed.set()

    async def _trim_batches(self) -> None:
        """Remove from Redis the batches below the newest durable checkpoint; the store keeps them."""
        trimmed = 0
        while True:
            await asyncio.sleep(TRIM_S)
            newest = await asyncio.to_thread(self._newest_checkpoint)
            if newest > trimmed:
                await self._log.trim_batches(newest)
                trimmed = newest

    def _newest_checkpoint(self) -> int:
        prefix = self._log.names.checkpoints
        manifests = (info.key for info in self._log.store.list(prefix) if info.key.endswith("/manifest.json"))
        return max((int(key.removeprefix(prefix).partition("/")[0]) for key in manifests), default=0)


def _decisive(error: Exception) -> Exception:
    """Of the errors that ended a drive, the one that says whether the run can go on elsewhere; else the first."""
    errors = [inner for inner in all_errors(error) if isinstance(inner, Exception)]
    handed_over = (inner for inner in errors if isinstance(inner, FencedError | UnavailableError | CapacityError))
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
