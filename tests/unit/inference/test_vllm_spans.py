"""The spans in streams, over events as vLLM writes them."""

import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from millrace.inference.vllm.gate import Calls
from millrace.inference.vllm.server.spans import add_last_spans, name_tokens, rewritten


def ended(version: str, length: int) -> Any:
    span = SimpleNamespace(version=version, start=0, end=length)
    return SimpleNamespace(weight_versions=[span], token_ids=[0] * length)


def chunk(index: int, finish_reason: str | None) -> str:
    return f"data: {json.dumps({'choices': [{'index': index, 'finish_reason': finish_reason}]})}\n\n"


async def test_a_stream_has_the_spans_of_each_choice_where_that_ends() -> None:
    calls, is_closed = Calls(), []

    async def events() -> AsyncGenerator[str, None]:
        try:
            calls.outputs += [{}, {}]
            yield chunk(2, None)
            calls.outputs[1][0] = ended("0-7", 3)  # the gate sees the end before vLLM's handler makes a chunk of it
            yield chunk(2, "stop")
            calls.outputs[0][1] = ended("1-8", 5)
            yield chunk(1, "length")
            yield 'data: {"choices": [], "usage": {}}\n\n'
            yield 'data: {"error": {"message": "it broke"}}\n\n'
            yield ": a comment\n\n"
            yield "data: [DONE]\n\n"
        finally:
            is_closed.append(True)

    stream = rewritten(events(), lambda body: add_last_spans(body, calls, per_call=2))
    lines = [event async for event in stream]
    assert lines[-2:] == [": a comment\n\n", "data: [DONE]\n\n"] and is_closed
    bodies = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert [body["choices"][0].get("policy_spans") for body in bodies[:3]] == [
        None,
        [{"lineage": 0, "version": 7, "start": 0, "end": 3}],
        [{"lineage": 1, "version": 8, "start": 0, "end": 5}],
    ]
    assert bodies[3:] == [{"choices": [], "usage": {}}, {"error": {"message": "it broke"}}]


def test_tokens_have_the_names_that_clients_of_raw_tokens_want() -> None:
    body = {"choices": [{"logprobs": {"content": [{"token": "x", "token_id": 9}]}}, {"logprobs": None}]}
    name_tokens(body)
    assert body["choices"][0]["logprobs"] == {"content": [{"token": "token_id:9", "token_id": 9}]}
    name_tokens({"error": {}})
