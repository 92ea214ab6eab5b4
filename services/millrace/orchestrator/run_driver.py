"""From a claimed run to its closing header: recover, find workers, open environments, loop, evaluate, close."""

import asyncio
import logging
import math

from millrace.algorithms import ALGORITHMS
from millrace.config.schema import RLConfig
from millrace.errors import FencedError, InternalError, LogGoneError, MillraceError
from millrace.internal.v1 import batch_pb2, policy_pb2, worker_service_pb2
from millrace.orchestrator.admission import AdmissionRule
from millrace.orchestrator.collector import Collector
from millrace.orchestrator.dispatcher import Dispatcher, RunIdentity
from millrace.orchestrator.env_pool import EnvPool, env_spec
from millrace.orchestrator.evals import Evaluator
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.groups import GroupTable
from millrace.orchestrator.ledger import Ledger
from millrace.orchestrator.loop import RolloutLoop
from millrace.orchestrator.policy_driver import PolicyDriver
from millrace.orchestrator.run_view import RunRecord
from millrace.orchestrator.tasks import TaskOrder, TaskSource
from millrace.orchestrator.workers import WorkerRegistry
from millrace.rollouts.types import Rollout
from millrace.runlog import Epoch, RunLog, load_committed, reappend_committed
from millrace.telemetry import waits
from millrace.v1 import run_pb2

log = logging.getLogger(__name__)

FINISH_TIMEOUT_S = 600.0
"""Longest wait for the trainer to write its last checkpoint and reports after the closing header."""


class TrainerFailedError(InternalError):
    """The trainer gave up on the run."""


