"""A request of an agent and the policy's answer to it, independent of the API; each API converts from and to them.

`agents.apis` reads requests into `AgentRequest`, and writes `PolicyReply` as bodies and as events.
"""

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from millrace.errors import InvalidSpecError, Violation
from millrace.rollouts.parameters import (
    STREAM_OPTIONS,
    Parameter,
    Treatment,
    check_parameters,
    check_tool_choice,
    check_tools,
)

MAX_CHOICES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A model call that an agent asks for."""

    messages: Sequence[dict[str, Any]]
    """Messages as OpenAI's chats have them, with texts as contents."""
    tools: Sequence[dict[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    n: int = 1
    streams: bool = False
    wants_usage: bool = True
    """Whether a stream ends with the usage."""
    not_applied: Sequence[str] = ()
    """Parameters that the run sets instead of the agent, or that the environment's author has ignored."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the HTTP request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """One answer of the policy."""

    content: str
    reasoning: str | None
    calls: Sequence[dict[str, Any]]
    """`id`, `type` and `function`, as OpenAI's chats have them."""
    finish: str
    num_prompt: int
    num_tokens: int

    @classmethod
    def of(cls, completion: Mapping[str, Any]) -> "PolicyReply":
        """Read a reply from a chat completion with one choice.

        A reply with tool calls whose finish reason is `stop` gets `tool_calls` instead.
        """
        choice = completion["choices"][0]
        message, usage = choice["message"], completion.get("usage") or {}
        finish = str(choice.get("finish_reason") or "stop")
        return cls(
            content=message.get("content") or "",
            reasoning=message.get("reasoning_content") or message.get("reasoning"),
            calls=message.get("tool_calls") or (),
            finish="tool_calls" if finish == "stop" and message.get("tool_calls") else finish,
            num_prompt=usage.get("prompt_tokens", 0),
            num_tokens=usage.get("completion_tokens", 0),
        )

    @property
    def message(self) -> dict[str, Any]:
        """Return the reply as a chat message; the content is None if there are only tool calls."""
        return {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": list(self.calls)} if self.calls else {}),
        }


Events = Iterator[tuple[str, dict[str, Any] | None]]
"""Events of a stream: type ("" for none) and data (None for the mark at the end)."""


class Api(Protocol):
    """An API that agents use."""

    name: str

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read a request body, ignoring the parameters in `drops`.

        Raises InvalidSpecError with the names of parameters that would have no effect.
        """
        ...

    def body(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Return the replies to the request `asked` as the JSON object of an answer without a stream.

        `model` is the name that the answer shows.
        """
        ...

    def events(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> Events:
        """Yield the replies to the request `asked` as the events of a stream, as (type, data).

        `model` is the name that the events show.
        """
        ...

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Return an error as the API's JSON object; `status` is the answer's HTTP status, `param` the parameter
        that is wrong, if one is.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """The parts of a request that have an effect."""

    fields: Mapping[str, Any]
    gone: Sequence[str]
    """Names of the parameters that are ignored."""
    options: Mapping[str, Any]
    """`stream_options`."""
    tools: Sequence[Any]
    streams: bool


def applied(body: Mapping[str, Any], known: Mapping[str, Parameter], *, drops: Sequence[str]) -> Applied:
    """Split a request's parameters into those that have an effect and those that are ignored.

    Ignored are those named in `drops`, and those that the run sets instead. `known` has the API's parameters; one that
    is null counts as absent. Raises InvalidSpecError for parameters that are unknown or can be neither applied nor
    ignored.
    """
    # Clients write null for parameters that they leave out.
    fields = {name: value for name, value in body.items() if value is not None}
    gone = [name for name in fields if name in drops]
    counts = {name: value for name, value in fields.items() if name not in gone}
    check_parameters(counts, known)
    gone += [name for name in counts if known[name].fate is Treatment.OVERRULED]
    counts = {name: value for name, value in counts.items() if name not in gone}
    options, tools = counts.get("stream_options") or {}, counts.get("tools") or []
    if not isinstance(options, Mapping):
        raise wrong("stream_options", "must be a table")
    check_parameters(options, STREAM_OPTIONS, where="stream_options.")
    if not isinstance(tools, list):
        raise wrong("tools", "must be a list of functions")
    streams = flag(counts.get("stream", False), "stream")
    return Applied(fields=counts, gone=gone, options=options, tools=tools, streams=streams)


def offered(tools: Any, choice: Any) -> list[dict[str, Any]]:
    """Return the tools that the policy may call, in OpenAI's form without unused keys; [] if `choice` is "none".

    `tools` and `choice` are the request's `tools` and `tool_choice`. Raises InvalidSpecError for what is malformed or
    cannot be applied.
    """
    check_tool_choice(choice)
    if not tools:
        return []
    check_tools(tools)
    for index, tool in enumerate(tools):
        known_keys(tool, ("type", "function", "cache_control"), f"tools[{index}]")
        known_keys(tool["function"], ("name", "description", "parameters", "strict"), f"tools[{index}].function")
    try:
        orjson.dumps(tools)
    except TypeError as error:
        raise wrong("tools", f"cannot be passed to the engine: {error}") from error
    return [] if choice == "none" else [_plain(tool) for tool in tools]


def known_keys(tool: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise InvalidSpecError if a tool has a key that is not among `known`, unless its value is None, false or [].

    `where` is the tool's place in the request, for the message.
    """
    for name, value in tool.items():
        if value not in (None, False, []) and name not in known:
            raise wrong(f"{where}.{name}", "is not known here, and what is not known is not ignored; leave it out")


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool with the name, description and parameters of its function alone; missing ones get empty values."""
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    described = {"name": function["name"], "description": function.get("description") or "", "parameters": schema}
    return {"type": "function", "function": described}


def plain_text(content: Any, where: str, *, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a message's content, its parts joined by line ends; None is "".

    `where` is its place in the request, for messages. Raises InvalidSpecError for a part whose type is not among
    `kinds`.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise wrong(where, "must be a text or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") in kinds and isinstance(part.get("text"), str)
        if not is_text:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise wrong(f"{where}[{index}]", f"is a part {kind!r}, and the policy reads text alone")
        texts.append(part["text"])
    return "\n".join(texts)


def count_of(value: Any, field: str, *, most: int = 2**31 - 1) -> int:
    """Return the value if it is a whole number from 1 to `most`; raise InvalidSpecError that names `field`
    otherwise.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise wrong(field, f"must be a whole number from 1 to {most}")
    return value


def stops_of(value: Any, field: str) -> list[str]:
    """Return one stop string, or a list of them, as a list.

    Raises InvalidSpecError that names `field` if one is no text, or empty.
    """
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong(field, "must be texts that are not empty")
    return stops


def flag(value: Any, field: str) -> bool:
    """Return the value if it is a bool; raise InvalidSpecError that names `field` otherwise."""
    if not isinstance(value, bool):
        raise wrong(field, "must be true or false")
    return value


def wrong(field: str, message: str) -> InvalidSpecError:
    """Make the InvalidSpecError (REQUEST_INVALID) about the request's field `field`."""
    return InvalidSpecError([Violation(field=field, message=message)], reason="REQUEST_INVALID")


def new_id(kind: str) -> str:
    """Return a random id that begins with `kind`."""
    return f"{kind}_{secrets.token_hex(12)}"


def now() -> int:
    """Return the Unix time in whole seconds."""
    return int(time.time())
