"""Chats that are asked together: the env worker's client against the embedded engine over HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import orjson
import pytest
import verifiers as vf
from aiohttp import web

from millrace.env_server.adapters import client_v0
from millrace.env_server.adapters.client_v0 import EngineLostError, LeanClient
from millrace.env_server.adapters.samples import SPANS
from millrace.env_server.engine_access import make_session
from millrace.rollouts import parameters

MESSAGES = [{"role": "user", "content": "turn me around"}]
LONG = {"max_tokens": 2000, "extra_body": {"ignore_eos": True}}


class Asking:
    """The client, and how many requests its session has sent."""

    def __init__(self, client: LeanClient, sent: list[dict[str, Any]]) -> None:
        self.client = client
        self.sent = sent

    async def ask(self, rollout: str, messages: Any = None, **args: Any) -> dict[str, Any]:
        state = {"trajectory_id": rollout}
        asked = {"temperature": 1.0, "max_tokens": 12, **args}
        return await self.client.get_native_response(messages or MESSAGES, "policy", asked, state=state)


@contextlib.asynccontextmanager
async def asking(url: str) -> AsyncIterator[Asking]:
    async with make_session() as session:
        sent: list[dict[str, Any]] = []
        stock = session.post

        def post(*args: Any, data: bytes, **kwargs: Any) -> Any:
            sent.append(orjson.loads(data))
            return stock(*args, data=data, **kwargs)

        session.post = post  # type: ignore[method-assign]
        yield Asking(LeanClient(f"{url}/v1", session), sent)


@pytest.fixture
async def client(served) -> AsyncIterator[Asking]:
    """Yield a client that has heard what the engine can do."""
    async with asking(served.base_url) as found:
        await found.ask("first")
        found.sent.clear()
        yield found


async def until(condition, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_group_asks_once_and_each_member_has_its_own_exact_tokens(served, client, reference):
    answers = await asyncio.gather(*(client.ask(f"r{number}", temperature=0.7) for number in range(8)))
    [body] = client.sent
    assert body["n"] == 8 and body[parameters.FIELD] is True
    sampled = set()
    for number, answer in enumerate(answers):
        await client.client.raise_from_native_response(answer)
        typed = await client.client.from_native_response(answer)
        tokens = typed.message.tokens
        assert answer["choices"][0]["index"] == 0
        assert served.slot.current.tokenizer.decode(tokens.prompt_ids).endswith("<|im_start|>assistant\n")
        expected = reference(served.model, tokens.prompt_ids, tokens.completion_ids, 0.7)
        np.testing.assert_allclose(tokens.completion_logprobs, expected, atol=1e-5)
        [span] = SPANS.take(f"r{number}").find(tokens.completion_ids).spans
        assert (span.start, span.end) == (0, len(tokens.completion_ids))
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
            len(tokens.prompt_ids),
            len(tokens.completion_ids),
        )
        sampled.add(tuple(tokens.completion_ids))
    assert len(sampled) > 1 and len({answer["id"] for answer in answers}) == 8


async def test_what_differs_is_asked_apart_and_a_seed_keeps_its_tokens(client):
    other = [{"role": "user", "content": "something else"}]
    seeded = {"extra_body": {"seed": 5}}
    answers = await asyncio.gather(
        client.ask("a"),
        client.ask("b", temperature=0.5),
        client.ask("c", other),
        client.ask("d", **seeded),
        client.ask("e", **seeded),
    )
    assert [body.get("n", 1) for body in client.sent] == [1] * 5
    # What is sampled with a seed is a request of its own; all others get log-probs as a column, without names.
    assert [body.get("seed") for body in client.sent if parameters.FIELD not in body] == [5, 5]
    assert [set(answer["choices"][0]["logprobs"]) for answer in answers] == [{parameters.LOGPROBS}] * 3 + [
        {"content"}
    ] * 2
    *_, one, same = (answer["choices"][0]["token_ids"] for answer in answers)
    assert one == same


async def test_a_rollout_does_not_wait_for_a_longer_one(served, client):
    """Two choices of one request: the second one's generation is held back until the first was answered."""
    held, generate = asyncio.Event(), served.engine.generate

    async def slow(request):
        if request.request_id.endswith("-1"):
            await held.wait()
        return await generate(request)

    served.engine.generate = slow
    tasks = [asyncio.create_task(client.ask(f"r{number}")) for number in range(2)]
    async with asyncio.timeout(20):
        done, [late] = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert done and not late.done()
        held.set()
        await late
    assert len(client.sent) == 1


