"""Bounds of numbers in HTTP bodies: whatever passes fits the engine's columns."""

import pytest
from pydantic import ValidationError

from millrace.inference.embedded.rows import RowTable, Running
from millrace.inference.engine import GenerateRequest, SamplingParams
from millrace.inference.http.schema import ChatBody, CompletionBody, GenerateSampling, SamplingBody

INT32, INT64 = 2**31, 2**63


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_k": 3_000_000_000},
        {"top_k": INT32},
        {"top_k": -2},
        {"seed": INT64},
        {"seed": -INT64 - 1},
        {"max_tokens": INT32},
        {"max_tokens": 0},
        {"temperature": 1e-30},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": float("nan")},
        {"stop_token_ids": [INT32]},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": [1] * 1025},
    ],
)
def test_numbers_that_do_not_fit_are_refused_by_name(wrong):
    with pytest.raises(ValidationError) as caught:
        SamplingBody.model_validate(wrong)
    assert {item["loc"][0] for item in caught.value.errors()} == set(wrong)


@pytest.mark.parametrize("field", ["n", "logprobs", "max_completion_tokens"])
def test_numbers_of_single_routes_are_bounded(field):
    bodies = {
        "n": lambda value: GenerateSampling(n=value),
        "logprobs": lambda value: CompletionBody(prompt="x", logprobs=value),
        "max_completion_tokens": lambda value: ChatBody(messages=[{}], max_completion_tokens=value),
    }
    bodies[field](1)
    with pytest.raises(ValidationError):
        bodies[field](INT32)


@pytest.mark.parametrize("seed", [0, -INT64, INT64 - 1])
def test_the_largest_numbers_that_pass_fit_the_columns(seed):
    sampling = SamplingBody(
        top_k=INT32 - 1, seed=seed, max_tokens=INT32 - 1, temperature=100, top_p=1e-300, stop_token_ids=[INT32 - 1]
    ).params(INT32 - 1, choice=127)
    assert sampling.seed is not None
    request = GenerateRequest(request_id="a", prompt_token_ids=(1,), sampling=sampling)
    table = RowTable()
    table.add(
        [
            Running(
                request=request,
                seed=sampling.seed & (1 << 64) - 1,  # as the engine does
                limit=8,
                deliver=lambda _: None,
                refuse=lambda _: None,
            )
        ],
        [9],
    )
    assert (table.count, table.top_k[0]) == (1, INT32 - 1)


def test_what_is_sent_is_what_the_engine_gets():
    sent = {"temperature": 0.0, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 5, "ignore_eos": True}
    sent |= {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 0.5, "min_tokens": 2}
    body = {**sent, "stop": "a", "stop_token_ids": [4], "skip_special_tokens": False, "max_tokens": 99}
    expected = SamplingParams(
        **{**sent, "seed": 7}, max_tokens=3, stop=("a",), stop_token_ids=(4,), skip_special_tokens=False
    )
    assert SamplingBody.model_validate(body).params(3, choice=2) == expected
    nothing = dict.fromkeys([*sent, "stop", "stop_token_ids"]) | {"ignore_eos": False}
    for neutral in ({}, nothing, {"top_k": -1}, {"stop": [], "stop_token_ids": []}):
        assert SamplingBody.model_validate(neutral).params(3) == SamplingParams(max_tokens=3)
