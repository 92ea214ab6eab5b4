"""`[orchestrator.sampling]` and `[orchestrator.eval.sampling]`: how the policy is sampled."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeVar

from millrace.config.section import BrokenRule, ConfigSection, FreeTable, broken, option, required, table
from millrace.config.tree import Facts, Limit, Path

_ROOM = Limit(
    "below", "orchestrator.seq_len", " and counts the prompt too; lower it, or raise `seq_len`", is_clamped=True
)


def _as_in_training(name: str, **facts: Any) -> Facts:
    """Return facts of a key of evaluations: left out, it has the value of `orchestrator.sampling.NAME`.

    `facts` are more.
    """
    return Facts(follows=f"orchestrator.sampling.{name}", default_text="as in `orchestrator.sampling`", **facts)


MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 100.0
"""What engines take; logits divided by less leave float32."""
BIASING = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_tokens": 0}
"""Sampling keys that the trainer does not compute, and their values without effect."""
NEUTRAL: Mapping[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, **BIASING}
"""Our defaults of sampling parameters. Engines may have other defaults: vLLM those of the model."""
BOUNDS: Mapping[str, Mapping[str, Any]] = {
    "top_p": {"gt": 0, "le": 1},
    "top_k": {"ge": -1, "lt": 2**31},  # the engine's column is int32
    "min_p": {"ge": 0, "le": 1},
    "repetition_penalty": {"gt": 0, "le": 100},
    "presence_penalty": {"ge": -2, "le": 2},
    "frequency_penalty": {"ge": -2, "le": 2},
    "min_tokens": {"ge": 0, "lt": 2**31},
    "max_tokens": {"ge": 1},
}
"""Bounds of sampling parameters as pydantic has them, in the config as in requests to our engine.

