"""`[orchestrator.algo]`: how rollouts become per-token credit, and the teacher of on-policy distillation."""

from typing import Literal

from millrace.config.section import ConfigSection, option, required
from millrace.config.sections.client import VARIABLE_PATTERN, WITHHELD_KEY_PREFIX, ClientConfig
from millrace.config.tree import Facts, OnlyFor


class TeacherConfig(ClientConfig):
    """The frozen model that opd distils from: an OpenAI-compatible server that gives `prompt_logprobs` of token ids."""

    name: str = required("Name that the server knows the teacher by.", min_length=1)
    base_url: list[str] = required(
        "URLs of the server's API, each ending in `/v1`; with several the rollouts are spread over them.", min_length=1
    )
    api_key_var: str | None = option(
        None,
        "Name of the environment variable of the env-server that holds the API key; the key itself is never written "
        f"anywhere. Let the name begin with `{WITHHELD_KEY_PREFIX}`: only the env-server itself asks the teacher, and "
        "environments, which are foreign code, inherit every other variable. None is sent if left out.",
        pattern=VARIABLE_PATTERN,
    )


class AlgoConfig(ConfigSection):
    """How rollouts become advantages."""

    type: Literal["grpo", "opd", "max_rl", "rae", "echo", "hierarchical_grpo", "opsd", "sft"] = option(
        "grpo",
        "grpo: reward minus the mean reward of the rollouts of the same task, not divided by a deviation. opd: "
        "on-policy distillation, per token the teacher's log-probability minus the policy's; rewards only show. "
        "The others are not there yet: "
        "runs with them are refused when they are submitted.",
    )
    teacher: TeacherConfig | None = option(
        None,
        "The teacher of opd, required there; off for the others.",
        facts=Facts(only_for=OnlyFor(".type", ("opd",))),
    )
    kl_coef: float = option(
        1.0, "opd only: multiplies every advantage.", facts=Facts(only_for=OnlyFor(".type", ("opd",))), gt=0
    )
