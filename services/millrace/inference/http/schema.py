"""Bodies of the HTTP requests. Parameters that would change an answer and are not supported are refused."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from millrace.config.sections.sampling import BOUNDS, MAX_TEMPERATURE, MIN_TEMPERATURE
from millrace.errors import InvalidSpecError, Violation
from millrace.inference.engine import SamplingParams
from millrace.inference.http.access import MAX_CHOICES, check_stops
from millrace.rollouts import parameters
from millrace.rollouts.parameters import Parameter, check_parameters, check_tool_choice, check_tools

# The limits below are those of the engine's columns (embedded/rows.py): a value that passes must not overflow there.
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Tokens = Annotated[list[TokenId], Field(fail_fast=True)]  # of a million wrong ones, one is named
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
TokenCount = Annotated[int, Field(ge=1, lt=2**31)]
PromptLogprobs = Annotated[int | None, Field(ge=0, le=0)]
"""0 gives the log-probs of the prompt's own tokens; this engine has no alternatives to them."""
MAX_STOP_TOKENS = 1024  # the engine holds a column per stop token, for all of its rows


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    parameters: ClassVar[Mapping[str, Parameter]] = {}
    """The parameters of its API, of which this engine supports a part (`rollouts.parameters`)."""

    @model_validator(mode="after")
    def _refuse_what_would_be_ignored(self) -> Self:
        """Raise InvalidSpecError for parameters in the body that would have no effect, unless they may be ignored."""
        # An error of ours passes through pydantic, and keeps the names of what is wrong.
        check_parameters(self.model_extra or {}, self.parameters, answered=False)
        return self


class SamplingBody(Body):
    """Sampling parameters that all completion routes share."""

    temperature: float | None = Field(default=None, ge=0, le=MAX_TEMPERATURE)
    top_p: float | None = Field(default=None, **BOUNDS["top_p"])
    top_k: int | None = Field(default=None, **BOUNDS["top_k"])
    min_p: float | None = Field(default=None, **BOUNDS["min_p"])
    repetition_penalty: float | None = Field(default=None, **BOUNDS["repetition_penalty"])
    presence_penalty: float | None = Field(default=None, **BOUNDS["presence_penalty"])
    frequency_penalty: float | None = Field(default=None, **BOUNDS["frequency_penalty"])
    min_tokens: int | None = Field(default=None, **BOUNDS["min_tokens"])
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    stop: str | Texts | None = None
    stop_token_ids: Tokens | None = Field(default=None, max_length=MAX_STOP_TOKENS)
    ignore_eos: bool = False
    max_tokens: TokenCount | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    routed_experts_prompt_start: int | None = Field(default=None, ge=0)

    @field_validator("temperature")
    @classmethod
    def _not_almost_greedy(cls, temperature: float | None) -> float | None:
        """Refuse a temperature above 0 that is too small to divide logits by."""
        if temperature is not None and 0 < temperature < MIN_TEMPERATURE:
            raise ValueError(f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}")
        return temperature

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        """Refuse empty, too many or too long stop strings; an empty value becomes None."""
        if isinstance(stop, list) and not all(stop):
            raise ValueError("stop strings must not be empty")
        check_stops(stop)
        return stop or None

    def params(self, max_tokens: int, *, choice: int = 0) -> SamplingParams:
        """Return the request's sampling parameters in the engine's form, with defaults for those that are missing.

        `max_tokens` is the limit of the completion, in place of the request's own. With a seed, choice number `choice`
        gets a seed of its own.
        """
        # The defaults are those of `SamplingParams` alone.
        sent = {each.name: getattr(self, each.name) for each in fields(SamplingParams)}
        given = {name: value for name, value in sent.items() if value is not None}
        given |= {
            "max_tokens": max_tokens,
            "top_k": max(0, self.top_k or 0),  # -1 is off, too
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": tuple(self.stop_token_ids or ()),
        }
        if self.seed is not None:
            given["seed"] = self.seed + choice  # with one seed for all, the choices of a request would be equal
        return SamplingParams(**given)


class StreamOptions(Body):
    """`stream_options`."""

    parameters = parameters.STREAM_OPTIONS

    include_usage: bool = False


