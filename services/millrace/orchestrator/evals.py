"""Online evaluation: held-out tasks played with the current policy; never trained on."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.config.schema import OrchestratorConfig
from millrace.errors import InvalidStateError
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.dispatcher import RunIdentity, sampling_message
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.groups import BLAMELESS, BLAMELESS_PAUSE_S
from millrace.orchestrator.policy_driver import PolicyDriver, Replica
from millrace.orchestrator.rollout_stream import RolloutStream
from millrace.orchestrator.routing import Router
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.telemetry import waits
from millrace.v1 import event_pb2

log = logging.getLogger(__name__)

STALL_SLACK_S = 60.0
"""Beyond one rollout's deadline, without any answer, before an evaluation ends; what is missing counts as failed."""
TICK_S = 0.5
MAX_ATTEMPTS = 2
"""Plays of a task whose rollouts fail; a play that an env-server or an engine lost does not count."""


@dataclass(slots=True)
class _Task:
    """One held-out task in an evaluation."""

    index: int
    group_size: int
    attempt: int = 0
    num_failed_attempts: int = 0
    num_blameless_attempts: int = 0
    env_server: str = ""
    replica: str = ""
    home: str = ""
    """Replica of the attempt before; empty if it lost the task."""
    not_before: float = 0.0
    """Monotonic time before which it is not placed again."""
    good: dict[int, Rollout] = field(default_factory=dict)
    failed: dict[int, Rollout] = field(default_factory=dict)

    @property
    def missing(self) -> list[int]:
        return [member for member in range(self.group_size) if member not in self.good]

    @property
    def is_done(self) -> bool:
        return not self.missing or self.num_failed_attempts >= MAX_ATTEMPTS

    def again(self, *, is_lost: bool) -> None:
        """Play the missing members as the next attempt, elsewhere if it was lost."""
        self.attempt += 1
        self.home = "" if is_lost else self.replica
        self.env_server = self.replica = ""
        if self.num_failed_attempts < MAX_ATTEMPTS:
            self.failed.clear()

    def add(self, rollout: Rollout) -> None:
        if rollout.status == RolloutStatus.OK:
            self.good.setdefault(rollout.member, rollout)
        elif rollout.attempt == self.attempt:
            self.failed[rollout.member] = rollout
        if self.missing and all(member in self.failed for member in self.missing):
            if all(self.failed[member].status in BLAMELESS for member in self.missing):
                first_s, longest_s = BLAMELESS_PAUSE_S
                pause_s = min(first_s * 2 ** min(self.num_blameless_attempts, 10), longest_s)
                self.num_blameless_attempts += 1
                self.not_before = time.monotonic() + pause_s
            else:
                self.num_failed_attempts += 1
            is_lost = any(rollout.status == RolloutStatus.ENGINE_LOST for rollout in self.failed.values())
            self.again(is_lost=is_lost)


@dataclass(slots=True, kw_only=True)
class _Eval:
    """One evaluation of one environment in progress."""

    eval_id: str
    env: str
    use_train_tasks: bool
    min_version: int
    tasks: list[_Task]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    last_answer: float = field(default_factory=time.monotonic)

    @property
    def num_missing(self) -> int:
        return sum(len(task.missing) for task in self.tasks if not task.is_done)


