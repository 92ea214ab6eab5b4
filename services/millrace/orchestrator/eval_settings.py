"""What an evaluation is: of which environments, how many rollouts, how sampled, and where they are played."""

from dataclasses import dataclass

from millrace.config.schema import EvalRunConfig, OrchestratorConfig
from millrace.internal.v1 import env_service_pb2
from millrace.orchestrator.dispatcher import sampling_message


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """The evaluation of one run."""

    envs: tuple[str, ...]
    num_examples: int
    """Tasks per environment; -1 is all."""
    rollouts_per_example: int
    sampling: env_service_pb2.Sampling
    rollout_timeout_s: float
    max_concurrent: int | None = None
    """Most rollouts that are played at once; None leaves it to the env-servers' capacity."""
    pass_threshold: float = 1.0
    is_external: bool = False
    """The engines are endpoints that are not ours."""
    api_key_var: str = ""
    is_whole_run: bool = False
    """The run is nothing but this evaluation: who takes it over goes on with it instead of beginning anew."""


def of_training(config: OrchestratorConfig) -> EvalSettings | None:
    """The evaluation beside training; None if it is off."""
    settings = config.eval
    if settings is None:
        return None
    return EvalSettings(
        envs=tuple(env.name for env in settings.env),
        num_examples=settings.num_examples,
        rollouts_per_example=settings.rollouts_per_example,
        sampling=sampling_message(
            temperature=settings.sampling.temperature,
            max_tokens=settings.sampling.max_tokens,
            top_p=settings.sampling.top_p,
            extra_body=settings.sampling.extra_body,
        ),
        rollout_timeout_s=config.rollout_timeout_s,
    )


def of_run(config: EvalRunConfig) -> EvalSettings:
    """The evaluation that an evaluation run is."""
    return EvalSettings(
        envs=tuple(env.name for env in config.env),
        num_examples=config.num_examples,
        rollouts_per_example=config.rollouts_per_example,
        sampling=sampling_message(
            temperature=config.sampling.temperature,
            max_tokens=config.sampling.max_tokens,
            top_p=config.sampling.top_p,
            extra_body=config.sampling.extra_body,
        ),
        rollout_timeout_s=config.rollout_timeout_s,
        max_concurrent=config.max_concurrent,
        pass_threshold=config.pass_threshold,
        is_external=True,
        api_key_var=(config.client and config.client.api_key_var) or "",
        is_whole_run=True,
    )
