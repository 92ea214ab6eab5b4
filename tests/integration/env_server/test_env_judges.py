"""Endpoints that rewards ask: how many calls at once, for how long, and what a rollout says of one that fails."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from millrace.errors import InvalidSpecError
from millrace.internal.v1 import env_service_pb2, play_pb2
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace_testing.lanes import one_by_default, pairs_by_default
from millrace_testing.patience import patient

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]
KEY_VAR, KEY = "JUDGED_TEST_KEY", "the key of the judge"


class Judge:
    """An endpoint that judges; the first part of the URL is the mode."""

    def __init__(self) -> None:
        self.url = ""
        self.num_open = self.most_open = 0
        self.keys: set[str] = set()

    def base_url(self, mode: str) -> str:
        return f"{self.url}/{mode}/v1"

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        self.keys.add(request.headers.get("Authorization", ""))
        try:
            return await self._answer(request.match_info["mode"])
        finally:
            self.num_open -= 1

    async def _answer(self, mode: str) -> web.StreamResponse:
        match mode:
            case "hang":
                await asyncio.sleep(3600)
            case "slow":
                await asyncio.sleep(0.2)
            case "500" | "429":
                return web.json_response({"error": {"message": f"no {mode}"}}, status=int(mode))
        message = {"role": "assistant", "content": "yes"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "j", "object": "chat.completion", "created": 1, "model": "judge", "choices": [choice]}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return web.json_response({**reply, "usage": usage, "score": 1.0})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def judge() -> AsyncIterator[Judge]:
    made = Judge()
    app = web.Application()
    app.router.add_post("/{mode}/v1/chat/completions", made.answer)
    app.router.add_post("/{mode}/v1/score", made.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


def spec(server: Any, env: str, args: dict[str, Any], **judge: Any) -> play_pb2.EnvSpec:
    made = server.spec(env, args)
    for name, value in judge.items():
        setattr(made, f"judge_{name}", value)
    return made


def v1_args(base_url: str, key_var: str) -> dict[str, Any]:
    return {"task": {"judge": {"base_url": base_url, "api_key_var": key_var, "model": "judge"}}}


def v0_args(base_url: str, key_var: str, **more: Any) -> dict[str, Any]:
    return {"base_url": base_url, "key_var": key_var, **more}


async def play(server: Any, env: play_pb2.EnvSpec, *, size: int = 1) -> list[Any]:
    """Open the environment, and play a group with the reversed text as reply."""
    opened = await server.open_spec(env)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    return await server.play(server.request(env.id, 0, env=env, size=size))


@pytest.mark.parametrize("env", ["judged-v0", "judged-v1"])
async def test_a_judge_scores_with_a_key_that_is_named(
    server: Any, tokenizer_manifest_key: str, judge: Judge, monkeypatch: pytest.MonkeyPatch, env: str
) -> None:
    args = (v0_args if env == "judged-v0" else v1_args)(judge.base_url("ok"), KEY_VAR)
    wanted = spec(server, env, args, max_concurrent=2, timeout_s=60.0, key_var=KEY_VAR)
    monkeypatch.delenv(KEY_VAR, raising=False)
    with pytest.raises(InvalidSpecError, match=rf"judge\.api_key_var: is not set in the env-server.*{KEY_VAR}"):
        await call(server.stub.OpenEnv, env_service_pb2.OpenEnvRequest(env=wanted), timeout_s=patient(10))
    monkeypatch.setenv(KEY_VAR, KEY)
    [rollout] = await play(server, wanted)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error
    assert f"Bearer {KEY}" in judge.keys


@pytest.mark.parametrize("kind", one_by_default(["judge", "asked"]))
async def test_calls_wait_for_their_turn(server: Any, judge: Judge, kind: str) -> None:
    judge.most_open = 0
    wanted = spec(server, "judged-v0", v0_args(judge.base_url("slow"), "", kind=kind), max_concurrent=2, timeout_s=60.0)
    rollouts = await play(server, wanted, size=8)
    assert [rollout.reward for rollout in rollouts] == [1.0] * 8
    assert judge.most_open == 2


@pytest.mark.parametrize(
    ("env", "kind"), [("judged-v0", "judge"), ("judged-v0", "asked"), ("judged-v1", "")], ids=["v0", "v0-http", "v1"]
)
async def test_a_judge_that_hangs_fails_its_rollout_in_time(
    server: Any, tokenizer_manifest_key: str, judge: Judge, env: str, kind: str
) -> None:
    url = judge.base_url("hang")
    args = v0_args(url, "", kind=kind) if env == "judged-v0" else v1_args(url, "PATH")
    wanted = spec(server, env, args, max_concurrent=8, timeout_s=1.0)
    await server.open_spec(wanted)
    began = time.monotonic()
    [rollout] = await play(server, wanted)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "JudgeTimeout"), rollout.error
    assert "did not answer within 1 s; raise `judge.timeout_s` of the `[[orchestrator.env]]`" in rollout.error.message
    assert time.monotonic() - began < patient(20), "long before the rollout's own deadline of 60 s"
    assert rollout.samples == () and rollout.is_environment_failure


@pytest.mark.parametrize(("kind", "mode"), pairs_by_default(["judge", "asked"], ["500", "429"]))
async def test_a_judge_that_answers_with_an_error_fails_its_rollout(
    server: Any, judge: Judge, mode: str, kind: str
) -> None:
    args = v0_args(judge.base_url(mode), "", kind=kind)
    [rollout] = await play(server, spec(server, "judged-v0", args, max_concurrent=8, timeout_s=60.0))
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "JudgeError"), rollout.error
    assert mode in rollout.error.message and "lower `judge.max_concurrent`" in rollout.error.message
    assert rollout.samples == ()


async def test_a_v1_judge_that_answers_with_an_error_fails_its_rollout(
    server: Any, tokenizer_manifest_key: str, judge: Judge
) -> None:
    wanted = spec(server, "judged-v1", v1_args(judge.base_url("500"), "PATH"), max_concurrent=8, timeout_s=60.0)
    [rollout] = await play(server, wanted)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "JudgeError"), rollout.error
    assert "500" in rollout.error.message and "lower `judge.max_concurrent`" in rollout.error.message
