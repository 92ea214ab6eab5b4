"""Sampling that an environment's model call asks for in place of the run's: recorded, or refused.

Every request to an engine of ours leaves through `completed`, whichever client makes it, and what it then says is noted
with its answer (`SpanLog`). The turns that are trained on are held against the run's request: what the trainer
computes becomes a range of the sample, what it does not is refused by name, as the config refuses it. Requests that no
turn came of, such as those of a simulated user, may ask for what they like.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from millrace.config.sections.sampling import (
    AS_TEACHER,
    BIASED,
    BIASING,
    CHANGE_SAMPLING,
    MAX_TEMPERATURE,
    MIN_TEMPERATURE,
    NEUTRAL,
    NOT_COMPUTED,
    SAME_TOKENS,
    UNCUT_AS_TEACHER,
)
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.requests import is_training, label_of, request_parameters, truncation_of
from millrace.rollouts.types import OWN_SAMPLING, Truncation

Way = tuple[float, Truncation]
"""How a turn is sampled: temperature and truncation."""

_PROMPT = frozenset({"messages", "prompt", "token_ids", "tools", "features"})
_COMPUTED = frozenset({"temperature", "top_p", "top_k", "min_p"})
_WITHOUT_EFFECT = frozenset(
    {
        *("max_tokens", "max_completion_tokens", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "return_tokens_as_token_ids"),
        *("skip_special_tokens", "spaces_between_special_tokens", "detokenize", "add_special_tokens"),
        *("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents"),
        *("reasoning_effort", "include_reasoning", "parallel_tool_calls", "truncate_prompt_tokens"),
        *("user", "metadata", "store", "cache_salt", "priority", "request_id", "stream_options"),
        *("extra_headers", "extra_query", "timeout", "routed_experts_prompt_start"),
    }
)
"""Fields for the prompt, the end and the form of an answer, which do not change the distribution of its tokens."""
_VALUES_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {"n": (1,), "best_of": (1,), "tool_choice": ("auto", "none")}
_SHOWN_CHARS, _MOST_SHOWN = 80, 16


class OwnSamplingError(Exception):
    """A turn was sampled in a way that the trainer cannot compute."""

    error_type = OWN_SAMPLING


def completed(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's sampling parameters with our defaults, NEUTRAL, where they are missing or None."""
    return {**NEUTRAL, **{name: value for name, value in parameters.items() if value is not None}}


