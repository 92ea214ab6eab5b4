"""A replica on real vLLM with an untied model: a fixed model, weights over HTTP, bad policies, updates that fail."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.storage.local import LocalStore
from millrace.telemetry.faults import Action, Fault, Point
from millrace_testing.inference import published, vllm_server

GAP = 1e-5  # of float32 log-probs between vLLM and a forward pass of Hugging Face's model
FLAGS = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4}
PROMPT = [1, 2, 3]
pytestmark = pytest.mark.timeout(300)


def untied(seed: int, **changes: Any) -> Any:
    return published.model(seed, tie_word_embeddings=False, **changes)


def leave_beside(model: Path) -> None:
    """Files of other weights, all of which vLLM would read, or instead of the model's, where it is given them."""
    for name in ("consolidated.safetensors", "model-00002-of-00002.safetensors"):
        save_file({key: tensor + 1 for key, tensor in load_file(model / "model.safetensors").items()}, model / name)


def gap(model: Any, found: Any) -> float:
    return float(np.abs(published.logprobs(model, PROMPT, found.token_ids) - found.logprobs).max())


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("untied")
    model = untied(99)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    leave_beside(directory / "model")
    yield from vllm_server.serving(vllm_python, directory / "model", directory, **FLAGS)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


@pytest.fixture
def publisher(server: Any, request: pytest.FixtureRequest) -> Any:
    return published.Publisher(LocalStore(server.directory / "store"), server.directory, request.node.name)


@pytest.fixture
async def served(client: Any, publisher: Any) -> Any:
    """Return version 0, of seed 0, serves."""
    client.uid = publisher.uid
    await client.serve(publisher.full(untied(0), 0))
    return client


async def assert_refuses(client: Any, *words: str) -> None:
    """Nothing is served, and everybody is told so."""
    status = await client.status()
    assert (status.state, status.has_version, status.digest) == (pb.POLICY_STATE_BROKEN, False, "")
    assert all(word in status.error for word in words), status.error
    body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for path, sent in (
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2}}),
        ("/v1/chat/completions", body),
        ("/v1/chat/completions", {**body, "stream": True}),
        ("/v1/completions", {"model": "policy", "prompt": PROMPT, "max_tokens": 2}),
    ):
        code, answer, headers = await client.post(path, sent)
        assert (code, int(headers["Retry-After"])) == (503, 1), (path, answer)
    for path in ("/health", "/v1/models"):
        async with client.session.get(path) as response:
            assert response.status == 503


# The first test of the module: it needs a replica that has served no run yet.
async def test_a_fixed_model_and_weights_over_http(server: Any, client: Any, publisher: Any) -> None:
    fixed = await client.status()
    assert (fixed.state, fixed.has_version, fixed.run_uid, fixed.version) == (pb.POLICY_STATE_SERVING, True, "", 0)
    assert gap(untied(99), await client.generate(PROMPT)) <= GAP
    other = server.directory / "other"
    untied(5).save_pretrained(other)
    leave_beside(other)
    for path, body, model in (
        ("/update_weights", {"weight_dir": str(other)}, untied(5)),
        ("/reload_weights", {}, untied(99)),
        ("/update_weights", {"weight_dir": str(other)}, untied(5)),
    ):
        before = (await client.status()).version
        code, answer, _ = await client.post(path, body)
        assert (code, answer) == (200, {"status": "ok"}), server.log()
        after = await client.status()
        assert (after.has_version, after.digest, after.proof) == (True, "", ""), "nothing proves them"
        assert after.version > before
        found = await client.generate(PROMPT)
        assert gap(model, found) <= GAP and set(found.version_of()) == {after.version}
    for body in ({"weight_dir": str(server.directory / "nowhere")}, {"weight_dir": 3}, {}):
        code, answer, _ = await client.post("/update_weights", body)
        assert code == 400 and "director" in answer["error"]["message"]
    bad = server.directory / "bad"
    bad.mkdir()
    sound = load_file(other / "model.safetensors")
    norm = sound.pop("model.norm.weight")
    for damage in ({}, {"model.norm.weight": norm * float("nan")}, {"base.model.norm.weight": norm}):
        save_file(sound | damage, bad / "model.safetensors")
        code, answer, _ = await client.post("/update_weights", {"weight_dir": str(bad)})
        assert code == 400 and "model.norm.weight" in answer["error"]["message"], answer
    assert gap(untied(5), await client.generate(PROMPT)) <= GAP

    client.uid = publisher.uid
    models = [untied(0)]
    models += [published.nudged(models[0], 1)]
    models += [published.nudged(models[1], 2)]
    for version, model in enumerate(models):
        entry = publisher.delta(model, version, base=version - 1) if version else publisher.full(model, version)
        await client.serve(entry)
        found = await client.generate(PROMPT)
        assert gap(model, found) <= GAP and set(found.version_of()) == {version}
        assert all(gap(old, found) > 100 * GAP for old in models if old is not model)
    code, answer, _ = await client.post("/update_weights", {"weight_dir": str(other)})
    assert code == 400 and "PolicyService" in answer["error"]["message"]
    assert gap(models[2], await client.generate(PROMPT)) <= GAP


