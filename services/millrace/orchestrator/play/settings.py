"""How plays are asked for, and what training and evaluation differ in."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from millrace.config import EvalRunConfig, OrchestratorConfig
from millrace.config.sections.algo import DISTILLING
from millrace.config.sections.environments import EnvConfig
from millrace.config.sections.eval import FixedSamplingConfig
from millrace.config.sections.sampling import EvalSamplingConfig, SamplingConfig, TemperatureSchedule
from millrace.internal.v1.play_pb2 import Sampling
from millrace.rollouts.requests import changed
from millrace.rollouts.types import Purpose, RolloutStatus

PLAY_SLACK_S = 30.0
"""Time beyond the rollout deadline, which the env-server enforces itself, until a play counts as lost."""
REPLICA_GRACE_S = 5.0
"""Time for an env-server to notice that a lost replica's connections are dead, before its play is taken from it."""
MAX_LOST_BY_ENDPOINT = 8
"""Plays of a task that an external endpoint may lose in a row, about five minutes, before that counts as a failure:
nobody restarts somebody else's endpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaySettings:
    """What all plays of one purpose, or of one evaluation, have in common."""

    purpose: Purpose
    rollout_timeout_s: float
    """Deadline of one rollout, which its env-server enforces."""
    sampling: Sampling = field(default_factory=Sampling)
    eval_id: str = ""
    use_train_tasks: bool = True
    is_external: bool = False
    """The engines are endpoints that are not ours."""
    api_key_var: str = ""
    demo_key: str = ""
    """Field of a task with the demonstration for its teacher; empty without a demonstration."""
    timeout_s: float = math.inf
    """Time after which a play counts as lost."""
    rest_timeout_s: float = math.inf
    """Time after which the rest of a play counts as lost that has come in part, of a task whose members end
    together."""
    replica_grace_s: float = 0.0
    """Time after the loss of its replica from which a play counts as lost."""
    max_playing: int | None = None
    """Most rollouts that are played at once; None leaves it to the env-servers' capacity."""
    max_blameless_attempts: int | None = None
    """Attempts in a row that may be lost before that counts as a failure; None: as many as it takes."""
    hopeless: frozenset[RolloutStatus] = frozenset()
    """Outcomes of one member that end the whole play at once, because another attempt cannot change them."""
    temperature_at: Callable[[int], float] | None = None
    """The temperature by planned step, where it is not the same for all."""

    def sampling_at(self, planned_step: int) -> Sampling:
        """Return how rollouts are sampled that are planned for a step: with the step's temperature, if it has a
        schedule.
        """
        if self.temperature_at is None:
            return self.sampling
        return changed(self.sampling, temperature=self.temperature_at(planned_step))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedEnv:
    """How much of one environment is played, and how often."""

    name: str
    num_examples: int
    """Tasks; -1 is all."""
    rollouts_per_example: int
    interval: int = 1
    """Steps between evaluations."""
    sampling: Sampling
    """How the model is sampled there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """The evaluation of one run."""

    envs: tuple[EvaluatedEnv, ...]
    plays: PlaySettings
    pass_threshold: float = 1.0
    use_train_tasks: bool = False
    """Of environments that have held-out tasks, too."""
    is_whole_run: bool = False
    """The run is nothing but this evaluation: a successor goes on with it instead of beginning anew."""


def plays_of_training(config: OrchestratorConfig, env: EnvConfig) -> PlaySettings:
    """Return the settings of plays of an environment that is trained on."""
    sampling = config.sampling_of(env)
    return PlaySettings(
        purpose=Purpose.TRAIN,
        rollout_timeout_s=config.rollout_timeout_s,
        sampling=changed(
            _sampling(sampling),
            allows_bias=sampling.allow_biased_sampling,
            is_plain=config.algo.type in DISTILLING,
            holds_temperature=sampling.temp_scheduler is not None,
        ),
        timeout_s=config.rollout_timeout_s + PLAY_SLACK_S,
        rest_timeout_s=PLAY_SLACK_S,
        replica_grace_s=REPLICA_GRACE_S,
        hopeless=frozenset({RolloutStatus.PROMPT_TOO_LONG, RolloutStatus.QUARANTINED}),
        temperature_at=_temperature_at(sampling.temp_scheduler, max_steps=config.max_steps),
        demo_key=config.demo_key,
    )


def _temperature_at(schedule: TemperatureSchedule | None, *, max_steps: int | None) -> Callable[[int], float] | None:
    """Return the temperature as a function of the planned step; None without a schedule.

    The schedule ends after its own number of steps, else after `max_steps`. Every rollout records its temperature
    for the trainer.
    """
    if schedule is None:
        return None
    steps = max_steps if schedule.total_steps is None else schedule.total_steps
    # Steps count from 0: the last one, at which the schedule has its end temperature, is `steps - 1`.
    last = 1 if steps is None else max(steps - 1, 1)

    def at(step: int) -> float:
        """Return the temperature at a step; from the last step of the schedule on it is the end temperature."""
        done = min(step / last, 1.0)
        share = done if schedule.type == "linear" else (1 - math.cos(math.pi * done)) / 2
        return schedule.start_temperature + share * (schedule.end_temperature - schedule.start_temperature)

    return at


def of_training(config: OrchestratorConfig) -> EvalSettings | None:
    """Return the settings of evaluations during training; None if they are off."""
    settings = config.eval
    if settings is None:
        return None
    return EvalSettings(
        envs=tuple(
            EvaluatedEnv(
                name=env.name,
                num_examples=env.num_examples or settings.num_examples,
                rollouts_per_example=env.rollouts_per_example or settings.rollouts_per_example,
                interval=env.interval or settings.interval,
                sampling=_sampling(env.sampling.over(settings.sampling)),
            )
            for env in settings.env
        ),
        plays=PlaySettings(
            purpose=Purpose.EVAL,
            rollout_timeout_s=config.rollout_timeout_s,
        ),
    )


def of_run(config: EvalRunConfig) -> EvalSettings:
    """Return the settings with which an evaluation run plays, by its config: external endpoints, and no training."""
    return EvalSettings(
        envs=tuple(
            EvaluatedEnv(
                name=env.name,
                num_examples=env.num_examples or config.num_examples,
                rollouts_per_example=env.rollouts_per_example or config.rollouts_per_example,
                sampling=_sampling(env.sampling.over(config.sampling)),
            )
            for env in config.env
        ),
        plays=PlaySettings(
            purpose=Purpose.EVAL,
            rollout_timeout_s=config.rollout_timeout_s,
            is_external=True,
            api_key_var=(config.client and config.client.api_key_var) or "",
            max_playing=config.max_concurrent,
            max_blameless_attempts=MAX_LOST_BY_ENDPOINT,
        ),
        pass_threshold=config.pass_threshold,
        use_train_tasks=config.tasks == "train",
        is_whole_run=True,
    )


def _taken(extra: dict[str, Any], name: str) -> float:
    """Remove field `name` from `extra`, the further fields of a request, and return it as a number.

    Returns 0, and leaves the field, if it is no number or not there.
    """
    value = extra.get(name)
    if not isinstance(value, int | float):
        return 0.0
    del extra[name]
    return value


def _sampling(config: SamplingConfig | EvalSamplingConfig | FixedSamplingConfig) -> Sampling:
    """Return sampling settings of the config as the message that env-servers get.

    Fields without a place of their own in it become JSON of further fields.
    """
    extra = dict(config.extra_body)
    if not isinstance(config, FixedSamplingConfig):
        fields = {
            "presence_penalty": config.presence_penalty,
            "frequency_penalty": config.frequency_penalty,
            "min_tokens": config.min_tokens,
            "stop": config.stop,
        }
        extra |= {name: value for name, value in fields.items() if value}
    # Users of other servers write these two among the further fields.
    top_k, min_p = _taken(extra, "top_k"), _taken(extra, "min_p")
    return Sampling(
        temperature=config.temperature,
        max_tokens=0 if config.max_tokens is None else config.max_tokens,  # which says nothing
        top_p=config.top_p,
        top_k=max(config.top_k, int(top_k), 0),
        min_p=config.min_p or min_p,
        repetition_penalty=config.repetition_penalty,
        extra_body_json=json.dumps(extra, sort_keys=True) if extra else "",
    )
