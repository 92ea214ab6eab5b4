"""OpenAI's responses: `POST /v1/responses`, without anything kept between requests."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.env_server.agents.asked import (
    AgentRequest,
    Events,
    PolicyReply,
    applied,
    count_of,
    new_id,
    now,
    offered,
    plain_text,
    wrong,
)
from millrace.env_server.agents.chats import error_type
from millrace.rollouts.parameters import RESPONSES

_PARTS = ("input_text", "output_text", "text")


class Responses:
    """The API."""

    name = "responses"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read a request. Raises InvalidSpecError."""
        read = applied(body, RESPONSES, drops=drops)
        said, tools = read.said, read.tools
        messages = _messages(said.get("input"))
        if "instructions" in said:
            messages.insert(0, {"role": "system", "content": plain_text(said["instructions"], "instructions")})
        strict = [
            f"tools[{at}].strict" for at, tool in enumerate(tools) if isinstance(tool, dict) and tool.get("strict")
        ]
        limit = said.get("max_output_tokens")
        return AgentRequest(
            messages=messages,
            tools=offered([_tool(tool, index) for index, tool in enumerate(tools)], said.get("tool_choice")),
            max_tokens=None if limit is None else count_of(limit, "max_output_tokens"),
            streams=read.streams,
            not_applied=[*read.gone, *strict],
        )

    def body(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Write the answer."""
        [each] = said
        is_cut = each.finish == "length"
        return {
            **_head(asked, model),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _items(each),
            "usage": {
                "input_tokens": each.num_prompt,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": each.num_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": each.num_prompt + each.num_tokens,
            },
        }

    def events(self, asked: AgentRequest, said: Sequence[PolicyReply], model: str) -> Events:
        """Write the answer as events."""
        whole = self.body(asked, said, model)
        begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        bare: list[tuple[str, dict[str, Any]]] = [
            ("created", {"response": begun}),
            ("in_progress", {"response": begun}),
        ]
        for index, item in enumerate(whole["output"]):
            bare += _item_events(item, index)
        bare.append((str(whole["status"]), {"response": whole}))
        for number, (kind, data) in enumerate(bare):
            yield f"response.{kind}", {"type": f"response.{kind}", "sequence_number": number, **data}

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Write an error."""
        return {"error": {"message": message, "type": error_type(status), "param": param, "code": str(status)}}


def _messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a text, or a list with a message")
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        match kind:
            case "message":
                messages.append(_message(item, where))
            case "reasoning":
                thought = _thought(item, where)
                continue
            case "function_call":
                _add_call(messages, item, where)
            case "function_call_output":
                output = plain_text(item.get("output"), f"{where}.output", kinds=_PARTS)
                messages.append({"role": "tool", "tool_call_id": str(item.get("call_id")), "content": output})
            case _:
                raise wrong(f"{where}.type", f"is {kind!r}; messages, function calls and their outputs are read")
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = ""
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    roles = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
    if item.get("role") not in list(roles):
        raise wrong(f"{where}.role", f"must be one of {', '.join(roles)}")
    text = plain_text(item.get("content"), f"{where}.content", kinds=_PARTS)
    return {"role": roles[item["role"]], "content": text}


def _thought(item: Mapping[str, Any], where: str) -> str:
    content = item.get("content") or item.get("summary") or []
    return plain_text(content, f"{where}.content", kinds=("reasoning_text", "summary_text"))


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add a call to the message of the policy that made it: what it wrote and its calls are items of their own."""
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise wrong(where, "must have texts as `call_id`, `name` and `arguments`")
    function = {"name": item["name"], "arguments": item["arguments"]}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(tool: Any, index: int) -> dict[str, Any]:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise wrong(f"tools[{index}].type", f"is {kind!r}; the agent's functions alone are called")
    return {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}


def _head(asked: AgentRequest, model: str) -> dict[str, Any]:
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in asked.tools]
    return {
        "id": new_id("resp"),
        "object": "response",
        "created_at": now(),
        "model": model,
        "error": None,
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "temperature": None,
        "top_p": None,
        "tool_choice": "auto",
        "tools": tools,
    }


def _items(said: PolicyReply) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if said.reasoning:
        content = [{"type": "reasoning_text", "text": said.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs"), "summary": [], "content": content})
    if said.content or not said.calls:
        part = {"type": "output_text", "text": said.content, "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": new_id("msg"),
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        items.append(message)
    for call in said.calls:
        identity = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], "status": "completed"}
        items.append({**identity, **call["function"]})
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    at = {"output_index": index, "item_id": item["id"]}
    match item["type"]:
        case "message":
            [part] = item["content"]
            where = {**at, "content_index": 0}
            yield "output_item.added", {"output_index": index, "item": {**item, "status": "in_progress", "content": []}}
            yield "content_part.added", {**where, "part": {**part, "text": ""}}
            yield "output_text.delta", {**where, "delta": part["text"], "logprobs": []}
            yield "output_text.done", {**where, "text": part["text"], "logprobs": []}
            yield "content_part.done", {**where, "part": part}
        case "function_call":
            bare = {**item, "status": "in_progress", "arguments": ""}
            yield "output_item.added", {"output_index": index, "item": bare}
            yield "function_call_arguments.delta", {**at, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "function_call_arguments.done", {**at, **done}
        case _:
            yield "output_item.added", {"output_index": index, "item": item}
    yield "output_item.done", {"output_index": index, "item": item}