async def test_bad_policies_leave_the_old_version_serving(served: Any, publisher: Any) -> None:
    first = untied(0)
    second = published.nudged(first, 1)
    lost = publisher.delta(published.nudged(first, 8), 1, base=0, spoil="object")
    unhashed = copy.deepcopy(lost)
    unhashed.manifest_sha256 = bytes(32)
    orphan = publisher.delta(published.nudged(first, 9), 3, base=1)  # version 1 cannot be had
    codec = publisher.delta(published.nudged(first, 10), 4, base=0, spoil="codec")
    shape = publisher.full(untied(0, intermediate_size=64), 5, like=first)
    config = publisher.full(untied(0, intermediate_size=64), 6)
    dtype = publisher.full(untied(0).half(), 7, like=first, probed=published.probe(first))
    for bad, words in (
        (unhashed, ("sha256",)),
        (lost, ("does not exist", "delta-00000000")),
        (orphan, ("0000-00000001",)),
        (codec, ("mystery",)),
        (shape, ("mlp", "[64, 64]")),
        (config, ("config.json", "intermediate_size")),
        (dtype, ("float16",)),
    ):
        status = await served.update(bad)
        assert status.state == pb.POLICY_STATE_UPDATE_FAILED, (bad.version, status)
        assert all(word in status.error for word in words), (bad.version, status.error)
        assert (status.has_version, status.version) == (True, 0)
        found = await served.generate(PROMPT)
        assert gap(first, found) <= GAP and set(found.version_of()) == {0}
    good = publisher.delta(second, 11, base=0)
    await served.serve(good)
    assert gap(second, await served.generate(PROMPT)) <= GAP


@pytest.mark.parametrize("cause", ["the apply", "the proof"], ids=["apply", "proof"])
async def test_a_failed_update_serves_nothing_until_the_anchor_is_loaded(
    served: Any, publisher: Any, server: Any, cause: str
) -> None:
    model = published.nudged(untied(0), 1)
    await served.pause()
    caught = asyncio.create_task(
        served.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 200}})
    )
    await served.open_requests(1)
    if cause == "the apply":
        server.arm(Fault(point=Point.INFERENCE_MID_APPLY, action=Action.RAISE))
        bad, word = publisher.delta(model, 1, base=0), "fault injected"
    else:
        bad, word = publisher.delta(model, 1, base=0, probed=published.probe(untied(7))), "probe"
    status = await served.update(bad)
    assert status.state == pb.POLICY_STATE_BROKEN and word in status.error, status
    code, _, headers = await caught
    assert (code, headers["Retry-After"]) == (503, "1"), "what was in flight has tokens of nobody knows which version"
    await served.resume()
    await assert_refuses(served, word)
    good = bad if cause == "the apply" else publisher.delta(model, 2, base=0)
    healed = await served.serve(good)
    assert healed.fetched_bytes > healed.full_bytes, "the anchor, and the delta on it"
    found = await served.generate(PROMPT)
    assert gap(model, found) <= GAP and set(found.version_of()) == {good.version}


async def test_a_caller_that_goes_away_takes_its_request_along(served: Any) -> None:
    await served.pause()
    for path, body in (
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 200}}),
        ("/v1/completions", {"model": "policy", "prompt": PROMPT, "max_tokens": 200, "stream": True}),
    ):
        async with aiohttp.ClientSession(served.server.http) as session:
            asking = asyncio.create_task(session.post(path, json=body))
            await served.open_requests(1)
            asking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asking
        await served.open_requests(0)  # generation is paused, so it has not come to its end
    await served.resume()
    assert await served.metric("vllm:num_requests_running") == 0
    assert gap(untied(0), await served.generate(PROMPT)) <= GAP
