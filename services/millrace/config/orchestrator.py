"""`[orchestrator]`: environments, sampling, batches, staleness, evaluation."""

from typing import Any

from pydantic import model_validator

from millrace.config.algo import AlgoConfig
from millrace.config.section import (
    IDENTIFIER_PATTERN,
    FreeTable,
    Section,
    as_tree,
    option,
    required,
    table,
)
from millrace.config.shared import DEFAULT_MODEL
from millrace.config.trainer import DEFAULT_SEQ_LEN

_AS_IN_TRAINING = "as in `orchestrator.sampling`"
_UNNAMED = "unnamed"


class SamplingConfig(Section):
    """How the policy is sampled in training rollouts."""

    temperature: float = option(1.0, "Above 0. The trainer divides its logits by the same value.", gt=0)
    max_tokens: int | None = option(
        None,
        "Most tokens sampled per turn, at least 1 and below `orchestrator.seq_len`; whatever fits if left out.",
        aliases=("max_completion_tokens",),
        ge=1,
    )
    top_p: float = option(
        1.0,
        "Sample from the smallest set of tokens with this much probability, above 0 and at most 1. Below 1 the "
        "recorded log-probabilities stay those of the full distribution.",
        gt=0,
        le=1,
    )
    extra_body: FreeTable = table(dict, "More fields of the request to the engine, passed on as they are.")


class EvalSamplingConfig(Section):
    """How the policy is sampled in evaluations. What is left out is taken from `orchestrator.sampling`."""

    temperature: float = option(1.0, "At least 0; 0 takes the likeliest token.", default_text=_AS_IN_TRAINING, ge=0)
    max_tokens: int | None = option(
        None,
        "Most tokens sampled per turn, at least 1 and below `orchestrator.seq_len`.",
        aliases=("max_completion_tokens",),
        default_text=_AS_IN_TRAINING,
        ge=1,
    )
    top_p: float = option(1.0, "Above 0 and at most 1.", default_text=_AS_IN_TRAINING, gt=0, le=1)
    extra_body: FreeTable = table(dict, "More fields of the request to the engine.", default_text=_AS_IN_TRAINING)


class _NamedEnv(Section):
    """What training and evaluation environments share."""

    id: str = required(
        "Id of an installed `verifiers` environment package, for example `reverse-text`.", pattern=IDENTIFIER_PATTERN
    )
    name: str = option(
        _UNNAMED,
        "Name in metrics and logs, unique in its list, not `all`.",
        default_text="the id",
        pattern=IDENTIFIER_PATTERN,
    )
    args: FreeTable = table(dict, "Arguments of the environment's loader, passed on as they are.")

    @model_validator(mode="before")
    @classmethod
    def _name_is_id(cls, data: Any) -> Any:
        """Name an environment by its id when it has no name of its own."""
        if isinstance(data, dict) and data.get("name") is None:
            return {**data, "name": data.get("id", _UNNAMED)}
        return data


class EnvConfig(_NamedEnv):
    """One training environment."""

    weight: float = option(
        1.0, "Share of the tasks drawn from it, relative to the other environments, above 0.", aliases=("ratio",), gt=0
    )


class EvalEnvConfig(_NamedEnv):
    """One evaluation environment. Its held-out tasks are played.

    One with the name of a training environment is that environment: `id` and `args` have to be the same.
    """


class EvalConfig(Section):
    """Evaluation of the policy during the run: before the first step, every `interval` steps, at the end."""

    env: list[EvalEnvConfig] = table(list, "Environments to evaluate on.", default_text="the training environments")
    num_examples: int = option(-1, "Tasks per environment: -1 for all held-out tasks, else at least 1.", ge=-1)
    rollouts_per_example: int = option(1, "Rollouts per task, at least 1.", aliases=("group_size",), ge=1)
    interval: int = option(100, "Steps between evaluations, at least 1.", ge=1)
    skip_first_step: bool = option(False, "Leave out the evaluation before the first step.")
    sampling: EvalSamplingConfig = table(EvalSamplingConfig, "How the policy is sampled.")


class OrchestratorModelConfig(Section):
    """The model whose policies are sampled: the trainer publishes them, so there is nothing to choose here."""

    name: str = option(
        DEFAULT_MODEL,
        "Only checked: has to be equal to `model.name`, which decides. Shared: `model.name`.",
        min_length=1,
    )


class OrchestratorConfig(Section):
    """The loop of an RL run: which rollouts are played and what becomes a batch."""

    model: OrchestratorModelConfig = table(OrchestratorModelConfig, "The model.")
    env: list[EnvConfig] = required("Training environments, at least one (`[[orchestrator.env]]`).", min_length=1)
    sampling: SamplingConfig = table(SamplingConfig, "How the policy is sampled.")
    algo: AlgoConfig = table(AlgoConfig, "How rollouts become advantages.")
    eval: EvalConfig | None = option(None, "Evaluation during the run; off if left out.")
    batch_size: int = option(
        128, "Rollouts per optimizer step, at least 1, a multiple of `orchestrator.rollouts_per_example`.", ge=1
    )
    rollouts_per_example: int = option(
        1, "Rollouts per task whose rewards are compared; grpo needs at least 2.", aliases=("group_size",), ge=1
    )
    oversampling_factor: float = option(
        1.0, "Start this many times the rollouts that a batch needs, and train on the first that finish; >= 1.", ge=1
    )
    async_level: int = option(
        1,
        "Steps that sampling may run ahead of training, at least 0; 0 alternates them. Shared: `async_level`.",
        aliases=("max_async_level",),
        ge=0,
    )
    max_off_policy_steps: int = option(
        8, "A rollout with a token sampled more versions ago than this is dropped; at least `async_level`.", ge=0
    )
    max_steps: int | None = option(
        None, "Batches to cut, at least 1; unlimited if left out. Shared: `max_steps`.", ge=1
    )
    seq_len: int = option(
        DEFAULT_SEQ_LEN,
        "Longest sample in tokens, prompt included, at least 2; longer ones are cut there. Shared: `seq_len`.",
        ge=2,
    )
    seed: int = option(0, "Seed of the task order, at least 0. Shared: `seed`.", ge=0)
    filter_zero_advantages: bool = option(
        True, "Leave out samples whose advantages are all zero; the batch gets smaller, it is not refilled."
    )
    rollout_timeout_s: float = option(
        600.0, "Seconds until an unfinished rollout is given up as failed, above 0.", gt=0
    )

    @model_validator(mode="before")
    @classmethod
    def _evaluate_as_trained(cls, data: Any) -> Any:
        """Fill the environments and the sampling of evaluations from training where they are left out."""
        if not isinstance(data, dict):
            return data
        tree = as_tree(data)
        evaluation = tree.get("eval")
        if not isinstance(evaluation, dict):
            return tree
        if not evaluation.get("env") and isinstance(tree.get("env"), list):
            evaluation["env"] = [_without_weight(env) for env in tree["env"]]
        sampling, training = evaluation.setdefault("sampling", {}), tree.get("sampling", {})
        if isinstance(sampling, dict) and isinstance(training, dict):
            for key in EvalSamplingConfig.model_fields:
                if key in training:
                    sampling.setdefault(key, training[key])
        return tree


def _without_weight(env: Any) -> Any:
    """A raw training environment as an evaluation environment."""
    return {key: value for key, value in env.items() if key != "weight"} if isinstance(env, dict) else env