class RunDriver:
    """Drives one run under one epoch. `cancel` may be called at any time."""

    def __init__(
        self, *, record: RunRecord, run_log: RunLog, epoch: Epoch, registry: WorkerRegistry, events: RunEvents
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
        identity = RunIdentity(uid=record.uid, epoch=epoch.number, generation=run_log.generation)
        settings = self._config.orchestrator
        self._envs = EnvPool(run_uid=record.uid, epoch=epoch.number, registry=registry)
        self._policies = PolicyDriver(
            run_uid=record.uid, epoch=epoch.number, registry=registry, events=events, on_change=self._changed.set
        )
        self._table = GroupTable()
        self._ledger = Ledger(run_log=run_log, epoch=epoch, run_hash=record.run_hash, envs=self._envs, events=events)
        self._evals = Evaluator(run=identity, config=settings, envs=self._envs, policies=self._policies)
        self._dispatcher = Dispatcher(run=identity, config=settings, envs=self._envs, policies=self._policies)
        self._specs = [env_spec(env.name or env.id, env.id, env.args) for env in settings.env]
        if settings.eval is not None:
            known = {spec.name for spec in self._specs}
            chosen = [env_spec(env.name or env.id, env.id, env.args) for env in settings.eval.env]
            self._eval_specs = [spec for spec in chosen if spec.name not in known]
        else:
            self._eval_specs = []

    def cancel(self) -> None:
        """Ask the run to end; it closes at the next turn of the loop."""
        self._cancelled.set()
        self._changed.set()

    async def run(self) -> None:
        """Drive the run to its closing header and its terminal state."""
        try:
            await self._drive()
        except* (FencedError, LogGoneError):
            raise
        except* Exception as group:
            error = _first(group)
            log.error("run failed", extra={"run": self._record.name, "error": str(error)}, exc_info=error)
            await self._fail(_as_millrace(error))
        finally:
            await self._envs.close()
            self._registry.release(self._record.uid)

    async def _drive(self) -> None:
        last, chain = await load_committed(self._log)
        await reappend_committed(self._log, self._epoch)
        self._ledger.restore(last, chain)
        if last is not None and last.kind == batch_pb2.BATCH_KIND_CLOSE:
            await self._end(last.outcome)
            return
        await self._events.state_changed(run_pb2.RUN_STATE_STARTING, "claimed by an orchestrator")
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(self._policies.run()),
                tasks.create_task(self._follow_policies()),
                tasks.create_task(self._watch_trainer()),
                tasks.create_task(self._watch_registry()),
            ]
            loop = await self._start()
            collector = Collector(log=self._log, loop=loop, evals=self._evals, ledger=self._ledger, envs=self._envs)
            await collector.adopt()
            background.append(tasks.create_task(collector.run()))
            background.append(tasks.create_task(self._evaluate_periodically()))
            await self._events.state_changed(run_pb2.RUN_STATE_RUNNING, "workers, environments and policy are ready")
            await self._train(loop)
            for task in background:
                task.cancel()

    async def _start(self) -> RolloutLoop:
        """Wait for environments and for the start policy to be served; build the loop."""
        settings = self._config.orchestrator
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._envs.open_all([*self._specs, *self._eval_specs]))
            tasks.create_task(self._wait_served(0))
        opened = [self._envs.envs[spec.name] for spec in self._specs]
        weights = {env.name or env.id: env.weight for env in settings.env}
        order = TaskOrder(
            [
                TaskSource(env=e.spec.name, num_tasks=e.num_train, digest=e.train_digest, weight=weights[e.spec.name])
                for e in opened
            ],
            seed=settings.seed,
        )
        rule = AdmissionRule(
            groups_per_step=settings.batch_size // settings.rollouts_per_example,
            async_level=settings.async_level,
            max_off_policy_steps=settings.max_off_policy_steps,
            oversampling_factor=settings.oversampling_factor,
            max_steps=self._config.max_steps,
        )
        return RolloutLoop(
            max_steps=self._max_steps,
            rule=rule,
            group_size=settings.rollouts_per_example,
            tasks=order,
            table=self._table,
            dispatcher=self._dispatcher,
            policies=self._policies,
            ledger=self._ledger,
            algorithm=ALGORITHMS[settings.algo.type](),
            filter_zero_advantages=settings.filter_zero_advantages,
            changed=self._changed,
            is_cancelled=self._cancelled.is_set,
        )

    async def _train(self, loop: RolloutLoop) -> None:
        settings = self._config.orchestrator.eval
        if settings is not None and self._ledger.step == 0 and not settings.skip_first_step:
            await self._evaluate(0)
        await loop.run()
        if self._cancelled.is_set():
            await self._envs.cancel([])
            outcome, reason, evaluation = batch_pb2.RUN_OUTCOME_CANCELLED, "cancelled", []
        else:
            await self._wait_served(self._ledger.step)
            evaluation = await self._evaluate(self._ledger.step)
            outcome, reason = batch_pb2.RUN_OUTCOME_SUCCEEDED, "run_ended"
        await self._events.state_changed(run_pb2.RUN_STATE_STOPPING, reason)
        await self._ledger.close(
            self._table, outcome=outcome, reason=reason, final_version=self._ledger.step, evaluation=evaluation
        )
        await self._end(outcome)

    async def _evaluate_periodically(self) -> None:
        """Evaluate beside training whenever a version that is a multiple of the interval is served."""
        settings = self._config.orchestrator.eval
        while settings is not None and settings.interval:
            step = (self._ledger.step // settings.interval + 1) * settings.interval
            if step >= self._max_steps:
                return
            await self._wait_served(step)
            await self._evaluate(step)

    async def _evaluate(self, step: int) -> list[Rollout]:
        """Evaluate every evaluated environment with the policy of `step`; returns the OK rollouts."""
        if self._config.orchestrator.eval is None:
            return []
        rollouts: list[Rollout] = []
        for env in self._evals.specs(self._specs):
            report, good = await self._evals.evaluate(env, step=step, min_version=step)
            await self._events.eval_completed(report)
            rollouts += good
        return rollouts

    async def _end(self, outcome: batch_pb2.RunOutcome) -> None:
        """Wait for the trainer to consume the closing header, then record the terminal state."""
        deadline = asyncio.get_running_loop().time() + FINISH_TIMEOUT_S
        with waits.waiting(
            "the trainer's last checkpoint and reports", waits_on="trainer", deadline_s=FINISH_TIMEOUT_S
        ):
            while not self._trainer_finished():
                if asyncio.get_running_loop().time() > deadline:
                    raise InternalError(
                        f"the trainer did not finish within {FINISH_TIMEOUT_S:.0f} s after the closing header",
                        reason="TRAINER_FINISH_TIMEOUT",
                        remedy="look at the trainer's log",
                    )
                self._claim_trainer()
                self._check_trainer()
                await asyncio.sleep(0.1)
        state = {
            batch_pb2.RUN_OUTCOME_SUCCEEDED: run_pb2.RUN_STATE_SUCCEEDED,
            batch_pb2.RUN_OUTCOME_CANCELLED: run_pb2.RUN_STATE_CANCELLED,
        }.get(outcome, run_pb2.RUN_STATE_FAILED)
        await self._events.state_changed(state, "closing header consumed")

    async def _fail(self, error: MillraceError) -> None:
        """Close the run as failed; the header says why even if the events are lost."""
        detail = run_pb2.RunError(reason=error.reason, message=str(error), component=_component(error))
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
            while True:
                served = self._policies.served_version()
                if served is not None and served >= version:
                    return
                if self._cancelled.is_set() and version == 0:
                    return
                await asyncio.sleep(0.05)

    async def _follow_policies(self) -> None:
        """Take every published version from the policy stream."""
        cursor = "0"
        while True:
            for entry in await self._log.read("policies", after=cursor, block_s=5.0):
                cursor = entry.id
                self._policies.publish(policy_pb2.PolicyEntry.FromString(entry.d))

    async def _watch_trainer(self) -> None:
        """Keep a trainer assigned to the run; a trainer that gave up fails the run."""
        while True:
            self._claim_trainer()
            self._check_trainer()
            await asyncio.sleep(0.5)

    async def _watch_registry(self) -> None:
        """Wake the loop when workers change; tell them the watermark; open environments where servers joined."""
        while True:
            changed = self._registry.changed
            self._registry.set_watermark(self._record.uid, self._ledger.frontier.resolved_below)
            try:
                async with asyncio.timeout(5.0):
                    await changed.wait()
            except TimeoutError:
                if self._envs.envs:
                    await self._envs.refresh([*self._specs, *self._eval_specs])
            self._changed.set()

    def _claim_trainer(self) -> None:
        kind = worker_service_pb2.WORKER_KIND_TRAINER
        if self._registry.claim(kind, self._record.uid, limit=1) == 0:
            log.debug("no idle trainer", extra={"run": self._record.name})

    def _trainer_status(self) -> worker_service_pb2.TrainerStatus | None:
        for record in self._registry.owned(worker_service_pb2.WORKER_KIND_TRAINER, self._record.uid):
            if record.trainer is not None and record.trainer.run_uid == self._record.uid:
                return record.trainer
        return None

    def _check_trainer(self) -> None:
        status = self._trainer_status()
        if status is not None and status.error_reason:
            raise TrainerFailedError(status.error_message, reason=status.error_reason)

    def _trainer_finished(self) -> bool:
        status = self._trainer_status()
        return status is not None and status.is_finished


def _first(group: BaseExceptionGroup[Exception]) -> Exception:
    for error in group.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")


def _as_millrace(error: Exception) -> MillraceError:
    if isinstance(error, MillraceError):
        return error
    return InternalError(
        f"the orchestrator failed: {type(error).__name__}: {error}", remedy="look at the orchestrator's log"
    )


def _component(error: MillraceError) -> str:
    if isinstance(error, TrainerFailedError):
        return "trainer"
    return "env-server" if error.reason in {"ENV_LOAD_FAILED", "TASK_SET_DIFFERS", "EVAL_FAILED"} else "orchestrator"
