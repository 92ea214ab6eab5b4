"""One environment of training or evaluation: its keys, `select`, and `judge`."""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import field_validator, model_validator

from millrace.config.section import (
    IDENTIFIER_PATTERN,
    IMAGE_PATTERN,
    BrokenRule,
    ConfigSection,
    FreeTable,
    option,
    required,
    table,
)
from millrace.config.sections.algo import EnvAlgoConfig
from millrace.config.sections.sampling import EnvSamplingConfig, EvalEnvSamplingConfig
from millrace.config.sections.shared import VARIABLE_PATTERN
from millrace.config.tree import Facts, Path, dotted

_UNNAMED = "unnamed"
_OWN = "the environment's"
_AS_FOR_ALL = "as for all"


class AgentConfig(ConfigSection):
    """Limits of an agent with a loop of its own."""

    branches: Literal["used", "last", "longest", "all"] = option(
        "used",
        "used: train on the last conversation, and on calls whose reply it quotes. last: the last conversation. "
        "longest: that with most sampled tokens. all: every call.",
    )
    max_requests: int | None = option(
        None, "Model calls; more are answered 403.", facts=Facts(default_text=_OWN), ge=1, lt=2**31
    )
    max_tokens: int | None = option(
        None,
        "Sampled tokens, after which calls are answered 403.",
        facts=Facts(default_text=_OWN),
        ge=1,
        lt=2**31,
    )
    max_concurrent: int | None = option(
        None, "Model calls at once; more wait.", facts=Facts(default_text=_OWN), ge=1, lt=2**31
    )
    timeout_s: float | None = option(
        None,
        "Seconds until the rollout's address answers 410 (v0: `EnvironmentTimeout`).",
        facts=Facts(default_text=_OWN),
        gt=0,
        le=86400 * 7,
    )

    def to_wire(self) -> str:
        """Return `branches` and the limits of the agent as JSON text for env-servers.

        Empty where all have their defaults.
        """
        counts = {"max_requests": self.max_requests, "max_tokens": self.max_tokens}
        limits_given = {**counts, "max_concurrent": self.max_concurrent, "deadline_s": self.timeout_s}
        limits = {name: value for name, value in limits_given.items() if value is not None}
        if not limits and self.branches == "used":
            return ""
        return json.dumps({"branches": self.branches, "limits": limits}, sort_keys=True)


# `judge` of an environment: what its reward functions ask other endpoints.


class JudgeConfig(ConfigSection):
    """Endpoints that an environment calls while it scores."""

    max_concurrent: int = option(
        32,
        "Calls at once per worker; more wait.",
        ge=1,
        lt=2**31,
    )
    timeout_s: float = option(
        60.0,
        "Seconds for a call with its retries; then the rollout fails (`JudgeTimeout`).",
        gt=0,
        le=86400,
    )
    api_key_var: str | None = option(
        None,
        "Environment variable of the env-server with the key.",
        pattern=VARIABLE_PATTERN,
    )


class NamedEnv(ConfigSection):
    """What training and evaluation environments share."""

    id: str = required("Installed `verifiers` package, such as `reverse-text`.", pattern=IDENTIFIER_PATTERN)
    name: str = option(
        _UNNAMED,
        "Unique name in metrics and logs, not `all`.",
        facts=Facts(default_text="the id"),
        pattern=IDENTIFIER_PATTERN,
    )
    args: FreeTable = table(dict, "Arguments of its loader.")
    judge: JudgeConfig = table(JudgeConfig, "Endpoints that its reward functions ask.")
    agent: AgentConfig = table(AgentConfig, "Its agents with a loop of their own; others have no such limits.")
    python: str | None = option(
        None,
        "Interpreter on the env-server's machine, with its own `verifiers`; `MILLRACE_ENV_PYTHONS` must allow it.",
        facts=Facts(default_text="one that has what its package asks for"),
        min_length=1,
    )
    image: str | None = option(
        None,
        "Container image of env-servers (`MILLRACE_ENV_IMAGE`) that play it, and nothing else.",
        facts=Facts(default_text="env-servers that announce none"),
        pattern=IMAGE_PATTERN,
    )

    @model_validator(mode="before")
    @classmethod
    def _name_is_id(cls, data: Any) -> Any:
        """Return the raw table of an environment with its id as its name, if it has no name of its own."""
        if isinstance(data, dict) and data.get("name") is None:
            return {**data, "name": data.get("id", _UNNAMED)}
        return data


