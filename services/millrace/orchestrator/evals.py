"""Online evaluation: held-out tasks played with the current policy; never trained on."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.config.schema import OrchestratorConfig
from millrace.errors import UnavailableError
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.orchestrator.dispatcher import RunIdentity, sampling_message
from millrace.orchestrator.env_pool import EnvPool
from millrace.orchestrator.policy_driver import PolicyDriver
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.telemetry import waits
from millrace.v1 import event_pb2

log = logging.getLogger(__name__)

SLACK_S = 60.0
"""Beyond one rollout's deadline, for an evaluation to finish; what is missing then counts as failed."""
PLACE_RETRY_S = 0.2


@dataclass(slots=True, kw_only=True)
class _Eval:
    """One evaluation of one environment in progress."""

    eval_id: str
    env: str
    num_tasks: int
    group_size: int
    rollouts: dict[tuple[int, int], Rollout] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def num_expected(self) -> int:
        return self.num_tasks * self.group_size


class Evaluator:
    """Plays evaluations and averages them."""

    def __init__(self, *, run: RunIdentity, config: OrchestratorConfig, envs: EnvPool, policies: PolicyDriver) -> None:
        self._run = run
        self._config = config
        self._envs = envs
        self._policies = policies
        self._open: dict[str, _Eval] = {}

    def specs(self, default: Sequence[env_service_pb2.EnvSpec]) -> list[str]:
        """Names of the environments that are evaluated: those of the config, else those trained on."""
        chosen = self._config.eval.env if self._config.eval is not None else []
        return [env.name for env in chosen] if chosen else [spec.name for spec in default]

    def add(self, rollout: Rollout) -> None:
        """Take an evaluation rollout of the stream; late ones of an ended evaluation are ignored."""
        current = self._open.get(rollout.eval_id)
        if current is not None:
            current.rollouts.setdefault((rollout.ordinal, rollout.member), rollout)
            current.changed.set()

    async def evaluate(self, env: str, *, step: int, min_version: int) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        """Play the held-out tasks of `env` on replicas at `min_version` or newer.

        Returns the report and the OK rollouts in order of (task, member). Raises UnavailableError if not one rollout
        came back OK.
        """
        settings = self._config.eval
        assert settings is not None
        opened = self._envs.envs[env]
        num_tasks = opened.num_eval or opened.num_train
        if settings.num_examples > 0:
            num_tasks = min(num_tasks, settings.num_examples)
        current = _Eval(
            eval_id=f"{env}@{step}-e{self._run.epoch}",
            env=env,
            num_tasks=num_tasks,
            group_size=settings.rollouts_per_example,
        )
        self._open[current.eval_id] = current
        began = time.monotonic()
        timeout_s = self._config.rollout_timeout_s + SLACK_S
        try:
            with waits.waiting(
                f"evaluation of {env} with policy {min_version}", waits_on="env-server", deadline_s=timeout_s
            ):
                async with asyncio.timeout(timeout_s):
                    await self._place(current, use_train_tasks=opened.num_eval == 0, min_version=min_version)
                    while len(current.rollouts) < current.num_expected:
                        current.changed.clear()
                        await current.changed.wait()
        except TimeoutError:
            log.warning("evaluation incomplete", extra={"env": env, "have": len(current.rollouts)})
        finally:
            del self._open[current.eval_id]
        return self._report(current, step=step, seconds=time.monotonic() - began)

    async def _place(self, current: _Eval, *, use_train_tasks: bool, min_version: int) -> None:
        settings = self._config.eval
        assert settings is not None
        sampling = sampling_message(
            temperature=settings.sampling.temperature,
            max_tokens=settings.sampling.max_tokens,
            top_p=settings.sampling.top_p,
            extra_body=settings.sampling.extra_body,
        )
        policy = self._policies.desired
        for index in range(current.num_tasks):
            while True:
                fit = [replica for replica in self._policies.ready() if replica.version >= min_version]
                servers = self._envs.servers_with(current.env)
                if fit and servers:
                    replica = fit[index % len(fit)]
                    request = env_service_pb2.PlayGroupRequest(
                        run_uid=self._run.uid,
                        purpose=rollout_pb2.PURPOSE_EVAL,
                        eval_id=current.eval_id,
                        ordinal=index,
                        members=range(current.group_size),
                        group_size=current.group_size,
                        env=self._envs.envs[current.env].spec,
                        use_train_tasks=use_train_tasks,
                        task_index=index,
                        base_url=replica.http_url,
                        model=replica.model,
                        sampling=sampling,
                        rollout_timeout_seconds=self._config.rollout_timeout_s,
                        epoch=self._run.epoch,
                        generation=self._run.generation,
                        tokenizer_manifest_key=policy.manifest_key if policy is not None else "",
                    )
                    if await self._envs.play(servers[index % len(servers)], request):
                        break
                await asyncio.sleep(PLACE_RETRY_S)

    def _report(self, current: _Eval, *, step: int, seconds: float) -> tuple[event_pb2.EvalCompleted, list[Rollout]]:
        rollouts = [current.rollouts[key] for key in sorted(current.rollouts)]
        good = [rollout for rollout in rollouts if rollout.status == RolloutStatus.OK]
        if not good:
            first = next(iter(rollouts), None)
            cause = "no answer within the deadline"
            if first is not None:
                cause = (
                    f"{first.status}: {first.error.type}: {first.error.message}" if first.error else str(first.status)
                )
            raise UnavailableError(
                f"evaluation of {current.env} at step {step}: none of {current.num_expected} rollouts finished; first "
                f"failure: {cause}",
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
            num_failed=current.num_expected - len(good),
            metrics={name: float(np.mean([r.metrics[name] for r in good if name in r.metrics])) for name in names},
            seconds=seconds,
        )
        return report, good
