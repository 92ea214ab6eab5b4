"""`[orchestrator.algo]`: how rollouts become per-token credit, and the teacher of on-policy distillation."""

from collections.abc import Iterator
from typing import Literal

from millrace.config.section import (
    IMPORT_PATH_PATTERN,
    BrokenRule,
    ConfigSection,
    FreeTable,
    broken,
    option,
    required,
    table,
)
from millrace.config.sections.shared import VARIABLE_PATTERN, WITHHELD_KEY_PREFIX, ClientConfig
from millrace.config.tree import Facts, OnlyFor


class TeacherConfig(ClientConfig):
    """The frozen model of opd: an OpenAI-compatible server with `prompt_logprobs` of token ids."""

    name: str = required("Name that the server knows it by.", min_length=1)
    base_url: list[str] = required("URLs ending in `/v1`; rollouts are spread over them.", min_length=1)
    api_key_var: str | None = option(
        None,
        f"Environment variable of the env-server with the key, best `{WITHHELD_KEY_PREFIX}…`.",
        pattern=VARIABLE_PATTERN,
    )


_OF_GRPO = Facts(only_for=OnlyFor(".type", ("grpo", "echo")))
_CUSTOM_ONLY = Facts(only_for=OnlyFor(".type", ("custom",)))
_OfOneEnvironment = Literal[
    "grpo", "rloo", "opo", "reinforce_pp", "max_rl", "custom", "rae", "hierarchical_grpo", "echo"
]
COMPARING = ("grpo", "rloo", "opo", "reinforce_pp", "max_rl", "echo")
"""Algorithms that compare the rewards of rollouts of the same task."""
PER_AGENT = ("rae", "hierarchical_grpo")
"""Algorithms that give each trained agent of a rollout an advantage of its own."""
DISTILLING = ("opd", "opsd")
"""Algorithms whose advantages are a teacher's log-probabilities minus the policy's."""
HINT = "{demonstration}"
"""The place of a task's demonstration in the template of opsd."""
_OPSD_ONLY = Facts(only_for=OnlyFor(".type", ("opsd",)))
_SHAPED = ("grpo", "rloo", "opo", "reinforce_pp", "custom", "echo")
"""Those that may compare shaped rewards: max_rl divides by their mean, which has to stay a pass rate."""
DEFAULT_ALPHA = 0.1
"""Weight of a token that a tool replied, in echo."""


class OverlongConfig(ConfigSection):
    """DAPO's punishment, subtracted from the reward of responses that come near the limit."""

    buffer_tokens: int = required("Tokens below `max_tokens` over which the punishment grows from 0.", ge=1)
    max_tokens: int = required(
        "Sampled tokens of a rollout from which the punishment is whole.",
        ge=1,
    )
    factor: float = option(1.0, "The whole punishment.", gt=0)


class EchoRoleConfig(ConfigSection):
    """Messages of one role that the environment adds after a reply."""

    alpha: float = required("Weight of each of their tokens in the cross-entropy.", gt=0)


class EchoRolesConfig(ConfigSection):
    """Roles whose messages echo learns to predict."""

    system: EchoRoleConfig | None = option(None, "System messages; not learned if left out.")
    user: EchoRoleConfig | None = option(None, "What a user says; not learned if left out.")
    assistant: EchoRoleConfig | None = option(None, "Replies that the policy did not sample; not learned if left out.")
    tool: EchoRoleConfig | None = option(None, "What tools reply; not learned if left out.")