def merged(args: Mapping[str, Any], extra_body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's fields: `args` with those of `extra_body`, which take precedence, as in OpenAI's SDK.

    Neutral values in `extra_body` do not replace others: the run sets them, so that no default of the engine applies.
    """
    neutral = {name: extra_body[name] for name in NEUTRAL if name in extra_body and extra_body[name] == NEUTRAL[name]}
    return {**neutral, **args, **{name: value for name, value in extra_body.items() if name not in neutral}}


def flat(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling args as one table without `extra_body`, whose fields take precedence; None counts as missing."""
    merged = {**args, **(args.get("extra_body") or {})}
    return {name: value for name, value in merged.items() if name != "extra_body" and value is not None}


def sent_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request's fields without its prompt.

    Fields in `sampling_params`, as `/inference/v1/generate` has them, are returned as if they were beside it.
    """
    fields = {name: value for name, value in body.items() if name not in _PROMPT and name != "sampling_params"}
    return fields | dict(body.get("sampling_params") or {})


@dataclass(frozen=True)  # no slots: a cached property needs the instance's table
class AskedSampling:
    """The sampling that a run asks for in an environment, to compare model calls with.

    `model` is the policy's name, "" where it is not known, and `is_training` whether the rollouts are trained on.
    """

    env: EnvSpec
    sampling: Sampling
    model: str = ""
    is_training: bool = True

    @classmethod
    def of(cls, request: PlayGroupRequest) -> Self:
        """Return the sampling that a play request asks for, to compare model calls with."""
        return cls(request.env, request.sampling, model=request.model, is_training=is_training(request))

    @cached_property
    def parameters(self) -> Mapping[str, Any]:
        """Return all parameters of a request that asks for the run's sampling, by name."""
        return request_parameters(self.sampling, is_external=False)

    @cached_property
    def way(self) -> Way:
        """Return the run's temperature and truncation."""
        return self.sampling.temperature, truncation_of(self.sampling)

    def own_way(self, sent: Mapping[str, Any] | None) -> Way | None:
        """Return (temperature, truncation) of a turn by the fields `sent` of its request; None if they are the run's,
        or if `sent` is None.

        Raises OwnSamplingError if the turn is for training and the trainer could not compute it.
        """
        if sent is None:  # an adapter of another kind noted nothing
            return None
        if self.is_training:
            for name, value in sent.items():
                if problem := self._problem(name, value):
                    what = f"sends `{name}` = {_shown(value)} of its own with a model call"
                    raise OwnSamplingError(f"environment {label_of(self.env)!r} {what}, which {problem}")
        way = _way(sent)
        return None if way == self.way else way

    def require_declared(self, declared: Mapping[str, Mapping[str, Any]]) -> None:
        """Raise OwnSamplingError if sampling that an environment declares could not be trained on.

        `declared` has the parameters by the place of their declaration, which the message names.
        """
        for where, values in declared.items():
            for name, value in values.items():
                if problem := self._problem(name, value):
                    what = f"declares `{name}` = {_shown(value)} for its model calls ({where})"
                    raise OwnSamplingError(f"environment {label_of(self.env)!r} {what}, which {problem}")

    def require(self, refused: Iterable[Mapping[str, Any] | None]) -> None:
        """Raise OwnSamplingError if a request of `refused` has sampling that could not be trained on.

        `refused` has the fields of each request that the engine refused; None is a request of which nothing is known.
        """
        for sent in refused:
            self.own_way(sent)

    def instead(self, turns: Iterable[Mapping[str, Any] | None]) -> list[dict[str, Any]]:
        """Return the parameters in which requests differ from the run's sampling: a table for each way, at most
        `_MOST_SHOWN`.

        `turns` has the fields of each request; None is one of which nothing is known.
        """
        found: dict[str, dict[str, Any]] = {}
        for sent in turns:
            own = {name: value for name, value in (sent or {}).items() if self.parameters.get(name, value) != value}
            if own:
                found.setdefault(json.dumps(own, sort_keys=True, default=str), own)
        return list(found.values())[:_MOST_SHOWN]

    def _problem(self, name: str, value: Any) -> str:
        """Return why tokens that were sampled with the field `name` = `value` in their request cannot be trained on; ""
        if they can be.
        """
        # `True == 1` in Python, and a bool is not the number that the run has.
        if name in self.parameters and self.parameters[name] == value and type(value) is not bool:
            return ""
        if name == "model":
            return "" if value == self.model else f"is not the policy, {self.model!r}; leave it out"
        if name in _COMPUTED:
            return self._cut_problem(name, value)
        if name in _WITHOUT_EFFECT or value is None or value is False or value in ({}, [], ""):
            return ""
        if value in _VALUES_WITHOUT_EFFECT.get(name, ()) or (name in BIASING and value == BIASING[name]):
            return ""
        if name == "seed":
            return SAME_TOKENS
        if name in BIASING:
            if self.sampling.is_plain:
                return NOT_COMPUTED
            return "" if self.sampling.allows_bias else BIASED
        if name in CHANGE_SAMPLING:
            return NOT_COMPUTED
        return (
            "may change what is sampled; leave it out, or set it for all rollouts in `orchestrator.sampling.extra_body`"
        )

    def _cut_problem(self, name: str, value: Any) -> str:
        """Return why this value of a temperature or truncation cannot be trained on; "" if it can be."""
        if not isinstance(value, int | float) or isinstance(value, bool):
            return "is no number"
        if name == "temperature" and not MIN_TEMPERATURE <= value <= MAX_TEMPERATURE:
            return f"must be {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}: what is trained on is sampled"
        if self.sampling.is_plain and value != NEUTRAL[name] and not (name == "top_k" and value < 0):
            is_temperature = name == "temperature"
            must, why = ("1.0", AS_TEACHER) if is_temperature else ("off", UNCUT_AS_TEACHER)
            return f"must be {must} for opd and opsd: {why}"
        return ""


def _shown(value: Any) -> str:
    """Return the beginning of a value's JSON, for a message."""
    return json.dumps(value, default=str)[:_SHOWN_CHARS]


def _way(sent: Mapping[str, Any]) -> Way:
    """Return (temperature, truncation) that a request's fields ask for; values of a wrong type count as missing."""
    values = {name: _number(sent.get(name), NEUTRAL[name]) for name in _COMPUTED}
    cut = Truncation(top_p=min(values["top_p"], 1.0), top_k=max(int(values["top_k"]), 0), min_p=values["min_p"])
    return values["temperature"], cut


def _number(value: Any, otherwise: float) -> float:
    """Return the value if it is a number and no bool, else `otherwise`."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else otherwise