async def test_one_that_is_cancelled_leaves_the_others_and_the_last_one_ends_the_request(served, client):
    tasks = [asyncio.create_task(client.ask(f"r{number}", **LONG)) for number in range(3)]
    await until(lambda: served.engine.status().num_running == 3)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.wait(tasks[:2])
    assert not tasks[2].done() and served.engine.status().num_running == 3
    tasks[2].cancel()
    await until(lambda: served.engine.status().num_requests == 0)
    assert len(client.sent) == 1
    assert (await client.ask("after"))["choices"]


async def test_those_that_leave_before_it_is_sent_are_not_asked_for(client):
    tasks = [asyncio.create_task(client.ask(f"r{number}")) for number in range(4)]
    await asyncio.sleep(0)
    for task in tasks[:2]:
        task.cancel()
    await asyncio.gather(*tasks[2:])
    [body] = client.sent
    assert body["n"] == 2


async def test_more_than_one_request_takes_are_several(client):
    answers = await asyncio.gather(*(client.ask(f"r{number}", max_tokens=1) for number in range(130)))
    assert [body.get("n", 1) for body in client.sent] == [128, 2] and len(answers) == 130


async def test_an_engine_that_drops_its_requests_is_lost_to_each(served, client, monkeypatch):
    monkeypatch.setattr(client_v0, "MAX_ATTEMPTS", 1)
    tasks = [asyncio.create_task(client.ask(f"r{number}", **LONG)) for number in range(3)]
    await until(lambda: served.engine.status().num_running == 3)
    await served.engine.abort_all()
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineLostError] * 3
    assert all("answered 503" in str(error) and "aborted" in str(error) for error in errors)


async def test_a_refusal_is_each_ones_own(client):
    errors = await asyncio.gather(
        *(client.ask(f"r{number}", [{"role": "user", "content": "x" * 100_000}]) for number in range(3)),
        return_exceptions=True,
    )
    assert [type(error) for error in errors] == [vf.OverlongPromptError] * 3
    assert len(client.sent) == 1


@pytest.mark.parametrize("end", ["half a line", "no line", "not there"])
async def test_an_answer_that_breaks_off_is_an_engine_lost(end):
    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        whole = {"choices": [{"index": 0, "message": {"content": "hi"}, "token_ids": [1]}]}
        if "n" not in body:
            return web.json_response(whole, headers={parameters.HEADER: parameters.LINES})
        reply = web.StreamResponse(headers={"content-type": parameters.CONTENT_TYPE})
        await reply.prepare(request)
        await reply.write(orjson.dumps({"index": 0, "status": 200, "body": whole}) + b"\n")
        await reply.write({"half a line": b'{"index": 1, ', "no line": b'[1]\n{"index": -1}\n', "not there": b""}[end])
        return reply

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with asking(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            await client.ask("first")
            first, second = await asyncio.gather(client.ask("a"), client.ask("b"), return_exceptions=True)
        assert first["choices"][0]["token_ids"] == [1]
        assert isinstance(second, EngineLostError) and "broke off" in str(second)
    finally:
        await runner.cleanup()


async def test_an_engine_that_has_become_another_is_asked_alone():
    async def chat(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        asked.append(body.get("n", 1))
        headers = {parameters.HEADER: parameters.LINES} if len(asked) <= 2 else {}
        return web.json_response({"choices": [{"index": 0, "token_ids": [7]}]}, headers=headers)

    asked: list[int] = []
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with asking(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            for _ in range(3):
                answers = await asyncio.gather(client.ask("a"), client.ask("b"))
                assert [answer["choices"][0]["token_ids"] for answer in answers] == [[7], [7]]
        # Two that know nothing of the engine; then together, in vain, and each alone; then alone from the start.
        assert asked == [1, 1, 2, 1, 1, 1, 1]
    finally:
        await runner.cleanup()


async def test_the_whole_answer_to_a_request_with_one_choice_is_its_answer():
    async def chat(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json()).get("n"))
        headers = {parameters.HEADER: parameters.LINES} if len(asked) == 1 else {}
        return web.json_response({"choices": [{"index": 0, "token_ids": [len(asked)]}]}, headers=headers)

    asked: list[int | None] = []
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with asking(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
            answers = [await client.ask("a") for _ in range(3)]
        assert [answer["choices"][0]["token_ids"] for answer in answers] == [[1], [2], [3]]
        # The second one is not asked for again, and says that the engine does not split choices any more.
        assert asked == [None, 1, None]
    finally:
        await runner.cleanup()