class AdvantageConfig(ConfigSection):
    """How the rewards of a group become advantages."""

    type: _OfOneEnvironment = option(
        "grpo",
        "docs/algorithms.md defines them.",
    )
    std_norm: Literal["none", "group", "batch"] = option(
        "none", "grpo and echo: divide by the deviation of the group's or batch's rewards.", facts=_OF_GRPO
    )
    leave_one_out: bool = option(False, "grpo and echo: compare with the mean of the others.", facts=_OF_GRPO)
    credit: Literal["rollout", "turn"] = option(
        "rollout",
        "grpo, rloo, reinforce_pp: a turn's tokens earn the whole reward, or what their turn and later ones earned.",
        facts=Facts(only_for=OnlyFor(".type", ("grpo", "rloo", "reinforce_pp"))),
    )
    import_path: str | None = option(
        None,
        "custom: `my.module:fn` of (rewards, lengths, **kwargs), arrays over a task's rollouts. Returns one "
        "advantage each.",
        pattern=IMPORT_PATH_PATTERN,
        facts=_CUSTOM_ONLY,
    )
    kwargs: FreeTable = table(dict, "custom: arguments of the function.", facts=_CUSTOM_ONLY)
    decay: float = option(
        0.95,
        "rae: decay of the moving average of an agent's rewards.",
        facts=Facts(only_for=OnlyFor(".type", ("rae",))),
        ge=0,
        lt=1,
    )
    episode_agents: list[str] = option(
        [],
        "hierarchical_grpo: agents whose traces are compared within a rollout.",
        facts=Facts(only_for=OnlyFor(".type", ("hierarchical_grpo",))),
    )
    roles: EchoRolesConfig | None = option(
        None,
        "echo only: whose messages are learned.",
        facts=Facts(only_for=OnlyFor(".type", ("echo",)), default_text=f"`tool.alpha = {DEFAULT_ALPHA}`"),
    )
    overlong: OverlongConfig | None = option(
        None,
        "DAPO's soft punishment of long responses, taken off the rewards that are compared; off if left out.",
        facts=Facts(only_for=OnlyFor(".type", _SHAPED)),
    )

    @property
    def role_weights(self) -> dict[str, float]:
        """Return the weight in echo's cross-entropy of a token, by its message's role.

        Roles that are not learned are missing.
        """
        if self.roles is None:
            return {"tool": DEFAULT_ALPHA}
        found = {name: getattr(self.roles, name) for name in EchoRolesConfig.model_fields}
        return {name: each.alpha for name, each in found.items() if each is not None}

    def broken_rules(self, where: str) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this table that do not hold.

        `where` is the table's dotted path, for messages.
        """
        if self.type == "echo" and not self.role_weights:
            yield broken("names no role; write `tool.alpha = 0.1`, or leave the table out", f"{where}.roles")
        if self.type == "custom" and self.import_path is None:
            message = "is required for custom: name the function that makes the advantages, as my.module:fn"
            yield broken(message, f"{where}.import_path", f"{where}.type")
        if self.overlong is None:
            return
        limit, buffer = f"{where}.overlong.max_tokens", f"{where}.overlong.buffer_tokens"
        if self.overlong.buffer_tokens > self.overlong.max_tokens:
            yield broken(f"must be at most `{limit}`, which is {self.overlong.max_tokens}; lower it", buffer, limit)


class EnvAlgoConfig(AdvantageConfig):
    """How one environment's rewards become advantages."""

    type: _OfOneEnvironment = required("As `orchestrator.algo.type`.")


class AlgoConfig(AdvantageConfig):
    """How rollouts become advantages."""

    type: Literal[  # pyright: ignore[reportIncompatibleVariableOverride] - the wider choice of the whole run
        "grpo",
        "rloo",
        "opo",
        "reinforce_pp",
        "max_rl",
        "custom",
        "opd",
        "rae",
        "echo",
        "hierarchical_grpo",
        "opsd",
        "sft",
    ] = option(
        "grpo",
        "docs/algorithms.md defines them; sft is refused at submission.",
    )
    demo_key: str = option(
        "demonstration",
        "opsd: the task's field with the demonstration.",
        facts=_OPSD_ONLY,
        min_length=1,
        max_length=200,
    )
    template: str = option(
        f"The task below was solved before, with this result:\n\n{HINT}",
        f"opsd: the teacher's system message, with `{HINT}`.",
        facts=_OPSD_ONLY,
        max_length=20_000,
    )
    teacher: TeacherConfig | None = option(
        None,
        "The teacher of opd, required there; off for the others (that of opsd is the policy).",
        facts=Facts(only_for=OnlyFor(".type", ("opd",))),
    )
    kl_coef: float = option(
        1.0, "opd and opsd: factor of the advantages.", facts=Facts(only_for=OnlyFor(".type", DISTILLING)), gt=0
    )

    def broken_rules(self, where: str) -> Iterator[BrokenRule]:
        """Yield the rules over several keys of this table that do not hold.

        `where` is the table's dotted path, for messages.
        """
        yield from super().broken_rules(where)
        if self.type == "opsd" and HINT not in self.template:
            message = f"must have `{HINT}` where the demonstration of a task is to stand"
            yield broken(message, f"{where}.template")
