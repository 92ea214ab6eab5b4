"""The APIs that agents speak: OpenAI's chats and responses, and Anthropic's messages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.decoding import decode_object
from millrace.env_server.agents.asked import (
    MAX_CHOICES,
    AgentRequest,
    Events,
    PolicyReply,
    applied,
    count_of,
    known_keys,
    new_id,
    now,
    offered,
    plain_text,
    stops_of,
    wrong,
)
from millrace.errors import CorruptObjectError
from millrace.rollouts.parameters import AGENT_CHAT, MESSAGES, RESPONSES

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "refusal", "annotations", "audio", "function_call"}
    | {"reasoning", "reasoning_content", "reasoning_details", "thinking_blocks", "provider_specific_fields"}
)


class Chats:
    """OpenAI's chat completions."""

    name = "chats"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read the body of a request for a chat completion, ignoring the parameters in `drops`.

        Raises InvalidSpecError if the body is malformed, or a parameter would have no effect.
        """
        read = applied(body, AGENT_CHAT, drops=drops)
        fields = read.fields
        limits = [count_of(fields[name], name) for name in ("max_tokens", "max_completion_tokens") if name in fields]
        return AgentRequest(
            messages=read_messages(fields.get("messages")),
            tools=offered(read.tools, fields.get("tool_choice")),
            max_tokens=min(limits, default=None),
            stop=stops_of(fields.get("stop", []), "stop"),
            n=count_of(fields.get("n", 1), "n", most=MAX_CHOICES),
            streams=read.streams,
            wants_usage=bool(read.options.get("include_usage")),
            not_applied=[*read.gone, *_not_strict(read.tools)],
        )

    def body(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Return the replies as a `chat.completion` object, which shows the name `model`; `asked` is not used."""
        choices = [
            {"index": index, "message": each.message, "finish_reason": each.finish, "logprobs": None}
            for index, each in enumerate(replies)
        ]
        return {**_head("chat.completion", model), "choices": choices, "usage": _usage(replies)}

    def events(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> Events:
        """Yield the replies as chunks of a chat completion's stream: each whole reply in one chunk, then its finish
        reason.

        The usage follows if the request asked for it. `model` is the name that the chunks show.
        """
        head = _head("chat.completion.chunk", model)
        for index, each in enumerate(replies):
            delta = dict(each.message)
            # In a stream each piece of a call has the index of the call that it continues.
            if calls := delta.pop("tool_calls", None):
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls)]
            ends = ((delta, None), ({}, each.finish))
            for part, finish in ends:
                choice = {"index": index, "delta": part, "finish_reason": finish, "logprobs": None}
                yield "", {**head, "choices": [choice]}
        if asked.wants_usage:
            yield "", {**head, "choices": [], "usage": _usage(replies)}
        yield "", None

    def error(self, status: int, message: str, param: str | None) -> dict[str, Any]:
        """Return an error as OpenAI's JSON object; `param` is the parameter that is wrong, if one is."""
        return {"error": {"message": message, "type": error_type(status), "param": param, "code": str(status)}}


def error_type(status: int) -> str:
    """Return the `type` that an OpenAI error of an HTTP status has."""
    names = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 410: "rollout_ended"}
    return names.get(status, "server_error" if status >= 500 else "invalid_request_error")


def read_messages(value: Any) -> list[dict[str, Any]]:
    """Return the messages of a chat request, checked, with their contents as texts. Raises InvalidSpecError."""
    if not isinstance(value, list) or not value:
        raise wrong("messages", "must be a list with a message")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(value)]


def _message(message: Any, where: str) -> dict[str, Any]:
    """Return one message of a chat request, checked, with its content as text and `developer` as `system`.

    `where` is its place in the request. Raises InvalidSpecError, also for fields that would have no effect.
    """
    if not isinstance(message, Mapping):
        raise wrong(where, "must be a table")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    for name, value in message.items():
        if value is not None and (name not in _FIELDS or name in ("audio", "function_call", "refusal")):
            raise wrong(f"{where}.{name}", "is not known here, and what is not known is not ignored; leave it out")
    read: dict[str, Any] = {
        "role": _ROLES[role],
        "content": plain_text(message.get("content"), f"{where}.content"),
    }
    if role == "assistant" and (thought := message.get("reasoning_content") or message.get("reasoning")):
        read["reasoning_content"] = str(thought)
    elif other := next((name for name in ("reasoning_details", "thinking_blocks") if message.get(name)), None):
        raise wrong(f"{where}.{other}", "is what the policy thought in another form: send `reasoning_content`")
    if (name := message.get("name")) is not None:  # which some chat templates write
        if not isinstance(name, str):
            raise wrong(f"{where}.name", "must be a text")
        read["name"] = name
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
    """Return a tool call of a chat message without unused keys; raise InvalidSpecError, at `where`, if it is
    malformed.
    """
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
    """Yield the place in the request of each `strict` among the tools, which is ignored: calls are not forced into
    schemas.
    """
    for index, tool in enumerate(tools):
        if tool["function"].get("strict"):
            yield f"tools[{index}].function.strict"