# `select`: which tasks of an environment are trained on, or evaluated.

_SLICE = re.compile(r"(\d*):(\d*)(?::(\d*))?")
_LISTS = ("idx", "ids", "keys", "names")


class TaskMatchConfig(ConfigSection):
    """Tasks by position or identity; any list may name a task."""

    idx: list[str] = table(
        list,
        'Positions from 0, or slices `"start:stop:step"`; also as one text, such as `"0:10,17"`.',
    )
    ids: list[str] = table(list, "`id` of their data (v1); column `id`, else `example_id` (v0).")
    keys: list[str] = table(list, "Task ids of samples and events, or `key` (v1).")
    names: list[str] = table(list, "Names (v1).")

    @field_validator("idx", mode="before")
    @classmethod
    def _positions(cls, value: Any) -> Any:
        """Return positions as a list of texts: one value becomes a list, and texts are split at commas.

        Raise ValueError for a text that is no position. A value of another type is returned unchanged, for pydantic to
        refuse.
        """
        items = [value] if isinstance(value, int | str) else value
        if not isinstance(items, list) or any(not isinstance(item, int | str) for item in items):
            return items
        parts = [part.strip() for item in items for part in str(item).split(",")]
        for part in parts:
            _range_of(part)
        return parts

    @field_validator(*_LISTS)
    @classmethod
    def _once(cls, value: list[str]) -> list[str]:
        """Return the list; raise ValueError if it names something twice."""
        if twice := next((item for item in value if value.count(item) > 1), None):
            raise ValueError(f"names {twice!r} twice; name it once")
        return value

    def to_wire(self) -> dict[str, Any]:
        """Return the match in the form that env-servers take: slices as [start, stop, step], an open end as null."""
        lists: dict[str, Any] = {name: getattr(self, name) for name in _LISTS}
        return {**lists, "idx": [_range_of(part) for part in self.idx]}


class SelectConfig(ConfigSection):
    """Which tasks are played: `include` keeps, `exclude` drops, then `shuffle`, `skip` and `limit` pick."""

    include: TaskMatchConfig = table(TaskMatchConfig, "Keep these alone; all if it names none.")
    exclude: TaskMatchConfig = table(TaskMatchConfig, "Drop these.")
    shuffle: bool = option(False, "Shuffle before `skip` and `limit`.")
    seed: int = option(0, "Seed of `shuffle`.", ge=0)
    skip: int = option(0, "Tasks dropped from the front.", ge=0)
    limit: int | None = option(None, "Most tasks taken of the rest; all if left out.", ge=1)

    def to_wire(self, *, most: int = -1) -> dict[str, Any]:
        """Return the selection in the form that env-servers take.

        `most` limits the number of tasks beside `limit` of the selection; below 1 it does not.
        """
        limits = [each for each in (self.limit, most if most > 0 else None) if each is not None]
        values = {"shuffle": self.shuffle, "seed": self.seed, "skip": self.skip}
        both = {"include": self.include.to_wire(), "exclude": self.exclude.to_wire()}
        return {**both, **values, "limit": min(limits, default=None)}


def selection_json(
    *,
    train: SelectConfig | None = None,
    evaluated: SelectConfig | None = None,
    num_evaluated: int = -1,
    trained: Sequence[SelectConfig | None] = (),
) -> str:
    """Return the selection of an environment's tasks as JSON that env-servers take; empty if nothing is selected.

    `train` is the selection of training, `evaluated` that of evaluation. `trained` are the selections of all training
    environments with the same id and args: none of their tasks may be among those that `evaluated` chooses.
    `num_evaluated` is `num_examples`, -1 for all tasks.
    """
    if train is None and evaluated is None:
        return ""
    chosen: dict[str, Any] = {}
    if train is not None:
        chosen["train"] = train.to_wire()
    if evaluated is not None:
        chosen["eval"] = evaluated.to_wire(most=num_evaluated)
        chosen["apart_from"] = [(each or SelectConfig()).to_wire() for each in trained]
    return json.dumps(chosen, sort_keys=True)