class Evaluator:
    """Plays evaluations and averages them."""

    def __init__(
        self,
        *,
        run: RunIdentity,
        config: OrchestratorConfig,
        envs: EnvPool,
        policies: PolicyDriver,
        stream: RolloutStream,
        router: Router,
    ) -> None:
        self._run = run
        self._router = router
        self._stream = stream
        self._config = config
        self._envs = envs
        self._policies = policies
        self._open: dict[str, _Eval] = {}
        settings = config.eval
        self._sampling = settings and sampling_message(
            temperature=settings.sampling.temperature,
            max_tokens=settings.sampling.max_tokens,
            top_p=settings.sampling.top_p,
            extra_body=settings.sampling.extra_body,
        )

    @property
    def names(self) -> list[str]:
        """Names of the environments that are evaluated."""
        return [] if self._config.eval is None else [env.name for env in self._config.eval.env]

    def load(self) -> Counter[str]:
        """Rollouts of evaluations that are being played, by replica."""
        load = Counter[str]()
        for task in (task for current in self._open.values() for task in current.tasks):
            if task.env_server and task.replica and not task.is_done:
                load[task.replica] += len(task.missing)
        return load

    def add(self, rollout: Rollout) -> None:
        """Take an evaluation rollout of the stream; late ones of an ended evaluation are ignored."""
        current = self._open.get(rollout.eval_id)
        if current is not None and rollout.ordinal < len(current.tasks):
            task = current.tasks[rollout.ordinal]
            if rollout.status == RolloutStatus.ENGINE_LOST and rollout.attempt == task.attempt:
                self._policies.suspect(task.replica)
            task.add(rollout)
            current.last_answer = time.monotonic()
            current.changed.set()

    async def evaluate(self, env: str, *, step: int, min_version: int) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        """Play the held-out tasks of `env` (its training tasks if it has none) on replicas at `min_version` or newer.

        Returns the report and the OK rollouts in order of (task, member). It lasts as long as answers come; raises
        InvalidStateError if not one rollout came back OK.
        """
        settings = self._config.eval
        assert settings is not None, "evaluation is off"
        opened = self._envs.envs[env]
        num_tasks = opened.num_eval or opened.num_train
        if settings.num_examples > 0:
            num_tasks = min(num_tasks, settings.num_examples)
        current = _Eval(
            eval_id=f"{env}@{step}-e{self._run.epoch}",
            env=env,
            use_train_tasks=opened.num_eval == 0,
            min_version=min_version,
            tasks=[_Task(index, settings.rollouts_per_example) for index in range(num_tasks)],
        )
        self._open[current.eval_id] = current
        began = time.monotonic()
        try:
            await self._play(current)
        finally:
            del self._open[current.eval_id]
        return self._report(current, step=step, seconds=time.monotonic() - began)

    async def _play(self, current: _Eval) -> None:
        stall_s = self._config.rollout_timeout_s + STALL_SLACK_S
        with waits.waiting(
            f"evaluation of {current.env} with policy {current.min_version}", waits_on="env-server", deadline_s=stall_s
        ) as wait:
            while current.num_missing:
                current.changed.clear()
                await self._place(current)
                wait.update(reason=f"{current.num_missing} rollouts of the evaluation of {current.env}")
                try:
                    async with asyncio.timeout(TICK_S):
                        await current.changed.wait()
                except TimeoutError:
                    if not any(task.env_server for task in current.tasks if not task.is_done):
                        current.last_answer = time.monotonic()  # nobody plays: no replica or env-server takes it
                    if time.monotonic() - current.last_answer > stall_s:
                        log.warning("evaluation incomplete", extra={"env": current.env, "missing": current.num_missing})
                        return

    async def _place(self, current: _Eval) -> None:
        """Place every task that nobody plays; stop at the first one that nobody can take now."""
        alive, replicas, now = set(self._envs.alive()), self._policies.known(), time.monotonic()
        for task in current.tasks:
            is_lost = task.env_server not in alive or (task.replica and task.replica not in replicas)
            if task.env_server and is_lost and not task.is_done:
                log.warning("evaluation task lost, playing it again", extra={"env": current.env, "task": task.index})
                task.again(is_lost=True)
        unplaced = [t for t in current.tasks if not t.env_server and not t.is_done and t.not_before <= now]
        if any(task.attempt for task in unplaced):
            await self._stream.catch_up()
        for task in unplaced:
            if task.env_server or task.is_done:
                continue  # it came meanwhile
            replica = self._router.pick(self._policies.ready(), min_version=current.min_version, home=task.home)
            servers = self._envs.servers_with(current.env)
            if replica is None or not servers:
                return
            server = servers[task.index % len(servers)]
            request = self._request(current, task, replica)
            if not await self._envs.play(server, request):
                return
            if task.attempt == request.attempt:  # else it failed already, before the answer came: play it again
                task.env_server, task.replica = server, replica.worker_id

    def _request(self, current: _Eval, task: _Task, replica: Replica) -> env_service_pb2.PlayGroupRequest:
        policy = self._policies.desired
        return env_service_pb2.PlayGroupRequest(
            run_uid=self._run.uid,
            purpose=rollout_pb2.PURPOSE_EVAL,
            eval_id=current.eval_id,
            ordinal=task.index,
            attempt=task.attempt,
            members=task.missing,
            group_size=task.group_size,
            env=self._envs.envs[current.env].spec,
            use_train_tasks=current.use_train_tasks,
            task_index=task.index,
            base_url=replica.http_url,
            model=replica.model,
            sampling=self._sampling,
            rollout_timeout_seconds=self._config.rollout_timeout_s,
            epoch=self._run.epoch,
            generation=self._run.generation,
            tokenizer_manifest_key=policy.manifest_key if policy is not None else "",
            dispatched_after=self._stream.newest,
        )

    def _report(self, current: _Eval, *, step: int, seconds: float) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        good = [task.good[member] for task in current.tasks for member in sorted(task.good)]
        num_expected = sum(task.group_size for task in current.tasks)
        if not good:
            raise InvalidStateError(
                f"evaluation of {current.env} at step {step}: none of {num_expected} rollouts finished; first failure: "
                f"{_first_failure(current.tasks)}",
                reason="EVAL_FAILED",
                remedy="look at the env-server's log",
            )
        names = sorted({name for rollout in good for name in rollout.metrics})
        report = event_pb2.EvalCompleted(
            env=current.env,
            policy_version=min(rollout.min_version or 0 for rollout in good),
            step=step,
            reward_mean=float(np.mean([rollout.reward for rollout in good])),
            num_rollouts=len(good),
            num_failed=num_expected - len(good),
            metrics={name: float(np.mean([r.metrics[name] for r in good if name in r.metrics])) for name in names},
            seconds=seconds,
        )
        return report, good


def _first_failure(tasks: Sequence[_Task]) -> str:
    for rollout in (rollout for task in tasks for rollout in task.failed.values()):
        error = rollout.error
        return f"{rollout.status}: {error.type}: {error.message}" if error else str(rollout.status)
    return "no answer within the deadline"
