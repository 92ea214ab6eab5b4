"""Bodies of responses, for completions that a tiny model would never say."""

import json

import numpy as np
import pytest

from millrace.inference.engine import FinishReason, Generation
from millrace.inference.http import responses
from millrace.inference.http.schema import ChatBody, SamplingBody
from millrace.inference.model_files import load_tokenizer
from millrace.rollouts.types import PolicySpan

EOS = 258


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


def generation(ids: list[int], reason: FinishReason, stop_reason=None) -> Generation:
    return Generation(
        token_ids=np.array(ids, np.int32),
        logprobs=np.full(len(ids), -0.5, np.float32),
        policy_spans=(PolicySpan(lineage=0, version=2, start=0, end=len(ids)),),
        finish_reason=reason,
        stop_reason=stop_reason,
    )


def chat(tokenizer, text: str, reason=FinishReason.STOP, **fields):
    body = ChatBody(messages=[{"role": "user", "content": "x"}], **fields)
    ids = tokenizer.encode(text) + ([EOS] if reason is FinishReason.STOP else [])
    done = responses.Completed(prompt_ids=(1, 2), generation=generation(ids, reason))
    return responses.chat_body("id", "policy", body, tokenizer, [done])


TOOLS = [{"type": "function", "function": {"name": "f"}}]
CALL = 'so <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def test_tool_calls_become_tool_calls_only_where_tools_were_offered(tokenizer):
    choice = chat(tokenizer, CALL, tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "so"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = chat(tokenizer, CALL, **fields)["choices"][0]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", CALL)
    assert chat(tokenizer, CALL, FinishReason.LENGTH, tools=TOOLS)["choices"][0]["finish_reason"] == "length"


def test_streams_carry_tool_calls_and_usage(tokenizer):
    whole = chat(tokenizer, CALL, tools=TOOLS, return_token_ids=True)
    events = b"".join(responses.stream_chunks(whole, wants_usage=True)).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first, last, usage = (json.loads(event.removeprefix("data: ")) for event in events[:-2])
    assert first["choices"][0]["delta"]["tool_calls"][0]["index"] == 0
    assert first["prompt_token_ids"] == [1, 2] and first["choices"][0]["token_ids"]
    assert (first["choices"][0]["finish_reason"], last["choices"][0]["finish_reason"]) == (None, "tool_calls")
    assert last["choices"][0]["policy_spans"] == whole["choices"][0]["policy_spans"] != []
    assert "policy_spans" not in first["choices"][0] and last["choices"][0]["delta"] == {}
    assert usage["choices"] == [] and usage["usage"] == whole["usage"]


@pytest.mark.parametrize(
    ("text", "reason", "stop_reason", "included", "expected"),
    [
        ("abc", FinishReason.STOP, None, False, "ab"),  # a token that stopped it is not text
        ("abc", FinishReason.STOP, 66, True, "abc"),
        ("abc", FinishReason.LENGTH, None, False, "abc"),
        ("one, two", FinishReason.STOP, ", ", False, "one"),
        ("one, two", FinishReason.STOP, ", ", True, "one, "),
    ],
)
def test_text_ends_before_what_stopped_it(tokenizer, text, reason, stop_reason, included, expected):
    done = generation(tokenizer.encode(text), reason, stop_reason)
    sampling = SamplingBody(include_stop_str_in_output=included)
    assert responses.completion_text(tokenizer, done, sampling) == expected


def test_a_stop_text_that_came_too_early_is_no_end(tokenizer):
    done = generation(tokenizer.encode("abca"), FinishReason.STOP, "a")
    assert responses.completion_text(tokenizer, done, SamplingBody(stop=["a"], min_tokens=3)) == "abc"
    assert responses.completion_text(tokenizer, done, SamplingBody(stop=["a"])) == ""