Those of a temperature differ: what is trained on cannot be greedy.
"""
_TEXTS: Mapping[str, str] = {
    "max_tokens": "Most tokens sampled per turn.",
    "top_p": "Sample from the likeliest tokens with this much probability together.",
    "top_k": "Sample from this many likeliest tokens; 0 or -1: all.",
    "min_p": "Sample from tokens with at least this share of the likeliest one's probability.",
    "repetition_penalty": "Divides the logits of tokens in prompt or reply.",
    "presence_penalty": "Subtracted from the logits of tokens in the reply.",
    "frequency_penalty": "The same, once per occurrence.",
    "min_tokens": "Least tokens of a reply.",
}
"""Descriptions of sampling keys."""


def sampling_key(name: str, text: str = "", *, facts: Facts | None = None, **bounds: Any) -> Any:
    """Return the pydantic field of the sampling key `name`; its default is the neutral value, None without one.

    `text` is the key's description, that of `_TEXTS` if empty. `bounds` are bounds beside those of `BOUNDS`.
    """
    return option(NEUTRAL.get(name), text or _TEXTS[name], facts=facts, **BOUNDS.get(name, {}), **bounds)


class TemperatureSchedule(ConfigSection):
    """The temperature of training rollouts by their step."""

    type: Literal["linear", "cosine"] = option("linear", "A straight line, or half a cosine.")
    start_temperature: float = required("At step 0.", ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    end_temperature: float = required("From the last step on.", ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE)
    total_steps: int | None = option(
        None,
        "Steps from the first to the last.",
        facts=Facts(default_text="`max_steps`"),
        ge=1,
    )


class SamplingConfig(ConfigSection):
    """How the policy is sampled in training."""

    temperature: float = sampling_key("temperature", "The trainer divides its logits by it.", gt=0)
    temp_scheduler: TemperatureSchedule | None = option(
        None, "Change the temperature with the steps, in the place of `temperature`; constant if left out."
    )
    max_tokens: int | None = sampling_key(
        "max_tokens",
        "Most tokens sampled per turn; what fits if left out.",
        facts=Facts(aliases=("max_completion_tokens",), limit=_ROOM),
    )
    top_p: float = sampling_key("top_p")
    top_k: int = sampling_key("top_k")
    min_p: float = sampling_key("min_p")
    repetition_penalty: float = sampling_key("repetition_penalty")
    presence_penalty: float = sampling_key("presence_penalty")
    frequency_penalty: float = sampling_key("frequency_penalty")
    min_tokens: int = sampling_key("min_tokens")
    stop: list[str] = table(list, "Texts after which a reply ends.")
    allow_biased_sampling: bool = option(
        False,
        "Train on replies shaped by penalties or `min_tokens`, which the trainer does not compute.",
    )
    extra_body: FreeTable = table(dict, "More fields of the request; none that changes sampling.")


def _own(name: str, **bounds: Any) -> Any:
    """Return the field of a sampling key of one environment: None, the run's value, if it is left out.

    `bounds` are bounds beside those of `BOUNDS`.
    """
    aliases = ("max_completion_tokens",) if name == "max_tokens" else ()
    facts = Facts(
        default_text="as in `orchestrator.sampling`", aliases=aliases, limit=_ROOM if name == "max_tokens" else None
    )
    return option(None, f"As `orchestrator.sampling.{name}`.", facts=facts, **BOUNDS.get(name, {}), **bounds)


class EnvSamplingConfig(ConfigSection):
    """How the policy is sampled in training rollouts of one environment."""

    temperature: float | None = _own("temperature", gt=0)
    temp_scheduler: TemperatureSchedule | None = _own("temp_scheduler")
    max_tokens: int | None = _own("max_tokens")
    top_p: float | None = _own("top_p")
    top_k: int | None = _own("top_k")
    min_p: float | None = _own("min_p")
    repetition_penalty: float | None = _own("repetition_penalty")
    presence_penalty: float | None = _own("presence_penalty")
    frequency_penalty: float | None = _own("frequency_penalty")
    min_tokens: int | None = _own("min_tokens")
    stop: list[str] = table(list, "The run's if empty.")
    extra_body: FreeTable = table(dict, "More fields of the request, over those of the run.")

    @property
    def written(self) -> set[tuple[str, ...]]:
        """Return the keys that the environment sets itself, as paths of `orchestrator.sampling`."""
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return {("orchestrator", "sampling", name) for name, value in values.items() if value not in (None, [], {})}

    def over(self, run: SamplingConfig) -> SamplingConfig:
        """Return the run's sampling overridden by this environment's keys.

        An own temperature replaces the run's schedule too, and an own schedule the run's temperature.
        """
        own: dict[str, Any] = {name: getattr(self, name) for *_, name in self.written}
        if self.temperature is not None:
            own.setdefault("temp_scheduler", None)
        elif self.temp_scheduler is not None:
            own["temperature"] = 1.0
        if self.extra_body:
            own["extra_body"] = {**run.extra_body, **self.extra_body}
        return run.model_copy(update=own) if own else run


class EvalSamplingConfig(ConfigSection):
    """How the policy is sampled in evaluations."""

    temperature: float = sampling_key(
        "temperature",
        "0 takes the likeliest token.",
        facts=_as_in_training("temperature"),
        ge=0,
    )
    max_tokens: int | None = sampling_key(
        "max_tokens",
        "As `orchestrator.sampling.max_tokens`.",
        facts=_as_in_training("max_tokens", aliases=("max_completion_tokens",), limit=_ROOM),
    )
    top_p: float = sampling_key("top_p", "As `orchestrator.sampling.top_p`.", facts=_as_in_training("top_p"))
    top_k: int = sampling_key("top_k", "As `orchestrator.sampling.top_k`.", facts=_as_in_training("top_k"))
    min_p: float = sampling_key("min_p", "As `orchestrator.sampling.min_p`.", facts=_as_in_training("min_p"))
    repetition_penalty: float = sampling_key("repetition_penalty")
    presence_penalty: float = sampling_key("presence_penalty")
    frequency_penalty: float = sampling_key("frequency_penalty")
    min_tokens: int = sampling_key("min_tokens")
    stop: list[str] = table(list, "As `orchestrator.sampling.stop`.", facts=_as_in_training("stop"))
    extra_body: FreeTable = table(dict, "As `orchestrator.sampling.extra_body`.", facts=_as_in_training("extra_body"))


def _own_in_eval(name: str, **bounds: Any) -> Any:
    """Return the field of a sampling key of one evaluated environment: None, the evaluation's value, if it is left out.

    `bounds` are bounds beside those of `BOUNDS`, such as `ge=0`.
    """
    aliases = ("max_completion_tokens",) if name == "max_tokens" else ()
    facts = Facts(default_text="as in the evaluation's `sampling`", aliases=aliases)
    return option(None, f"As `{name}` of the evaluation's `sampling`.", facts=facts, **BOUNDS.get(name, {}), **bounds)


_Shared = TypeVar("_Shared", bound=ConfigSection)


class EvalEnvSamplingConfig(ConfigSection):
    """How the model is sampled in evaluations of one environment."""

    temperature: float | None = _own_in_eval("temperature", ge=0)
    max_tokens: int | None = _own_in_eval("max_tokens")
    top_p: float | None = _own_in_eval("top_p")
    top_k: int | None = _own_in_eval("top_k")
    min_p: float | None = _own_in_eval("min_p")
    repetition_penalty: float | None = _own_in_eval("repetition_penalty")
    presence_penalty: float | None = _own_in_eval("presence_penalty")
    frequency_penalty: float | None = _own_in_eval("frequency_penalty")
    min_tokens: int | None = _own_in_eval("min_tokens")
    stop: list[str] = table(list, "The evaluation's if empty.")
    extra_body: FreeTable = table(dict, "More fields of the request, over those of the evaluation.")

    def over(self, shared: _Shared) -> _Shared:
        """Return the evaluation's sampling `shared`, overridden by this environment's keys.

        Keys that the evaluation's section lacks are put into `extra_body`, as fields of the request.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields if name != "extra_body"}
        own = {name: value for name, value in values.items() if value not in (None, [])}
        known = type(shared).model_fields
        fields = {name: own.pop(name) for name in list(own) if name not in known}
        body = {**shared.model_dump()["extra_body"], **fields, **self.extra_body}
        for name in TAKEN_OVER:
            if name in own and name not in self.extra_body:
                body.pop(name, None)
        return shared.model_copy(update={**own, "extra_body": body})

    def broken_rules(self, shared: ConfigSection, where: Path) -> Iterator[BrokenRule]:
        """Yield violations of the evaluation's sampling `shared` once this environment's keys override it.

        `where` is the path of this table.
        """
        if self == type(self)():
            return
        merged = self.over(shared)
        if isinstance(merged, EvalSamplingConfig):
            found = sampling_rules(merged, "own")
        else:
            found = extra_body_rules(merged.model_copy(update={"extra_body": self.extra_body}), "own")
        for rule in found:
            yield BrokenRule(paths=tuple((*where, *path[1:]) for path in rule.paths), message=rule.message)


