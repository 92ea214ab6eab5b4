"""OpenAI's chats: `POST /v1/chat/completions`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.env_server.agents.asked import (
    MAX_CHOICES,
    AgentRequest,
    Events,
    PolicyReply,
    applied,
    count_of,
    new_id,
    now,
    offered,
    plain_text,
    stops_of,
    wrong,
)
from millrace.rollouts.parameters import AGENT_CHAT

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call"}
    | {"reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "provider_specific_fields"}
)


class Chats:
    """The API."""

    name = "chats"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read a request. Raises InvalidSpecError."""
        read = applied(body, AGENT_CHAT, drops=drops)
        said = read.said
        limits = [count_of(said[name], name) for name in ("max_tokens", "max_completion_tokens") if name in said]
        return AgentRequest(
            messages=read_messages(said.get("messages")),
            tools=offered(read.tools, said.get("tool_choice")),
            max_tokens=min(limits, default=None),
            stop=stops_of(said.get("stop", []), "stop"),
            n=count_of(said.get("n", 1), "n", most=MAX_CHOICES),
            streams=read.streams,
            wants_usage=bool(read.options.get("include_usage")),
            not_applied=[*read.gone, *_not_strict(read.tools)],
        )

    def body(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Write the answer."""
        choices = [
            {"index": index, "message": each.message, "finish_reason": each.finish, "logprobs": None}
            for index, each in enumerate(said)
        ]
        return {**_head("chat.completion", model), "choices": choices, "usage": _usage(said)}

    def events(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> Events:
        """Write the answer as events."""
        head = _head("chat.completion.chunk", model)
        for index, each in enumerate(said):
            delta = dict(each.message)
            if calls := delta.pop("tool_calls", None):
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            ends = ((delta, None), ({}, each.finish))
            for part, finish in ends:
                choice = {"index": index, "delta": part, "finish_reason": finish, "logprobs": None}
                yield "", {**head, "choices": [choice]}
        if asked.wants_usage:
            yield "", {**head, "choices": [], "usage": _usage(said)}
        yield "", None

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": error_type(status), "param": param, "code": str(status)}}


def error_type(status: int) -> str:
    """Return OpenAI's name of a kind of error."""
    names = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 410: "rollout_ended"}
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat with texts as contents. Raises InvalidSpecError."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "must be a list with a message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise wrong(where, "must be a table")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for name, value in message.items():
        if value is not None and (name not in _FIELDS or name in ("audio", "function_call")):
            raise wrong(f"{where}.{name}", "is not known here, and what is not known is not ignored; leave it out")
    read: dict[str, Any] = {
        "role": _ROLES[role],
        "content": plain_text(message.get("content"), f"{where}.content"),
    }
    if role == "assistant" and (thought := message.get("reasoning_content") or message.get("reasoning")):
        read["reasoning_content"] = str(thought)
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise wrong(f"{where}.tool_call_id", "must say which call it answers")
        read["tool_call_id"] = message["tool_call_id"]
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise wrong(f"{where}.tool_calls", "must be a list of calls")
        read["tool_calls"] = [_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return read


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise wrong(where, 'must be {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    arguments = function.get("arguments", "")
    if not isinstance(arguments, str):
        raise wrong(f"{where}.function.arguments", "must be a text of JSON")
    if not isinstance(call.get("id"), str):
        raise wrong(f"{where}.id", "must be a text")
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _not_strict(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Name the schemas that calls would be forced into."""
    for index, tool in enumerate(tools):
        if tool["function"].get("strict"):
            yield f"tools[{index}].function.strict"


def _head(kind: str, model: str) -> dict[str, Any]:
    return {"id": new_id("chatcmpl"), "object": kind, "created": now(), "model": model}


def _usage(said: Sequence[PolicyReply]) -> dict[str, int]:
    prompt, sampled = said[0].num_prompt, sum(each.num_tokens for each in said)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
