"""The policy as its own teacher (opsd): a real engine scores what it has sampled, told the task's answer besides."""

import asyncio
import dataclasses
import json
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from millrace.config.load import validate_document
from millrace.errors import CapacityError, InvalidSpecError
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.http.server import HttpApi, start_http
from millrace.inference.model_files import ModelSlot
from millrace.inference.updater import PolicyUpdater
from millrace.internal.v1 import play_pb2
from millrace.local.directory import free_ports
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rollouts.types import RolloutStatus, Taught
from millrace.rpc.channel import call
from millrace.runlog.names import Names
from millrace.runlog.records.token_logs import load_scores
from millrace.runlog.redis.log import RunLog
from millrace_testing.inference import tiny
from millrace_testing.inference.logprobs import prompt_logprobs
from millrace_testing.patience import patient

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

ENV = "reverse-text"
SEED = 5
SIXTEEN = play_pb2.Sampling(temperature=1.0, max_tokens=16, extra_body_json='{"ignore_eos": true}')
HINT = "Told: {demonstration}"


async def serving(directory: Path) -> AsyncIterator[str]:
    engine, slot = EmbeddedEngine(), ModelSlot()
    await PolicyUpdater(engine, slot, None, None, extra_names=("policy",)).serve_fixed(directory)
    http = await start_http(HttpApi(engine, slot), "127.0.0.1", 0)
    yield f"http://127.0.0.1:{http.port}/v1"
    await http.stop()
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def policy_url(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    directory = tmp_path_factory.mktemp("policy")
    tiny.tiny_model(SEED).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    async for url in serving(directory):
        yield url


async def distilling(server: Any, *, template: str = HINT) -> Any:
    """Return a run of its own with this algorithm, on the module's env-server."""
    algo = {"type": "opsd", "demo_key": "answer", "template": template}
    orchestrator = {"env": [{"id": ENV}], "algo": algo, "seq_len": 200}
    config = validate_document({"orchestrator": orchestrator, "trainer": {"model": {"seq_len": 200}}})
    record = json.dumps({"run_hash": "0", "config": json.loads(config.resolved_json())}).encode()
    log = await RunLog.create(server.log.redis, server.store, "test", f"r{uuid.uuid4().hex[:12]}", record)
    await server.open(ENV)
    return dataclasses.replace(server, log=log)


async def play(run: Any, url: str, *, demo_key: str = "answer") -> Any:
    request = run.request(ENV, 3, base_url=url, demo_key=demo_key, sampling=SIXTEEN)
    async with asyncio.timeout(120):
        while True:
            try:
                await call(run.stub.PlayGroup, request, timeout_s=patient(PLAY_TIMEOUT_S))
                break
            except CapacityError:
                await asyncio.sleep(0.05)
    return (await run.collect(request))[0]


async def test_the_policy_scores_its_tokens_behind_the_hint(
    server: Any, policy_url: str, tokenizer: Any, tokenizer_manifest_key: str
) -> None:
    run = await distilling(server)
    rollout = await play(run, policy_url)
    assert rollout.status is RolloutStatus.OK, rollout.error
    answer = json.loads(rollout.task_json)["answer"]
    assert rollout.demonstration == answer
    [sample] = load_scores(run.store, run.log.names, rollout).samples
    messages = [{"role": "system", "content": HINT.format(demonstration=answer)}]
    hint = tokenizer.apply_chat_template(messages, add_generation_prompt=False, return_dict=False)
    assert sample.taught == Taught(lineage=0, version=0, hint_ids=tuple(hint))
    model, is_sampled = tiny.tiny_model(SEED), sample.loss_mask == 1
    told = np.asarray(prompt_logprobs(model, [*hint, *sample.token_ids.tolist()]))[len(hint) - 1 :]
    untold = np.asarray([0.0, *prompt_logprobs(model, sample.token_ids.tolist())])
    assert sample.teacher_logprobs is not None and is_sampled.sum() == 16
    assert np.allclose(sample.teacher_logprobs[is_sampled], told[is_sampled], atol=1e-5)
    assert np.abs(told - untold)[is_sampled].max() > 1e-3, "the hint makes no difference, so this test shows nothing"
    assert not sample.teacher_logprobs[~is_sampled].any()
    gap = float((sample.inference_logprobs - told)[is_sampled].mean())
    assert rollout.metrics["teacher_reverse_kl"] == pytest.approx(gap, abs=1e-5)
    assert rollout.metrics["teacher_version"] == 0


async def test_a_task_without_a_demonstration_is_a_failure_that_names_what_it_has(
    server: Any, policy_url: str, tokenizer_manifest_key: str
) -> None:
    run = await distilling(server)
    rollout = await play(run, policy_url, demo_key="hint")
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "DemonstrationMissing")
    assert "no `hint` to show the teacher (it has answer" in rollout.error.message
    assert "`orchestrator.algo.demo_key`" in rollout.error.message


async def test_a_hint_that_does_not_fit_says_whether_shorter_replies_help(
    server: Any, policy_url: str, tokenizer_manifest_key: str
) -> None:
    first = await play(await distilling(server), policy_url)
    told = load_scores(server.store, Names("test", first.run_uid), first).samples[0]
    num_prompt = int(np.flatnonzero(told.loss_mask)[0])
    assert told.taught is not None
    room = 253 - num_prompt - len(told.taught.hint_ids)  # three sampled tokens are too many
    for padding, status in ((room, RolloutStatus.MODEL_ERROR), (room + 9, RolloutStatus.PROMPT_TOO_LONG)):
        rollout = await play(await distilling(server, template=HINT + "x" * padding), policy_url)
        assert (rollout.status, rollout.error.type) == (status, "HintTooLong"), rollout.error
        assert "do not fit into the context of 256 tokens: shorten" in rollout.error.message


async def test_a_replica_that_is_away_is_nobodys_fault(
    server: Any, policy_url: str, tokenizer_manifest_key: str
) -> None:
    run = await distilling(server)
    (port,) = free_ports(1)
    gone = run.request(ENV, 3, base_url=f"http://127.0.0.1:{port}/v1", demo_key="answer")
    with pytest.raises(CapacityError, match="failed") as refused:
        await call(run.stub.PlayGroup, gone, timeout_s=patient(PLAY_TIMEOUT_S))
    assert refused.value.reason == "TEACHER_UNREACHABLE"
    assert (await play(run, policy_url)).status is RolloutStatus.OK


async def test_a_model_whose_template_writes_no_system_message_is_refused_before_anything_is_played(
    server: Any, tokenizer: Any, tokenizer_manifest_key: str, tmp_path: Path
) -> None:
    tiny.tiny_model(SEED).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system') }}")
    run = await distilling(server)
    async for url in serving(tmp_path):
        with pytest.raises(InvalidSpecError, match="no system") as refused:
            await play(run, url)
        assert refused.value.reason == "HINT_NOT_RENDERED"
