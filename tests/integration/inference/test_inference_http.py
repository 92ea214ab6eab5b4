"""The HTTP API with the clients that will call it: openai's, renderers', and a plain one."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace

import aiohttp
import numpy as np
import openai
import pytest
from verifiers.legacy.clients.openai_chat_completions_client import handle_openai_overlong_prompt
from verifiers.legacy.errors import OverlongPromptError

from millrace.errors import UnavailableError
from millrace.inference.embedded import replica as embedded_replica
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.replica import EmbeddedReplica
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot
from millrace.inference.service import SERVICE_NAME
from millrace.inference.settings import InferenceSettings
from millrace.rpc.health import PROCESS
from millrace.telemetry.settings import Settings
from millrace_testing.inference.dying import dying
from millrace_testing.polling import until

MESSAGES = [{"role": "user", "content": "turn me around"}]


@pytest.fixture
async def client(served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{served.base_url}/v1", api_key="EMPTY", max_retries=0, timeout=60
    ) as client:
        yield client


@pytest.fixture
async def http(served) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(served.base_url, timeout=aiohttp.ClientTimeout(60)) as session:
        yield session


async def test_chat_gives_tokens_logprobs_and_spans_that_train(served, client, reference):
    response = await client.chat.completions.create(
        model="policy",
        messages=MESSAGES,
        logprobs=True,
        max_completion_tokens=24,
        temperature=0.7,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    choice = response.choices[0]
    prompt, ids = response.prompt_token_ids, choice.token_ids
    tokenizer = served.slot.current.tokenizer
    assert tokenizer.decode(prompt) == "<|im_start|>user\nturn me around<|im_end|>\n<|im_start|>assistant\n"
    logprobs = [token.logprob for token in choice.logprobs.content]
    np.testing.assert_allclose(logprobs, reference(served.model, prompt, ids, 0.7), atol=1e-5)
    assert choice.message.content == tokenizer.decode(ids, skip_special_tokens=True)
    assert choice.finish_reason == "length"
    assert choice.policy_spans == [{"lineage": 0, "version": 0, "start": 0, "end": 24}]
    assert response.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(prompt),
        "completion_tokens": 24,
        "total_tokens": len(prompt) + 24,
    }


async def test_choices_follow_the_seed(client):
    async def texts() -> list[str]:
        response = await client.chat.completions.create(
            model="my-model", messages=MESSAGES, n=3, seed=5, max_tokens=12, extra_body={"return_token_ids": True}
        )
        return [choice.token_ids for choice in response.choices]

    first, again = await texts(), await texts()
    assert first == again
    assert len({tuple(ids) for ids in first}) == 3


async def test_stream_is_valid_and_ends_with_usage(client):
    plain = await client.chat.completions.create(model="policy", messages=MESSAGES, seed=1, max_tokens=10)
    stream = await client.chat.completions.create(
        model="policy", messages=MESSAGES, seed=1, max_tokens=10, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == plain.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == plain.choices[0].finish_reason
    assert chunks[-1].choices == [] and chunks[-1].usage == plain.usage
    assert chunks[-2].choices[0].policy_spans == plain.choices[0].policy_spans
    assert plain.choices[0].policy_spans[-1]["end"] == plain.usage.completion_tokens


async def test_completions_take_text_and_tokens_one_and_many(served, client, reference):
    one = await client.completions.create(model="policy", prompt="abc", seed=3, logprobs=0)
    many = await client.completions.create(model="policy", prompt=[[64, 65, 66], [67]], max_tokens=5, n=2)
    tokenizer = served.slot.current.tokenizer
    same = await client.completions.create(model="policy", prompt=tokenizer.encode("abc"), seed=3, logprobs=0)
    assert one.choices[0].text == same.choices[0].text
    assert one.choices[0].logprobs.token_logprobs == same.choices[0].logprobs.token_logprobs
    assert one.usage.completion_tokens <= 16
    assert len(many.choices) == 4 and many.usage.prompt_tokens == 4
    greedy = [
        await client.completions.create(model="policy", prompt=prompt, max_tokens=5, temperature=0)
        for prompt in (["ab", "xyz"], ["xyz", "ab"])
    ]
    assert [c.text for c in greedy[0].choices] == [c.text for c in greedy[1].choices][::-1]


async def test_models_name_the_context(client):
    cards = (await client.models.list()).data
    assert [(card.id, card.max_model_len) for card in cards] == [("policy", 256), ("my-model", 256)]


async def test_generate_satisfies_the_renderers_client(served, client, reference):
    from renderers.client import generate

    prompt = [10, 20, 30]
    renderer = SimpleNamespace(
        get_stop_token_ids=lambda: [258],
        parse_response=lambda ids, tools=None: SimpleNamespace(content="", reasoning_content=None, tool_calls=[]),
    )
    result = await generate(
        client=client,
        renderer=renderer,
        messages=[],
        model="policy",
        prompt_ids=prompt,
        sampling_params={"temperature": 1.0, "max_tokens": 20, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "seed": 4},
        cache_salt="0",
    )
    expected = reference(served.model, prompt, result["completion_ids"])
    np.testing.assert_allclose(result["completion_logprobs"], expected, atol=1e-5)
    assert result["finish_reason"] in ("stop", "length") and result["request_id"]


async def test_a_special_token_as_stop_string_ends_the_reply(http, served):
    """The text that strings are looked for in leaves special tokens out."""
    special = served.slot.current.tokenizer.convert_tokens_to_ids("<|im_start|>")
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True, "temperature": 5}
    for seed in range(30):
        asked = body | {"return_token_ids": True, "seed": seed, "stop": ["<|im_start|>", "never seen"]}
        async with http.post("/v1/chat/completions", json=asked) as reply:
            [choice] = (await reply.json())["choices"]
        if choice["finish_reason"] == "stop":
            break
    assert (choice["stop_reason"], choice["token_ids"][-1], choice["token_ids"].count(special)) == (special, special, 1)
    async with http.post("/v1/chat/completions", json=body | {"stop": "so <|im_start|>"}) as reply:
        answer = await reply.json()
    assert reply.status == 400 and "would never match" in answer["error"]["message"]


async def test_generate_carries_spans_and_stop_reason(http):
    body = {"model": "policy", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 30, "seed": 1}}
    async with http.post("/inference/v1/generate", json=body) as response:
        free = (await response.json())["choices"][0]
    stop = free["token_ids"][5]
    body["sampling_params"]["stop_token_ids"] = [stop]
    async with http.post("/inference/v1/generate", json=body) as response:
        choice = (await response.json())["choices"][0]
    end = free["token_ids"].index(stop) + 1
    assert choice["token_ids"] == free["token_ids"][:end]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["policy_spans"] == [{"lineage": 0, "version": 0, "start": 0, "end": end}]
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{choice['token_ids'][0]}"


async def test_tokenize_agrees_with_chat(http, client):
    async with http.post("/tokenize", json={"model": "policy", "messages": MESSAGES}) as response:
        chat = await response.json()
    answer = await client.chat.completions.create(
        model="policy", messages=MESSAGES, max_tokens=1, extra_body={"return_token_ids": True}
    )
    assert chat["tokens"] == answer.prompt_token_ids and chat["count"] == len(chat["tokens"])
    assert chat["max_model_len"] == 256
    async with http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}) as response:
        assert (await response.json())["token_strs"] == ["a", "b"]


async def test_a_prompt_that_is_too_long_is_what_verifiers_call_overlong(client):
    call = handle_openai_overlong_prompt(client.chat.completions.create)
    with pytest.raises(OverlongPromptError):
        await call(model="policy", messages=[{"role": "user", "content": "x" * 300}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 256 tokens"):
        await client.completions.create(model="policy", prompt="x" * 256)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"min_p": 2}}, "min_p"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
        ({"extra_body": {"logit_bias": {"3": 1}}}, "logit_bias"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra_body": {"documents": [{"text": "x"}]}}, "documents"),
        ({"extra_body": {"truncate_prompt_tokens": 8}}, "truncate_prompt_tokens"),
        ({"extra_body": {"tempature": 0.5}}, "tempature"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "continuous_usage_stats"),
        ({"tools": [{"name": "f"}]}, r"tools\[0\]"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "parameters"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text parts"),
        ({"messages": []}, "messages"),
    ],
)
async def test_what_cannot_be_honoured_is_refused_by_name(client, change, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await client.chat.completions.create(**{"model": "policy", "messages": MESSAGES, **change})
    assert caught.value.body["code"] == 400


async def test_what_is_refused_is_named_as_the_parameter(client):
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="policy", messages=MESSAGES, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


async def test_what_asks_for_what_happens_anyway_is_answered(client):
    neutral = {"parallel_tool_calls": True, "response_format": {"type": "text"}, "modalities": ["text"], "store": True}
    answer = await client.chat.completions.create(
        model="policy", messages=MESSAGES, max_tokens=2, user="someone", metadata={"a": "b"}, **neutral
    )
    assert answer.usage.completion_tokens > 0


async def test_choices_by_lines_have_no_log_probs_of_the_prompt(client):
    asked = {"stream_choices": True, "prompt_logprobs": 0}
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs cannot come with stream_choices"):
        await client.completions.create(model="policy", prompt="a", extra_body=asked)


async def test_bad_bodies_and_unknown_tokens_hurt_nobody_else(served, http, client):
    body = {"model": "policy", "token_ids": [5, 100_000], "sampling_params": {}}
    for path, data in (
        ("/inference/v1/generate", json.dumps(body)),
        ("/inference/v1/generate", json.dumps({**body, "token_ids": []})),
        ("/v1/chat/completions", "{not json"),
        ("/v1/chat/completions", "[1]"),
    ):
        async with http.post(path, data=data) as response:
            assert response.status == 400, data
            assert (await response.json())["error"]["message"]
    async with http.get("/nowhere") as response:
        assert response.status == 404 and "error" in await response.json()
    assert (await client.completions.create(model="policy", prompt="a", max_tokens=1)).usage.completion_tokens == 1


async def test_an_unknown_model_is_not_found(client):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.chat.completions.create(model="gpt-9", messages=MESSAGES)


async def test_a_client_that_hangs_up_frees_its_rows(served):
    body = {"model": "policy", "messages": MESSAGES, "n": 3, "ignore_eos": True, "max_tokens": 200}
    await served.engine.pause("test")  # so that the requests are certainly under way
    async with aiohttp.ClientSession(served.base_url) as session:
        with pytest.raises(TimeoutError):
            await session.post("/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(0.5))
    await until(lambda: not served.engine.status().num_requests, timeout_s=10)
    await served.engine.resume("test")
    assert served.engine.status().num_generated_tokens < 100


async def test_without_a_policy_every_route_says_503_and_health_fails():
    engine = EmbeddedEngine()
    server = await start_http(HttpApi(engine, ModelSlot()), "127.0.0.1", 0)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        for call in (
            session.get("/v1/models"),
            session.get("/health"),
            session.post("/v1/chat/completions", json={"model": "policy", "messages": MESSAGES}),
            session.post("/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}}),
        ):
            async with call as response:
                assert response.status == 503
                assert "policy" in (await response.json())["error"]["message"]
                assert int(response.headers["Retry-After"]) >= 1
    await server.stop()
    await engine.close()


async def test_drain_refuses_new_requests_and_aborts_after_the_grace(served, client, http):
    await served.engine.pause("test")
    open_call = asyncio.create_task(client.chat.completions.create(model="policy", messages=MESSAGES))
    await until(lambda: served.engine.status().num_requests, timeout_s=10)
    draining = asyncio.create_task(served.api.drain(0.3))
    await asyncio.sleep(0.05)
    async with http.get("/health") as response:
        assert response.status == 503
    await draining
    with pytest.raises(openai.InternalServerError, match="aborted") as caught:
        await open_call
    assert caught.value.status_code == 503


async def test_metrics_and_a_taken_port(served, http):
    async with http.get("/metrics") as response:
        assert "millrace_inference_policy_version 0" in await response.text()
    port = int(served.base_url.rsplit(":", 1)[1])
    with pytest.raises(UnavailableError, match=str(port)):
        await start_http(served.api, "127.0.0.1", port)


async def test_numbers_that_overflow_are_bad_requests_and_the_engine_goes_on(served, client):
    for wrong in ({"top_k": 3_000_000_000}, {"seed": 2**63}, {"max_tokens": 2**31}, {"temperature": 1e-30}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            async with asyncio.timeout(20):
                await client.chat.completions.create(model="policy", messages=MESSAGES, extra_body=wrong)
    async with asyncio.timeout(20):
        largest = {"top_k": 2**31 - 1, "seed": 2**63 - 1}
        answer = await client.chat.completions.create(
            model="policy", messages=MESSAGES, max_tokens=4, n=2, extra_body=largest
        )
    assert answer.usage.completion_tokens > 0


async def test_health_fails_when_the_engines_thread_is_dead(monkeypatch):
    environ = {"MILLRACE_LISTEN": "127.0.0.1:0", "MILLRACE_HTTP_LISTEN": "127.0.0.1:0"}
    engine = EmbeddedEngine()
    monkeypatch.setattr(embedded_replica, "EmbeddedEngine", lambda **options: engine)
    replica = EmbeddedReplica(Settings.from_env(environ, required=["listen", "http_listen"]), InferenceSettings())
    watching = asyncio.create_task(replica.parts.watch_health())
    await asyncio.sleep(0)
    assert replica.parts.board.is_serving(PROCESS)
    with dying(SystemExit("boom")):
        async with asyncio.timeout(20):
            await engine.resume("nobody")
            while replica.parts.board.is_serving(PROCESS):
                await asyncio.sleep(0.05)
    assert "boom" in replica.parts.board.reason(PROCESS) and not replica.parts.board.is_serving(SERVICE_NAME)
    watching.cancel()
    await engine.close()
