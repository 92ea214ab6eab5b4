"""Bodies of responses, for completions that a tiny model would never say."""

import json

import numpy as np
import pytest

from millrace.inference.engine import FinishReason, Generation
from millrace.inference.http import responses
from millrace.inference.http.parsers import ChatParsers
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


def chat(tokenizer, text: str, reason=FinishReason.STOP, parsers=ChatParsers(), **fields):  # noqa: B008 - frozen
    body = ChatBody(messages=[{"role": "user", "content": "x"}], **fields)
    ids = tokenizer.encode(text) + ([EOS] if reason is FinishReason.STOP else [])
    done = responses.Completed(prompt_ids=(1, 2), generation=generation(ids, reason))
    return responses.chat_body("id", "policy", body, tokenizer, [done], parsers=parsers)


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


def test_reasoning_stands_beside_the_content_and_tokens_stay_what_was_sampled(tokenizer):
    text = f"<think>well</think>\n{CALL}"
    body = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    plain, parsed = (
        chat(tokenizer, text, parsers=ChatParsers(reasoning=reasoning), **body) for reasoning in (None, "qwen3")
    )
    assert parsed["choices"][0]["message"]["reasoning"] == "well"
    assert parsed["choices"][0]["message"]["content"] == "so"
    assert plain["choices"][0]["message"]["content"] == "<think>well</think>\nso"
    for key in ("token_ids", "logprobs", "policy_spans", "finish_reason"):
        assert parsed["choices"][0][key] == plain["choices"][0][key]
    assert parsed["choices"][0]["token_ids"] == [*tokenizer.encode(text), EOS]
    [first, *_] = b"".join(responses.stream_chunks(parsed, wants_usage=False)).decode().split("\n\n")
    delta = json.loads(first.removeprefix("data: "))["choices"][0]["delta"]
    assert (delta["reasoning"], delta["content"]) == ("well", "so")
    assert [{**call, "index": 0} for call in parsed["choices"][0]["message"]["tool_calls"]] == delta["tool_calls"]


def test_special_tokens_are_seen_by_parsers_and_by_nobody_else(tokenizer):
    marked = "<|im_start|>" + CALL
    assert chat(tokenizer, marked)["choices"][0]["message"]["content"] == CALL
    message = chat(tokenizer, "<|im_start|>plain", tools=TOOLS)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "plain"}