# Fields of a request that have a key of their own, that Millrace sets, or that change what is sampled.
_OWN_KEYS = ("temperature", "top_p", "max_tokens", "max_completion_tokens", "repetition_penalty")
TAKEN_OVER = ("top_k", "min_p")
"""Fields of `extra_body` that count as the keys of that name."""
_ONE_EACH = ("n", "best_of", "use_beam_search", "stream", "logprobs", "top_logprobs", "return_token_ids")
CHANGE_SAMPLING = (
    *("presence_penalty", "frequency_penalty", "logit_bias", "bad_words", "allowed_token_ids", "min_tokens"),
    *("logits_processors", "response_format", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Fields of a request that change what is sampled, and that the trainer does not compute."""
NOT_COMPUTED = "changes what is sampled in a way that the trainer does not compute; leave it out"
BIASED = (
    "changes what is sampled in a way that the trainer does not compute, which biases what is learned; leave it out, "
    "or set `orchestrator.sampling.allow_biased_sampling = true`"
)
SAME_TOKENS = "would give all rollouts of a group the same tokens; leave it out"
AS_TEACHER = (
    "the teacher's log-probabilities are those of temperature 1, and the two would be of different distributions"
)
UNCUT_AS_TEACHER = "the teacher's log-probabilities are those of its full distribution"


def sampling_rules(
    sampling: SamplingConfig | EvalSamplingConfig, where: str, *, is_training: bool = False
) -> Iterator[BrokenRule]:
    """Yield the rules over several keys of a sampling table that do not hold; `where` is the table's dotted path.

    `is_training` says that the rollouts are trained on: then fields of requests that change sampling are refused, too.
    """
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        message = f"must be at most `{where}.max_tokens`, which is {sampling.max_tokens}"
        yield broken(message, f"{where}.min_tokens", f"{where}.max_tokens")
    yield from extra_body_rules(sampling, where, is_training=is_training)


def bias_rules(sampling: SamplingConfig, *, teacher_of: str | None) -> Iterator[BrokenRule]:
    """Yield violations of keys that change sampling in a way that the trainer does not compute, such as penalties.

    `sampling.allow_biased_sampling` allows them, but not beside a teacher. `teacher_of` is the algorithm that has a
    teacher, None if there is none.
    """
    for name in (name for name, neutral in BIASING.items() if getattr(sampling, name) != neutral):
        if teacher_of:
            message = (
                f"has no meaning for {teacher_of}: the teacher's log-probabilities are those without it; leave it out"
            )
            yield broken(message, f"orchestrator.sampling.{name}")
        elif not sampling.allow_biased_sampling:
            yield broken(BIASED, f"orchestrator.sampling.{name}")


def teacher_sampling_rules(sampling: SamplingConfig, algorithm: str) -> Iterator[BrokenRule]:
    """Yield violations if sampling is truncated or has another temperature than 1.

    The teacher's log-probs are without both. `algorithm` is the type of the distilling algorithm, for the message.
    """
    algo, where = "orchestrator.algo.type", "orchestrator.sampling"
    taken = [value for name in TAKEN_OVER if isinstance(value := sampling.extra_body.get(name), int | float)]
    if sampling.top_p < 1 or max(sampling.top_k, sampling.min_p, *taken) > 0:
        message = f"must be off for {algorithm}: {UNCUT_AS_TEACHER}"
        yield broken(message, f"{where}.top_p", f"{where}.top_k", f"{where}.min_p", algo)
    if sampling.temperature != 1.0:
        yield broken(f"must be 1.0 for {algorithm}: {AS_TEACHER}", f"{where}.temperature", algo)


def extra_body_rules(sampling: Any, where: str, *, is_training: bool = False) -> Iterator[BrokenRule]:
    """Yield a violation for each wrong field of `extra_body`.

    Wrong is one that another key sets, that Millrace sets itself, or whose value is out of bounds. `where` is the
    dotted path of the sampling table. `is_training` also refuses fields that change what is sampled, which the trainer
    would not know.
    """
    for name, value in sampling.extra_body.items():
        path = f"{where}.extra_body.{name}"
        key = "max_tokens" if name == "max_completion_tokens" else name
        if name in _ONE_EACH:
            yield broken("is set by Millrace: a request has one answer, whole, with its tokens and log-probs", path)
        elif is_training and name == "seed":
            yield broken(SAME_TOKENS, path)
        elif is_training and (name in CHANGE_SAMPLING or name == "repetition_penalty"):
            yield broken(NOT_COMPUTED, path)
        elif getattr(sampling, name, None) and name in ("presence_penalty", "frequency_penalty", "min_tokens", "stop"):
            yield broken(f"is set by `{where}.{name}`, too; leave this one out", path)
        elif name in _OWN_KEYS:
            yield broken(f"has a key of its own: write `{where}.{key}`", path)
        elif name in TAKEN_OVER:
            known = getattr(sampling, name)
            is_number = isinstance(value, int if name == "top_k" else int | float) and not isinstance(value, bool)
            low, high = BOUNDS[name]["ge"], BOUNDS[name].get("le", 2**31 - 1)
            if not is_number or not low <= value <= high:
                kind = "a whole number" if name == "top_k" else "a number"
                yield broken(f"must be {kind} of {low} to {high}: write `{where}.{name}`", path)
            elif known > 0 and known != value:
                yield broken(f"differs from `{where}.{name}`; leave this one out", path)
