"""Evaluation: held-out tasks played with one version of a policy, or with an endpoint that serves a fixed model.

Never trained on. Beside training an evaluation begins anew after a takeover; a run that is nothing but an evaluation
keeps what the log has of it (`begin` before the stream is read, then `adopt`).
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from millrace.errors import InvalidStateError
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.dispatcher import RunIdentity
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.eval_settings import EvalSettings
from millrace.orchestrator.eval_stats import figures
from millrace.orchestrator.eval_tasks import MAX_LOST_BY_ENDPOINT, EvalTask, Evaluation
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


class Evaluator:
    """Plays evaluations and averages them."""

    def __init__(
        self,
        *,
        run: RunIdentity,
        settings: EvalSettings | None,
        envs: EnvPool,
        policies: PolicyDriver,
        stream: RolloutStream,
        router: Router,
    ) -> None:
        self._run = run
        self._router = router
        self._stream = stream
        self._settings = settings
        self._envs = envs
        self._policies = policies
        self._open: dict[str, Evaluation] = {}

    @property
    def names(self) -> list[str]:
        """Names of the environments that are evaluated."""
        return [] if self._settings is None else list(self._settings.envs)

    @property
    def settings(self) -> EvalSettings:
        """What is evaluated; there must be something."""
        assert self._settings is not None, "evaluation is off"
        return self._settings

    def load(self) -> Counter[str]:
        """Rollouts of evaluations that are being played, by replica."""
        load = Counter[str]()
        for task in (task for current in self._open.values() for task in current.tasks):
            if task.replica:
                load[task.replica] += task.num_playing
        return load

    def add(self, rollout: Rollout) -> None:
        """Take an evaluation rollout of the stream; late ones of an ended evaluation are ignored."""
        current = self._open.get(rollout.eval_id)
        if current is not None and rollout.ordinal < len(current.tasks):
            task = current.tasks[rollout.ordinal]
            if rollout.status == RolloutStatus.ENGINE_LOST and rollout.attempt == task.attempt:
                self._policies.suspect(task.replica)
            if self.settings.is_whole_run:
                task.adopt(rollout)
            else:
                task.add(rollout)
            current.last_answer = time.monotonic()
            current.changed.set()

    def begin(self, env: str, *, step: int, min_version: int) -> Evaluation:
        """Open an evaluation of `env` (on its training tasks if it has no others): from now on it takes rollouts."""
        settings, opened = self.settings, self._envs.envs[env]
        num_tasks = opened.num_eval or opened.num_train
        if settings.num_examples > 0:
            num_tasks = min(num_tasks, settings.num_examples)
        lost = MAX_LOST_BY_ENDPOINT if settings.is_external else None
        size = settings.rollouts_per_example
        current = Evaluation(
            eval_id=f"{env}@{step}" if settings.is_whole_run else f"{env}@{step}-e{self._run.epoch}",
            env=env,
            step=step,
            use_train_tasks=opened.num_eval == 0,
            min_version=min_version,
            tasks=[
                EvalTask(index, size, max_blameless_attempts=lost, is_scored_whole=opened.requires_group)
                for index in range(num_tasks)
            ],
        )
        self._open[current.eval_id] = current
        return current

    def adopt(self, playing: Mapping[str, Sequence[env_service_pb2.PlayingGroup]]) -> None:
        """After a takeover, when the stream is read: what env-servers play goes on, the rest is the next attempt."""
        for worker_id, groups in playing.items():
            for group in groups:
                current = self._open.get(group.eval_id)
                if group.purpose != rollout_pb2.PURPOSE_EVAL or current is None or group.ordinal >= len(current.tasks):
                    continue
                task = current.tasks[group.ordinal]
                task.advance(group.attempt)
                if group.attempt == task.attempt and set(task.missing) - set(task.failed) <= set(group.members):
                    task.env_server = worker_id
                    task.replica = self._policies.replica_at(group.base_url)
        for task in (task for current in self._open.values() for task in current.tasks):
            if not task.env_server and not task.is_done:
                task.again(is_lost=True)

    async def evaluate(self, env: str, *, step: int, min_version: int) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        """Play `env` on replicas at `min_version` or newer; returns the report and the OK rollouts.

        It lasts as long as answers come; raises InvalidStateError if not one rollout came back OK.
        """
        current = self.begin(env, step=step, min_version=min_version)
        try:
            return await self.finish(current), current.good()
        finally:
            del self._open[current.eval_id]

    async def finish(self, current: Evaluation) -> event_pb2.EvalCompleted:
        """Play what is missing of an evaluation and report; raises InvalidStateError as `evaluate` does."""
        current.last_answer = current.began = time.monotonic()
        await self._play(current)
        return self._report(current, seconds=time.monotonic() - current.began)

    async def _play(self, current: Evaluation) -> None:
        stall_s = self.settings.rollout_timeout_s + STALL_SLACK_S
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

    async def _place(self, current: Evaluation) -> None:
        """Place every task that nobody plays; stop at the first one that nobody can take now."""
        self._give_up_lost(current)
        now = time.monotonic()
        unplaced = [t for t in current.tasks if not t.env_server and not t.is_done and t.not_before <= now]
        if any(task.attempt for task in unplaced):
            await self._stream.catch_up()
        for task in unplaced:
            if task.env_server or task.is_done:
                continue  # it came meanwhile
            if not await self._place_one(current, task):
                return

    async def _place_one(self, current: Evaluation, task: EvalTask) -> bool:
        """Ask one env-server after the other to play a task; False if nobody can take it now."""
        if task.source:
            # An env-server plays it, whose answer was lost; if that one is gone by now, the task begins anew.
            task.env_server = task.source
            if task.source not in self._envs.alive():
                task.again(is_lost=True)
            return True
        replica = self._router.pick(self._policies.ready(), min_version=current.min_version, home=task.home)
        if replica is None or not self._has_room(current, task):
            return False
        request = self._request(current, task, replica)
        servers = self._envs.servers_with(current.env)
        begin = task.index % len(servers) if servers else 0
        for server in [*servers[begin:], *servers[:begin]]:
            if task.attempt != request.attempt or task.missing != list(request.members):
                return True  # members came while another env-server was asked: what is missing is asked for anew
            if await self._envs.play(server, request):
                if task.attempt == request.attempt:  # else it failed already, before the answer came: play it again
                    task.env_server, task.replica = task.source or server, replica.worker_id
                return True
        return False

    def _give_up_lost(self, current: Evaluation) -> None:
        alive, replicas = set(self._envs.alive()), self._policies.known()
        for task in current.tasks:
            is_lost = task.env_server not in alive or (task.replica and task.replica not in replicas)
            if task.env_server and is_lost and not task.is_done:
                log.warning("evaluation task lost, playing it again", extra={"env": current.env, "task": task.index})
                task.again(is_lost=True)

    def _has_room(self, current: Evaluation, task: EvalTask) -> bool:
        """Whether the task may be played beside the others; one that is larger than the bound is played alone."""
        playing = sum(each.num_playing for each in current.tasks)
        bound = self.settings.max_concurrent
        return bound is None or not playing or playing + len(task.missing) <= bound

    def _request(self, current: Evaluation, task: EvalTask, replica: Replica) -> env_service_pb2.PlayGroupRequest:
        policy, settings = self._policies.desired, self.settings
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
            sampling=settings.sampling,
            rollout_timeout_seconds=settings.rollout_timeout_s,
            epoch=self._run.epoch,
            generation=self._run.generation,
            tokenizer_manifest_key=policy.manifest_key if policy is not None else "",
            dispatched_after=self._stream.newest,
            is_external=settings.is_external,
            api_key_var=settings.api_key_var,
        )

    def _report(self, current: Evaluation, *, seconds: float) -> event_pb2.EvalCompleted:
        good = current.good()
        if not good:
            raise InvalidStateError(
                f"evaluation of {current.env} at step {current.step}: none of {current.num_wanted} rollouts finished; "
                f"first failure: {_first_failure(current)}",
                reason="EVAL_FAILED",
                remedy="look at the env-server's log",
            )
        return event_pb2.EvalCompleted(
            env=current.env,
            policy_version=min(rollout.min_version or 0 for rollout in good),
            step=current.step,
            reward_mean=float(np.mean([rollout.reward for rollout in good])),
            num_rollouts=len(good),
            num_failed=current.num_wanted - len(good),
            metrics=figures(current.tasks, pass_threshold=self.settings.pass_threshold),
            seconds=seconds,
        )


def _first_failure(current: Evaluation) -> str:
    for rollout in current.failed():
        error = rollout.error
        return f"{rollout.status}: {error.type}: {error.message}" if error else str(rollout.status)
    return "no answer within the deadline"