class CompletionCommon(SamplingBody):
    """What chat and plain completions share."""

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    stream_choices: bool = False
    """Whether the answer is a line per choice, as it ends, in place of a stream: see `rollouts.choices_wire`."""

    @property
    def wants_usage_chunk(self) -> bool:
        """Return whether the request asks for a last chunk with the token counts at the end of its stream."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(CompletionCommon):
    """`POST /v1/chat/completions`."""

    parameters = parameters.CHAT

    messages: Objects = Field(min_length=1)
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = None
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    @field_validator("tool_choice")
    @classmethod
    def _free_choice_only(cls, choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        """Refuse a `tool_choice` that would force the model to call a tool."""
        check_tool_choice(choice)
        return choice

    @field_validator("tools")
    @classmethod
    def _tools_only(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Refuse tools that are no functions."""
        check_tools(tools or [])
        return tools

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Return the tools that the model may call in its reply; [] if `tool_choice` is "none"."""
        return [] if self.tools is None or self.tool_choice == "none" else self.tools


class CompletionBody(CompletionCommon):
    """`POST /v1/completions`."""

    parameters = parameters.COMPLETIONS

    prompt: str | Tokens | Texts | Annotated[list[Tokens], Field(fail_fast=True)]
    logprobs: int | None = Field(default=None, ge=0, le=1)
    prompt_logprobs: PromptLogprobs = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _lines_have_no_scores(self) -> "CompletionBody":
        """Refuse `prompt_logprobs` together with `stream_choices`."""
        if self.stream_choices and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs cannot come with stream_choices; leave one of them out")
        return self


class GenerateSampling(SamplingBody):
    """`sampling_params` of `/inference/v1/generate`."""

    parameters = parameters.GENERATE_SAMPLING

    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    logprobs: int | None = Field(default=None, ge=0, le=1)
    prompt_logprobs: PromptLogprobs = None


class GenerateBody(Body):
    """`POST /inference/v1/generate`: tokens in, tokens out."""

    parameters = parameters.GENERATE

    model: str | None = None
    token_ids: Tokens
    sampling_params: GenerateSampling = Field(default_factory=lambda: GenerateSampling())
    request_id: str | None = Field(default=None, max_length=256)
    stream: bool = False

    @field_validator("stream")
    @classmethod
    def _no_stream(cls, stream: bool) -> bool:
        """Refuse a request for a stream."""
        if stream:
            raise ValueError("streaming is not supported on this route")
        return stream


class TokenizeBody(Body):
    """`POST /tokenize`: of a prompt or of a chat."""

    parameters = parameters.TOKENIZE

    model: str | None = None
    prompt: str | None = None
    messages: Objects | None = None
    tools: Objects | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    return_token_strs: bool = False

    @field_validator("tools")
    @classmethod
    def _tools_only(cls, tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
        """Refuse tools that are no functions."""
        check_tools(tools or [])
        return tools

    @model_validator(mode="after")
    def _one_input(self) -> "TokenizeBody":
        """Refuse a body with both a prompt and messages, or with neither."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


# Stop strings that are special tokens: they are found by their ids, because the text leaves these tokens out.

S = TypeVar("S", bound=SamplingBody)


def special_texts(tokenizer: Any) -> Mapping[str, int]:
    """Return the ids of a transformers tokenizer's special tokens, by their texts."""
    added = {token.content: number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {text: number for text, number in added.items() if text}


def separated(
    stop: str | Sequence[str] | None, specials: Mapping[str, int], *, field: str = "stop"
) -> tuple[list[str], list[int]]:
    """Return (the stop strings that are no special token, the ids of those that are one).

    `specials` has the ids of special tokens by text; `field` is the request's, for messages. Raises InvalidSpecError
    for a string that has a special token and more in it: neither text nor an id would ever match.
    """
    texts: list[str] = []
    ids: list[int] = []
    for text in [stop] if isinstance(stop, str) else stop or ():
        if text in specials:
            ids.append(specials[text])
        elif inside := next((special for special in specials if special in text), None):
            message = (
                f"{text!r} would never match: the text leaves out the special token {inside!r}; set "
                "skip_special_tokens = false, or name the token in stop_token_ids"
            )
            raise InvalidSpecError([Violation(field=field, message=message)], reason="REQUEST_INVALID")
        else:
            texts.append(text)
    return texts, ids


def with_stop_tokens(sampling: S, tokenizer: Any | None) -> S:
    """Return the request's sampling with those stop strings that are special tokens moved to `stop_token_ids`.

    The sampling is returned unchanged if the text keeps special tokens (`skip_special_tokens` False), or without a
    tokenizer.
    """
    if not sampling.stop or not sampling.skip_special_tokens or tokenizer is None:
        return sampling
    texts, ids = separated(sampling.stop, special_texts(tokenizer))
    if not ids:
        return sampling
    changes = {"stop": texts or None, "stop_token_ids": [*(sampling.stop_token_ids or ()), *ids]}
    return sampling.model_copy(update=changes)
