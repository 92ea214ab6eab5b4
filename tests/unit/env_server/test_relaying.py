"""Tool arguments of endpoints that are not ours, as objects, before the library's relaying client reads them."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

pytest.importorskip("verifiers")

from verifiers.v1.clients.client import RelayReply
from verifiers.v1.clients.eval import EvalClient
from verifiers.v1.dialects import DIALECTS

from millrace.env_server.library import v1

CHAT, RESPONSES = DIALECTS[0], DIALECTS[1]


def chat(arguments: Any) -> dict[str, Any]:
    call = {"id": "c0", "type": "function", "function": {"name": "look", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def test_the_library_takes_them_for_a_broken_answer() -> None:
    with pytest.raises(ValueError, match="arguments"):
        type(CHAT).response_type.model_validate(chat({"city": "Ulm"}))


@pytest.mark.parametrize(
    ("given", "read"), [({"city": "Ulm"}, {"city": "Ulm"}), (None, {}), (["a"], ["a"]), (3, 3), ('{"a": 1}', {"a": 1})]
)
def test_what_is_called_is_what_the_endpoint_said(given: Any, read: Any) -> None:
    v1.install_relaying()
    raw = chat(given)
    [call] = CHAT.parse_response(CHAT.validate_response(raw)).message.tool_calls or ()
    assert json.loads(call.arguments) == read
    told = raw["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    assert told == call.arguments, "the harness gets what the trace has"


def test_other_fields_of_an_answer_stay_as_they_are() -> None:
    schema = {"properties": {"name": {"type": "string"}, "arguments": {"type": "object"}}}
    item = {"type": "function_call", "name": "look", "arguments": {"city": "Ulm"}}
    answer = {"output": [item, {"type": "message", "arguments": {}}], "tools": [{"name": "x", "parameters": schema}]}
    assert v1.make_texts(answer)
    assert json.loads(item["arguments"]) == {"city": "Ulm"}
    assert answer["output"][1]["arguments"] == {} and answer["tools"][0]["parameters"] == schema
    for odd in (None, [], {"choices": 3}, {"choices": [None, {"message": []}]}, {"item": 1, "response": []}):
        assert not v1.make_texts(odd)


async def test_events_of_a_stream_have_texts_and_keep_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    call = {"index": 0, "id": "c0", "type": "function", "function": {"name": "look", "arguments": {"city": "Ulm"}}}
    event = {"id": "x", "choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}
    sent = [b'data: {"id": "x", "choices": []}\n\n', b"data: " + json.dumps(event).encode() + b"\r\n\r\n"]
    sent += [b'data: {"arguments" broken\n\n', b"data: [DONE]\n\n"]

    async def stock(self: Any, dialect: Any, body: Any) -> RelayReply:
        async def chunks() -> AsyncIterator[bytes]:
            for chunk in sent:
                yield chunk

        return RelayReply(content_type="text/event-stream", chunks=chunks(), close=chunks().aclose)

    monkeypatch.setattr(EvalClient, "relay", stock)
    v1.install_relaying()
    reply = await EvalClient.relay(object(), CHAT, {})  # type: ignore[arg-type]
    found = [chunk async for chunk in reply.chunks]
    assert [found[0], *found[2:]] == [sent[0], *sent[2:]]
    parser = CHAT.stream_parser()
    for chunk in found[:2]:
        parser.feed(chunk)
    [made] = parser.finish().message.tool_calls or ()
    assert json.loads(made.arguments) == {"city": "Ulm"}
