"""A request of an agent in whichever API, as one thing; and the policy's answer to it, which each API tells in its way.

`chats`, `responses` and `messages` read requests into `AgentRequest`, and write `PolicyReply` as bodies and as events.
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
    """What an agent asks for."""

    messages: Sequence[dict[str, Any]]
    """As OpenAI's chats have them, with texts as contents."""
    tools: Sequence[dict[str, Any]] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    n: int = 1
    streams: bool = False
    wants_usage: bool = True
    """Whether a stream ends with the usage."""
    not_applied: Sequence[str] = ()
    """Parameters that the run decides in the agent's place, or that the environment's author lets go."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Those of the HTTP request."""


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
        """Read the reply from a chat's completion with one choice."""
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
        """Return the reply as a chat message."""
        return {
            "role": "assistant",
            "content": self.content if self.content or not self.calls else None,
            **({"reasoning_content": self.reasoning} if self.reasoning else {}),
            **({"tool_calls": list(self.calls)} if self.calls else {}),
        }


Events = Iterator[tuple[str, dict[str, Any] | None]]
"""Of a stream: type ("" for none) and data (None for the mark at the end)."""


class Api(Protocol):
    """One API."""

    name: str

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read a request. Raises InvalidSpecError with the names of what would not be honoured."""
        ...

    def body(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Write the answer."""
        ...

    def events(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> Events:
        """Write the answer as events of a stream."""
        ...

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Write an error."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What counts of a request."""

    fields: Mapping[str, Any]
    gone: Sequence[str]
    """Names of what does not count."""
    options: Mapping[str, Any]
    """`stream_options`."""
    tools: Sequence[Any]
    streams: bool


def applied(body: Mapping[str, Any], known: Mapping[str, Parameter], *, drops: Sequence[str]) -> Applied:
    """Return what counts of a request in whichever API; null says nothing.

    Raises InvalidSpecError for what can neither be honoured nor be left to the run.
    """
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
    """Return the tools that the policy may call. Raises InvalidSpecError."""
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
    """Refuse keys of a tool that would not reach the policy. Raises InvalidSpecError."""
    for name, value in tool.items():
        if value not in (None, False, []) and name not in known:
            raise wrong(f"{where}.{name}", "is not known here, and what is not known is not ignored; leave it out")


def _plain(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    schema = function.get("parameters") or {"type": "object", "properties": {}}
    described = {"name": function["name"], "description": function.get("description") or "", "parameters": schema}
    return {"type": "function", "function": described}


def plain_text(content: Any, where: str, *, kinds: Sequence[str] = ("text",)) -> str:
    """Return the text of a content, whose parts are of these kinds. Raises InvalidSpecError for anything else."""
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
    """Return a whole number of at least 1. Raises InvalidSpecError."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise wrong(field, f"must be a whole number from 1 to {most}")
    return value


def stops_of(value: Any, field: str) -> list[str]:
    """Return stop strings. Raises InvalidSpecError."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise wrong(field, "must be texts that are not empty")
    return stops


def flag(value: Any, field: str) -> bool:
    """Return true or false. Raises InvalidSpecError."""
    if not isinstance(value, bool):
        raise wrong(field, "must be true or false")
    return value


def wrong(field: str, message: str) -> InvalidSpecError:
    """Return the error of one field."""
    return InvalidSpecError([Violation(field=field, message=message)], reason="REQUEST_INVALID")


def new_id(kind: str) -> str:
    """Return a name that nothing else has."""
    return f"{kind}_{secrets.token_hex(12)}"


def now() -> int:
    """Return the time in whole seconds, as answers have it."""
    return int(time.time())