def _range_of(part: str) -> list[int | None]:
    """Return a position such as `5`, or a slice such as `0:100`, as [start, stop, step]; stop is None for an open end.

    Raises ValueError for anything else, and for an empty slice.
    """
    if part.isdecimal() and part.isascii():
        return [int(part), int(part) + 1, 1]
    match = _SLICE.fullmatch(part)
    if match is None or not part.isascii():
        raise ValueError(f'{part!r} is no position: write a number from 0, or a slice such as "0:100" or "::2"')
    start, stop, step = (int(each) if each else None for each in match.groups())
    if step == 0:
        raise ValueError(f"slice {part!r} has a step of 0")
    if stop is not None and (start or 0) >= stop:
        raise ValueError(f"slice {part!r} is empty")
    return [start or 0, stop, step or 1]


class EnvConfig(NamedEnv):
    """One training environment."""

    select: SelectConfig | None = option(
        None,
        "Which of its training tasks are drawn. Where an evaluation has a `select`, too, it may name none of them.",
        facts=Facts(default_text="all", is_own=True),
    )
    weight: float = option(
        1.0,
        "Share of the tasks, relative to other environments.",
        facts=Facts(aliases=("ratio",)),
        gt=0,
    )
    algo: EnvAlgoConfig | None = option(
        None,
        "How the rewards of this environment become advantages; nothing of `orchestrator.algo` counts then.",
        facts=Facts(default_text="as in `orchestrator.algo`"),
    )
    sampling: EnvSamplingConfig = table(
        EnvSamplingConfig, "How the policy is sampled there; what is left out is taken from `orchestrator.sampling`."
    )
    rollouts_per_example: int | None = option(
        None,
        "Rollouts per task. Batches then end with a whole group, and may exceed `orchestrator.batch_size`.",
        facts=Facts(aliases=("group_size",), default_text=_AS_FOR_ALL),
        ge=1,
    )
    min_abs_advantage: float = option(
        0.0,
        "Leave out tokens of at most this absolute advantage, and samples without others.",
        ge=0,
    )
    reward_range: list[float] = option(
        [0.0, 1.0],
        "Lowest and highest reward, for `buffer.online_difficulty_filtering` and max_rl; others end the run.",
        min_length=2,
        max_length=2,
    )


class EvalEnvConfig(NamedEnv):
    """One evaluation environment. With the name of a training environment, `id` and `args` must be the same."""

    select: SelectConfig | None = option(
        None,
        "Which of its held-out tasks are played; of all its tasks where none are held out. `num_examples` is taken "
        "from what is selected.",
        facts=Facts(default_text="all", is_own=True),
    )
    num_examples: int | None = option(
        None, "Tasks; -1: all held-out ones.", facts=Facts(default_text=_AS_FOR_ALL), ge=-1
    )
    rollouts_per_example: int | None = option(
        None,
        "Rollouts per task.",
        facts=Facts(aliases=("group_size",), default_text=_AS_FOR_ALL, is_own=True),
        ge=1,
    )
    sampling: EvalEnvSamplingConfig = table(
        EvalEnvSamplingConfig,
        "How the model is sampled there; what is left out is as for all environments of the evaluation.",
        facts=Facts(is_own=True),
    )


class PeriodicEvalEnvConfig(EvalEnvConfig):
    """One environment that is evaluated during training."""

    interval: int | None = option(None, "Steps between evaluations.", facts=Facts(default_text=_AS_FOR_ALL), ge=1)


def env_names(envs: Sequence[NamedEnv], path: Path, *, reserved: tuple[str, ...] = ()) -> Iterator[BrokenRule]:
    """Yield a violation for each environment that has the name of an earlier one, or one of the `reserved` names.

    `path` is the path of the list of environments. Metrics could not tell such environments apart.
    """
    first: dict[str, int] = {}
    for index, env in enumerate(envs):
        where, same = (*path, index, "name"), first.setdefault(env.name, index)
        if env.name in reserved:
            yield BrokenRule(
                paths=(where,), message=f"must not be `{env.name}`: metrics over all environments are called so"
            )
        elif same != index:
            other = f"`{dotted((*path, same))}` is called `{env.name}` too"
            message = f"must be unique, but {other}; give one of them another `name`"
            yield BrokenRule(paths=(where, (*path, same, "name")), message=message)


def have_conversations(envs: Iterable[NamedEnv]) -> bool:
    """Return whether at least one environment plays conversations.

    One with `message_type = "completion"` completes texts.
    """
    return any(env.args.get("message_type") != "completion" for env in envs)
