"""Anthropic's messages: `POST /v1/messages`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.decoding import decode_object
from millrace.env_server.agents.asked import (
    AgentRequest,
    Events,
    PolicyReply,
    applied,
    count_of,
    new_id,
    offered,
    plain_text,
    stops_of,
    wrong,
)
from millrace.errors import CorruptObjectError
from millrace.rollouts.parameters import MESSAGES

_FINISHES = {"length": "max_tokens", "tool_calls": "tool_use"}
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 410: "not_found_error"}


class Messages:
    """The API."""

    name = "messages"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read a request. Raises InvalidSpecError."""
        read = applied(body, MESSAGES, drops=drops)
        said, tools = read.said, read.tools
        value = said.get("messages")
        if not isinstance(value, list) or not value:
            raise wrong("messages", "must be a list with a message")
        messages = [each for index, one in enumerate(value) for each in _messages(one, f"messages[{index}]")]
        if system := plain_text(said.get("system"), "system"):
            messages.insert(0, {"role": "system", "content": system})
        limit = said.get("max_tokens")
        return AgentRequest(
            messages=messages,
            tools=offered([_tool(tool, index) for index, tool in enumerate(tools)], _choice(said.get("tool_choice"))),
            max_tokens=None if limit is None else count_of(limit, "max_tokens"),
            stop=stops_of(said.get("stop_sequences", []), "stop_sequences"),
            streams=read.streams,
            not_applied=read.gone,
        )

    def body(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Write the answer."""
        [each] = said
        return {
            "id": new_id("msg"),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": _blocks(each),
            "stop_reason": _FINISHES.get(each.finish, "end_turn"),
            "stop_sequence": None,
            "usage": {"input_tokens": each.num_prompt, "output_tokens": each.num_tokens},
        }

    def events(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> Events:
        """Write the answer as events."""
        whole = self.body(asked, said, model)
        begun = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        yield _event("message_start", message=begun)
        for index, block in enumerate(whole["content"]):
            empty, delta = _halves(block)
            yield _event("content_block_start", index=index, content_block=empty)
            yield _event("content_block_delta", index=index, delta=delta)
            yield _event("content_block_stop", index=index)
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        yield _event("message_delta", delta=end, usage=whole["usage"])
        yield _event("message_stop")

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Write an error."""
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "param": param}}


def _event(kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
    return kind, {"type": kind, **data}


def _messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the messages of a chat that one of these is: results of tools are messages of their own there."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if role not in ("user", "assistant"):
        raise wrong(f"{where}.role", "must be user or assistant")
    content = message.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise wrong(f"{where}.content", "must be a text or a list of blocks")
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    thought = ""
    for index, block in enumerate(blocks):
        at = f"{where}.content[{index}]"
        match block.get("type"), role:
            case "text", _:
                texts.append(block)
            case "thinking", "assistant":
                thought += str(block.get("thinking") or "")
            case "tool_use", "assistant":
                function = {"name": str(block.get("name")), "arguments": json.dumps(block.get("input") or {})}
                calls.append({"id": str(block.get("id")), "type": "function", "function": function})
            case "tool_result", "user":
                result = plain_text(block.get("content"), f"{at}.content")
                yield {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": result}
            case kind, _:
                raise wrong(at, f"is a block {kind!r}, and the policy reads text and calls of tools alone")
    if texts or calls or role == "assistant":
        read: dict[str, Any] = {"role": role, "content": plain_text(texts, f"{where}.content")}
        yield read | ({"reasoning_content": thought} if thought else {}) | ({"tool_calls": calls} if calls else {})


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise wrong(f"tools[{index}].type", f"is {kind!r}; the agent's own tools alone are called")
    told = {"name": tool.get("name"), "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": told}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("disable_parallel_tool_use"):
        raise wrong("tool_choice.disable_parallel_tool_use", "is not supported: what is sampled is not constrained")
    return choice["type"] if choice.get("type") in ("auto", "none") else dict(choice)


def _blocks(said: PolicyReply) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if said.reasoning:
        blocks.append({"type": "thinking", "thinking": said.reasoning, "signature": ""})
    if said.content or not said.calls:
        blocks.append({"type": "text", "text": said.content})
    for call in said.calls:
        function = call["function"]
        try:
            values = decode_object(function["arguments"] or "{}", what="arguments", reason="TOOL_ARGUMENTS_INVALID")
        except CorruptObjectError:
            # This API has no place for arguments that are none; the agent's tool says what it misses.
            values = {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": values})
    return blocks


def _halves(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
