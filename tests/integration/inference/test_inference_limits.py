"""Requests that ask for too much are refused in one sentence, and neither they nor big legal ones hold others up."""

import asyncio
import gzip
import time

import aiohttp
import pytest

from millrace.inference.http import access
from millrace_testing.patience import patient

PROMPT = "/v1/completions"


@pytest.fixture
async def http(served):
    async with aiohttp.ClientSession(served.base_url, timeout=aiohttp.ClientTimeout(90)) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: object) -> tuple[int, str]:
    async with http.post(path, json=body) as answer:
        found = await answer.json()
        return answer.status, found.get("error", {}).get("message", "")


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        (PROMPT, {"prompt": ["a"] * 3000, "n": 128}, ["prompt", "3000", str(access.MAX_PROMPTS), "several requests"]),
        (PROMPT, {"prompt": ["a"] * 10, "n": 128}, ["n", "1280 completions", str(access.MAX_COMPLETIONS), "several"]),
        (PROMPT, {"prompt": [[1]] * 300}, ["prompt", "300", str(access.MAX_PROMPTS)]),
        (PROMPT, {"prompt": "ab " * 1_300_000}, ["prompt", "3900000 characters", "4096", "reduce its length"]),
        (PROMPT, {"prompt": [1] * 5000}, ["5000 tokens", "256", "reduce its length"]),
        (PROMPT, {"prompt": "a", "n": 129}, ["n", "128"]),
        (PROMPT, {"prompt": "a", "logprobs": 20}, ["logprobs", "1"]),
        (PROMPT, {"prompt": "a", "stop": ["x"] * 100}, ["stop", "100 stop strings", str(access.MAX_STOPS)]),
        (PROMPT, {"prompt": "a", "stop": "x" * 300}, ["stop", "300 characters", str(access.MAX_STOP_CHARS)]),
        (PROMPT, {"prompt": "a", "logit_bias": {"1": "x" * 100_000}}, ["logit_bias", "leave it out"]),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}] * 3000},
            ["messages", "3000", str(access.MAX_MESSAGES), "leave old ones out"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "ab " * 1_300_000}]},
            ["messages", "characters", "4096", "reduce its length"],
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
            ["chat_template_kwargs.chat_template", "leave it out"],
        ),
        ("/tokenize", {"prompt": "ab " * 1_300_000}, ["prompt", "3900000 characters", "4096"]),
        ("/inference/v1/generate", {"token_ids": [1] * 100_000}, ["100000 tokens", "256"]),
    ],
)
async def test_too_much_is_refused_by_field_value_limit_and_remedy(http, path, body, words):
    status, message = await post(http, path, body)
    assert status == 400, message
    assert len(message) < 2000
    for word in words:
        assert word in message, message


async def test_a_body_above_the_bound_is_413(http):
    async with http.post(PROMPT, data=b" " * (access.MAX_BODY_BYTES + 1)) as answer:
        body = await answer.json()
    assert answer.status == 413
    for word in ("body", str(access.MAX_BODY_BYTES), "smaller requests"):
        assert word in body["error"]["message"]


async def test_a_body_of_no_announced_length_is_413_where_it_passes_the_bound(http):
    async def parts():
        for _ in range(17):
            yield b" " * (1 << 20)

    async with http.post(PROMPT, data=parts()) as answer:
        assert answer.status == 413
        assert "body: has more" in (await answer.json())["error"]["message"]


async def test_a_body_that_expands_beyond_the_bound_is_refused(http):
    bomb = gzip.compress(b" " * (8 * access.MAX_BODY_BYTES))
    async with http.post(PROMPT, data=bomb, headers={"Content-Encoding": "gzip"}) as answer:
        assert answer.status in (400, 413)


@pytest.mark.long
async def test_a_big_legal_request_keeps_neither_health_nor_others_waiting(http):
    """512 completions of 80 tokens, on 256 rows: seconds of work. One of 4 tokens comes through meanwhile."""
    prompt = "a b c " * 10
    body = {"prompt": [prompt] * 4, "n": 128, "max_tokens": 80, "ignore_eos": True}
    big = asyncio.create_task(post(http, PROMPT, body))
    await asyncio.sleep(0.5)
    worst_small = worst_health = 0.0
    looks = 0
    while not big.done() and looks < 10:
        looks += 1
        began = time.monotonic()
        async with http.get("/health") as answer:
            assert answer.status == 200
        worst_health = max(worst_health, time.monotonic() - began)
        began = time.monotonic()
        assert (await post(http, PROMPT, {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}))[0] == 200
        if not big.done():
            worst_small = max(worst_small, time.monotonic() - began)
    assert looks > 1, "the big request must take longer than the small ones for this to show anything"
    assert (await big)[0] == 200
    assert worst_health < patient(1.0)
    assert worst_small < patient(3.0)
