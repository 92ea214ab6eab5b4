"""Scoring by a teacher: the embedded engine with a model of its own, after a door that checks the key and breaks."""

import asyncio
import dataclasses
import json
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from aiohttp import web

from millrace.config.load import validate_document
from millrace.env_server.teacher import client as teacher_client
from millrace.errors import CapacityError, InvalidSpecError
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1 import batch_pb2
from millrace.local.directory import free_ports
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rollouts.types import RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog.records.token_logs import load_scores
from millrace.runlog.redis.log import RunLog
from millrace.telemetry import waits
from millrace_testing.inference import tiny
from millrace_testing.inference.logprobs import prompt_logprobs
from millrace_testing.lanes import by_default, one_by_default
from millrace_testing.patience import patient
from millrace_testing.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

KEY = "key-of-the-teacher-51b9"
ENV = "reverse-text"


class Door:
    """Before the teacher: checks the key, and does to a request what `spoil` says."""

    def __init__(self, behind: str) -> None:
        self.behind = behind
        (self.port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self.answers: Counter[int] = Counter()
        self.busy: list[int] = []
        """Statuses of the next answers."""
        self.spoil = ""
        self._runner: web.AppRunner | None = None

    async def open(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/v1/{path}", self._answer)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True).start()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _answer(self, request: web.Request) -> web.Response:
        status, body = await self._pass(request)
        self.answers[status] += 1
        return web.json_response(body, status=status, headers={"Retry-After": "0.01"} if status == 429 else {})

    async def _pass(self, request: web.Request) -> tuple[int, Any]:
        if request.headers.get("Authorization") != f"Bearer {KEY}":
            return 401, {"error": {"message": "who are you"}}
        body = await request.json() if request.method == "POST" else None
        if self.spoil.isdecimal():
            return int(self.spoil), {"error": {"message": "the gateway hiccups"}}
        if body is not None and self.busy:
            return self.busy.pop(0), {"error": {"message": "not now"}}
        if self.spoil == "text" and body is not None and isinstance(body["prompt"], str):
            body["prompt"] = body["prompt"].replace("cats", "dogs")
        if self.spoil == "ids" and body is not None and isinstance(body["prompt"], list) and 258 in body["prompt"]:
            return 400, {"error": {"message": "Token id 258 is out of vocabulary"}}
        if self.spoil in ("long", "filter") and body is not None and len(body["prompt"]) > 3:
            return (400, {"error": {"message": "too long"}}) if self.spoil == "long" else (403, "improper")
        url = f"{self.behind}/v1/{request.match_info['path']}"
        async with aiohttp.ClientSession() as session, session.request(request.method, url, json=body) as reply:
            answer = await reply.json()
        if self.spoil == "scores" and body is not None:
            answer["choices"][0].pop("prompt_logprobs")
        return reply.status, answer


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def teacher_url(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """Yield the teacher without its door: a model of other weights, with the policy's tokenizer."""
    directory = tmp_path_factory.mktemp("teacher")
    tiny.tiny_model(5).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    engine, slot = EmbeddedEngine(), ModelSlot()
    await PolicyUpdater(engine, slot, None, None, extra_names=("big",)).serve_fixed(directory)
    server = await start_http(HttpApi(engine, slot), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await server.stop()
    await engine.close()


@pytest_asyncio.fixture(loop_scope="session")
async def door(teacher_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Door]:
    monkeypatch.setenv("MILLRACE_KEY_TEACHER", KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "ours")
    monkeypatch.setattr(teacher_client, "external_pause_s", lambda attempt, asked: 0.01)
    door = Door(teacher_url)
    await door.open()
    yield door
    await door.close()


async def distilling(server: Any, door: Door, *, seq_len: int = 200, variable: str = "MILLRACE_KEY_TEACHER") -> Any:
    """Return a run of its own with this teacher, on the module's env-server."""
    teacher = {"name": "big", "base_url": door.url, "api_key_var": variable}
    orchestrator = {"env": [{"id": ENV}], "algo": {"type": "opd", "teacher": teacher}, "seq_len": seq_len}
    config = validate_document({"orchestrator": orchestrator, "trainer": {"model": {"seq_len": seq_len}}})
    record = json.dumps({"run_hash": "0", "config": json.loads(config.resolved_json())}).encode()
    log = await RunLog.create(server.log.redis, server.store, "test", f"r{uuid.uuid4().hex[:12]}", record)
    await server.open(ENV)
    return dataclasses.replace(server, log=log)


async def until_taken(run: Any, request: Any) -> None:
    async with asyncio.timeout(120):
        while True:
            try:
                await call(run.stub.PlayGroup, request, timeout_s=patient(PLAY_TIMEOUT_S))
                return
            except CapacityError:
                await asyncio.sleep(0.05)


async def test_sampled_tokens_are_scored_before_the_rollout_is_appended(
    server: Any, door: Door, tokenizer_manifest_key: str
) -> None:
    run = await distilling(server, door)
    first = run.request(ENV, 0)
    await until_taken(run, first)
    await run.collect(first)
    door.busy = [429, 503, 500, 522]
    [rollout] = await run.play(run.request(ENV, 3))
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert [door.answers[status] for status in (429, 503, 500, 522)] == [1, 1, 1, 1]
    [sample] = load_scores(run.store, run.log.names, rollout).samples
    is_sampled = sample.loss_mask == 1
    expected = np.asarray([0.0, *prompt_logprobs(tiny.tiny_model(5), sample.token_ids.tolist())])
    assert sample.teacher_logprobs is not None and is_sampled.sum() > 2
    assert np.allclose(sample.teacher_logprobs[is_sampled], expected[is_sampled], atol=1e-5)
    assert not sample.teacher_logprobs[~is_sampled].any()
    # The fake engine of the policy gives every token a log-prob of -0.5.
    assert rollout.metrics["teacher_reverse_kl"] == pytest.approx(float((-0.5 - expected[is_sampled]).mean()), abs=1e-5)
    seen = [path for path in Path(run.store.uri("").removeprefix("file://")).rglob("*") if path.is_file()]
    assert seen and not [path for path in seen if KEY.encode() in path.read_bytes()], "the key was written down"


async def test_the_teacher_of_a_run_that_is_over_is_left(
    server: Any, door: Door, tokenizer_manifest_key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, left = teacher_client.TeacherClient.close, list[str]()

    async def noted(self: teacher_client.TeacherClient) -> None:
        left.append(self.describe())
        await close(self)

    monkeypatch.setattr(teacher_client.TeacherClient, "close", noted)
    run = await distilling(server, door)
    request = run.request(ENV, 0)
    await until_taken(run, request)
    await run.collect(request)
    header = batch_pb2.BatchHeader(run_uid=run.log.uid, kind=batch_pb2.BATCH_KIND_CLOSE, step=0)
    run.store.create(run.log.names.batch_header(0), header.SerializeToString())

    def is_left() -> bool:
        run.service.look_for_end(run.log.uid)  # as with every heartbeat
        return bool(left)

    await until(is_left, timeout_s=60.0)
    assert left == [f"teacher big at {door.url}"]


async def test_a_dead_teacher_is_a_wait_and_a_failure_without_blame(
    server: Any, door: Door, tokenizer_manifest_key: str
) -> None:
    run = await distilling(server, door)
    request = run.request(ENV, 0)
    await until_taken(run, request)
    await run.collect(request)
    await door.close()
    [lost] = await run.play(run.request(ENV, 1))
    assert (lost.status, lost.error.type) == (RolloutStatus.ENGINE_LOST, "TeacherLost") and not lost.samples
    assert "6 attempts" in lost.error.message and door.url in lost.error.message
    again = run.request(ENV, 1, attempt=1)
    with pytest.raises(CapacityError) as refused:
        await call(run.stub.PlayGroup, again, timeout_s=patient(PLAY_TIMEOUT_S))
    assert refused.value.reason == "TEACHER_UNREACHABLE"
    [wait] = [wait for wait in waits.snapshot("t") if wait.run == run.log.uid and "to answer" in wait.reason]
    assert f"teacher big at {door.url}" in wait.reason
    await door.open()
    await until_taken(run, again)
    [found] = await run.collect(again)
    assert found.status is RolloutStatus.OK and found.attempt == 1
    assert load_scores(run.store, run.log.names, found).samples[0].teacher_logprobs is not None


@pytest.mark.parametrize("hiccup", one_by_default(["401", "404", "521"]))
async def test_what_a_checked_teacher_refuses_later_is_a_wait_unless_it_became_another(
    server: Any, door: Door, tokenizer_manifest_key: str, hiccup: str
) -> None:
    run = await distilling(server, door)
    request = run.request(ENV, 0)
    await until_taken(run, request)
    await run.collect(request)
    door.busy = [503] * 6
    [lost] = await run.play(run.request(ENV, 1))
    assert lost.status is RolloutStatus.ENGINE_LOST
    door.spoil = hiccup
    again = run.request(ENV, 1, attempt=1)
    async with asyncio.timeout(120):
        while door.answers[int(hiccup)] < 3:  # the check went on after it was refused
            with pytest.raises(CapacityError) as refused:
                await call(run.stub.PlayGroup, again, timeout_s=patient(PLAY_TIMEOUT_S))
            assert refused.value.reason == "TEACHER_UNREACHABLE"
            await asyncio.sleep(0.05)
    with pytest.raises(CapacityError, match="the gateway hiccups"):
        await call(run.stub.PlayGroup, again, timeout_s=patient(PLAY_TIMEOUT_S))
    door.spoil = ""
    await until_taken(run, again)
    [found] = await run.collect(again)
    assert found.status is RolloutStatus.OK, found.error
    door.busy = [503] * 6
    await run.play(run.request(ENV, 2))
    door.spoil = "text"
    with pytest.raises(InvalidSpecError) as another:
        await until_taken(run, run.request(ENV, 2, attempt=1))
    assert another.value.reason == "TEACHER_TOKENIZER_DIFFERS"


@pytest.mark.parametrize(
    ("spoil", "changes", "reason", "text"),
    [
        ("", {"variable": "NO_SUCH_KEY"}, "TEACHER_KEY_MISSING", "NO_SUCH_KEY is not set in the env-server's"),
        ("", {"variable": "AWS_SECRET_ACCESS_KEY"}, "TEACHER_KEY_MISSING", "is a variable of the deployment"),
        ("401", {}, "TEACHER_REFUSED", "the gateway hiccups"),
        ("", {"variable": "HOME"}, "TEACHER_REFUSED", "401.*HOME"),
        ("", {"seq_len": 256}, "TEACHER_REFUSED", "has a context of 256 tokens"),
        ("text", {}, "TEACHER_TOKENIZER_DIFFERS", "has another tokenizer than the policy"),
        ("ids", {}, "TEACHER_VOCABULARY_DIFFERS", "does not know token id 258"),
        ("scores", {}, "TEACHER_REFUSED", "without prompt_logprobs"),
    ],
)
async def test_a_teacher_that_cannot_score_is_refused_before_anything_is_played(
    server: Any, door: Door, tokenizer_manifest_key: str, spoil: str, changes: dict, reason: str, text: str
) -> None:
    door.spoil = spoil
    run = await distilling(server, door, **changes)
    with pytest.raises(InvalidSpecError, match=text) as refused:
        await until_taken(run, run.request(ENV, 0))
    assert refused.value.reason == reason
    assert refused.value.violations[0].field.startswith("orchestrator.algo.teacher.")


@pytest.mark.parametrize("status", by_default(["401", "403", "404"], {"401", "404"}))
async def test_a_teacher_that_refuses_everything_while_it_scores_is_a_wait_that_names_the_key(
    server: Any, door: Door, tokenizer_manifest_key: str, status: str
) -> None:
    run = await distilling(server, door)
    request = run.request(ENV, 0)
    await until_taken(run, request)
    await run.collect(request)
    door.spoil = status
    [refused] = await run.play(run.request(ENV, 1))
    assert (refused.status, refused.error.type) == (RolloutStatus.ENGINE_LOST, "TeacherRefused"), "nobody's fault"
    named = "MILLRACE_KEY_TEACHER" if status != "404" else door.url
    assert f"answered {status}" in refused.error.message and named in refused.error.message
    again = run.request(ENV, 1, attempt=1)
    with pytest.raises(CapacityError, match=named):
        await call(run.stub.PlayGroup, again, timeout_s=patient(PLAY_TIMEOUT_S))
    [wait] = [wait for wait in waits.snapshot("t") if wait.run == run.log.uid and "to answer" in wait.reason]
    assert named in wait.reason and KEY not in wait.reason
    door.spoil = ""
    await until_taken(run, again)
    [found] = await run.collect(again)
    assert found.status is RolloutStatus.OK, found.error


@pytest.mark.parametrize(("spoil", "text"), [("long", "too long"), ("filter", "improper")])
async def test_a_rollout_that_the_teacher_refuses_is_a_failure_with_its_words(
    server: Any, door: Door, tokenizer_manifest_key: str, spoil: str, text: str
) -> None:
    run = await distilling(server, door)
    request = run.request(ENV, 0)
    await until_taken(run, request)
    await run.collect(request)
    door.spoil = spoil
    [rollout] = await run.play(run.request(ENV, 1))
    assert (rollout.status, rollout.error.type) == (RolloutStatus.MODEL_ERROR, "TeacherRefused")
    assert text in rollout.error.message