def _head(kind: str, model: str) -> dict[str, Any]:
    """Return the fields with which a chat completion, or a chunk of one (`kind`), begins."""
    return {"id": new_id("chatcmpl"), "object": kind, "created": now(), "model": model}


def _usage(replies: Sequence[PolicyReply]) -> dict[str, int]:
    """Return the token counts of replies to one prompt, which counts once."""
    prompt, sampled = replies[0].num_prompt, sum(each.num_tokens for each in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


# OpenAI's responses: `POST /v1/responses`, without anything kept between requests.

_PARTS = ("input_text", "output_text", "text")


class Responses:
    """OpenAI's responses."""

    name = "responses"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read the body of a request for a response, without the parameters in `drops`.

        The result's `not_applied` names what is ignored: the parameters in `drops`, those that the run sets instead
        (such as the temperature), and `strict` of tools. Raises InvalidSpecError if the body is malformed, or has
        another parameter that is unknown or not supported.
        """
        read = applied(body, RESPONSES, drops=drops)
        fields, tools = read.fields, read.tools
        messages = _messages(fields.get("input"))
        if "instructions" in fields:
            messages.insert(0, {"role": "system", "content": plain_text(fields["instructions"], "instructions")})
        strict = [
            f"tools[{at}].strict" for at, tool in enumerate(tools) if isinstance(tool, dict) and tool.get("strict")
        ]
        limit = fields.get("max_output_tokens")
        return AgentRequest(
            messages=messages,
            tools=offered([_tool(tool, index) for index, tool in enumerate(tools)], fields.get("tool_choice")),
            max_tokens=None if limit is None else count_of(limit, "max_output_tokens"),
            streams=read.streams,
            not_applied=[*read.gone, *strict],
        )

    def body(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Return the only reply as OpenAI's `response` object, which shows the name `model` and the tools of
        `asked`.
        """
        [each] = replies
        is_cut = each.finish == "length"
        return {
            **_responses_head(asked, model),
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

    def events(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> Events:
        """Yield the only reply as the events of a response's stream, each item's text in one piece; `model` is the name
        shown.
        """
        whole = self.body(asked, replies, model)
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
        """Return an error as OpenAI's JSON object; `param` is the parameter that is wrong, if one is."""
        return {"error": {"message": message, "type": error_type(status), "param": param, "code": str(status)}}


def _messages(value: Any) -> list[dict[str, Any]]:
    """Convert the `input` of a request for a response, a text or a list of items, to messages of a chat.

    Reasoning becomes part of the reply that follows it. Raises InvalidSpecError.
    """
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
                messages.append(_responses_message(item, where))
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


def _responses_message(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Convert an input item that is a message to a message of a chat; raise InvalidSpecError at its place `where`."""
    roles = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
    if item.get("role") not in list(roles):
        raise wrong(f"{where}.role", f"must be one of {', '.join(roles)}")
    text = plain_text(item.get("content"), f"{where}.content", kinds=_PARTS)
    return {"role": roles[item["role"]], "content": text}


def _thought(item: Mapping[str, Any], where: str) -> str:
    """Return the text of an input item with reasoning; raise InvalidSpecError at its place `where`."""
    content = item.get("content") or item.get("summary") or []
    return plain_text(content, f"{where}.content", kinds=("reasoning_text", "summary_text"))


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add the function call `item` to the last of `messages` if that is a reply, else to a new reply without text.

    In this API a text of the policy and its calls are items of their own. Raises InvalidSpecError at its place `where`.
    """
    if not all(isinstance(item.get(name), str) for name in ("call_id", "name", "arguments")):
        raise wrong(where, "must have texts as `call_id`, `name` and `arguments`")
    function = {"name": item["name"], "arguments": item["arguments"]}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    call = {"id": item["call_id"], "type": "function", "function": function}
    messages[-1].setdefault("tool_calls", []).append(call)


def _tool(tool: Any, index: int) -> dict[str, Any]:
    """Convert a tool of a request for a response to the form of a chat; raise InvalidSpecError if it is no function.

    `index` is its place among the tools, for messages.
    """
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise wrong(f"tools[{index}].type", f"is {kind!r}; the agent's functions alone are called")
    known_keys(tool, ("type", "name", "description", "parameters", "strict"), f"tools[{index}]")
    return {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}


def _responses_head(asked: AgentRequest, model: str) -> dict[str, Any]:
    """Return the fields of a `response` object that do not depend on the reply."""
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


def _items(reply: PolicyReply) -> list[dict[str, Any]]:
    """Return a reply as output items of a response: reasoning, message, function calls."""
    items: list[dict[str, Any]] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "id": new_id("rs"), "summary": [], "content": content})
    if reply.content or not reply.calls:
        part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
        message = {
            "type": "message",
            "id": new_id("msg"),
            "role": "assistant",
            "status": "completed",
            "content": [part],
        }
        items.append(message)
    for call in reply.calls:
        identity = {"type": "function_call", "id": new_id("fc"), "call_id": call["id"], "status": "completed"}
        items.append({**identity, **call["function"]})
    return items


def _item_events(item: dict[str, Any], index: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the events (type without `response.`, data) that stream the output item at `index`, its text in one
    piece.
    """
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


# Anthropic's messages: `POST /v1/messages`.

_FINISHES = {"length": "max_tokens", "tool_calls": "tool_use"}
_TOOL_KEYS = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
_ERRORS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 410: "not_found_error"}


class Messages:
    """Anthropic's messages."""

    name = "messages"

    def read(self, body: Mapping[str, Any], *, drops: Sequence[str]) -> AgentRequest:
        """Read the body of a request of Anthropic's messages, ignoring the parameters in `drops`.

        Raises InvalidSpecError if the body is malformed, or a parameter would have no effect.
        """
        read = applied(body, MESSAGES, drops=drops)
        fields, tools = read.fields, read.tools
        value = fields.get("messages")
        if not isinstance(value, list) or not value:
            raise wrong("messages", "must be a list with a message")
        messages = [each for index, one in enumerate(value) for each in _messages_messages(one, f"messages[{index}]")]
        strict = [
            f"tools[{at}].strict" for at, tool in enumerate(tools) if isinstance(tool, dict) and tool.get("strict")
        ]
        if system := plain_text(fields.get("system"), "system"):
            messages.insert(0, {"role": "system", "content": system})
        limit = fields.get("max_tokens")
        return AgentRequest(
            messages=messages,
            tools=offered(
                [_messages_tool(tool, index) for index, tool in enumerate(tools)], _choice(fields.get("tool_choice"))
            ),
            max_tokens=None if limit is None else count_of(limit, "max_tokens"),
            stop=stops_of(fields.get("stop_sequences", []), "stop_sequences"),
            streams=read.streams,
            not_applied=[*read.gone, *strict, *_failed(value)],
        )

    def body(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> dict[str, Any]:
        """Return the only reply as Anthropic's `message` object, which shows the name `model`; `asked` is not used."""
        [each] = replies
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

    def events(self, asked: AgentRequest, replies: Sequence[PolicyReply], model: str) -> Events:
        """Yield the only reply as the events of a stream of Anthropic's messages, each content block in one piece."""
        whole = self.body(asked, replies, model)
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
        """Return an error as Anthropic's JSON object; `param` is the parameter that is wrong, if one is."""
        kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message, "param": param}}


def _event(kind: str, **data: Any) -> tuple[str, dict[str, Any]]:
    """Return an event (type, data) of Anthropic's stream, whose data has the type as well."""
    return kind, {"type": kind, **data}


def _messages_messages(message: Any, where: str) -> Iterator[dict[str, Any]]:
    """Convert one message of Anthropic's API and yield it as messages of a chat, in which each tool result is one of
    its own.

    `where` is its place in the request. Raises InvalidSpecError.
    """
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


def _failed(messages: list[Any]) -> Iterator[str]:
    """Yield the place in the request of each tool result's mark `is_error`, which is ignored: chats do not have it."""
    for index, message in enumerate(messages):
        content = message.get("content")
        for at, block in enumerate(content if isinstance(content, list) else ()):
            if block.get("type") == "tool_result" and block.get("is_error"):
                yield f"messages[{index}].content[{at}].is_error"


def _messages_tool(tool: Any, index: int) -> dict[str, Any]:
    """Convert a tool of a request of Anthropic's messages to the form of a chat; raise InvalidSpecError if it is a
    built-in one.

    `index` is its place among the tools, for messages.
    """
    if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
        kind = tool.get("type") if isinstance(tool, Mapping) else tool
        raise wrong(f"tools[{index}].type", f"is {kind!r}; the agent's own tools alone are called")
    known_keys(tool, _TOOL_KEYS, f"tools[{index}]")
    described = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return {"type": "function", "function": described}


def _choice(choice: Any) -> Any:
    """Convert Anthropic's `tool_choice` to that of a chat: "auto" or "none", and any other as the object that was sent.

    None stays None. Raises InvalidSpecError if parallel calls are disabled.
    """
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("disable_parallel_tool_use"):
        raise wrong("tool_choice.disable_parallel_tool_use", "is not supported: what is sampled is not constrained")
    return choice["type"] if choice.get("type") in ("auto", "none") else dict(choice)


def _blocks(reply: PolicyReply) -> list[dict[str, Any]]:
    """Return a reply as Anthropic's content blocks: thinking, text, tool uses."""
    blocks: list[dict[str, Any]] = []
    if reply.reasoning:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.content or not reply.calls:
        blocks.append({"type": "text", "text": reply.content})
    for call in reply.calls:
        function = call["function"]
        try:
            values = decode_object(function["arguments"] or "{}", what="arguments", reason="TOOL_ARGUMENTS_INVALID")
        except CorruptObjectError:
            # This API has no place for arguments that are no JSON object; the agent's tool reports what it misses.
            values = {}
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": values})
    return blocks


def _halves(block: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a content block for a stream into (the empty block with which it begins, the delta with all that it
    has).
    """
    match block["type"]:
        case "text":
            return {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        case "thinking":
            return {**block, "thinking": ""}, {"type": "thinking_delta", "thinking": block["thinking"]}
        case _:
            return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
