"""A replica on real vLLM with a tied float32 model: what it computes after each update, and what its spans say."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import verifiers as vf
from datasets import Dataset

from millrace.env_server.adapters.v0 import V0Adapter
from millrace.internal.v1 import policy_service_pb2 as pb
from millrace.internal.v1 import rollout_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest, Sampling
from millrace.rollouts.types import PolicySpan, RolloutStatus
from millrace.rpc.channel import call
from millrace_testing.inference import published, vllm_server
from millrace_testing.inference.vllm_versions import FLAGS, GAP, SEQS, Run, in_flight

pytestmark = [pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore:message_type is deprecated")]


@pytest.fixture(scope="module")
def server(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("tied")
    model = published.model(99)
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")
    yield from vllm_server.serving(vllm_python, directory / "model", directory, **FLAGS)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


@pytest.fixture
def run(server: Any, request: pytest.FixtureRequest) -> Run:
    return Run(server.directory, request.node.name.replace("[", "-").strip("]"))


@pytest.fixture
async def served(client: Any, run: Run) -> Any:
    """Return version 0 serves."""
    client.uid = run.publisher.uid
    status = await client.serve(run.full(0, seed=0))
    assert status.fetched_bytes >= status.full_bytes > 0
    return client


async def test_each_update_is_computed_with_on_every_route(served: Any, run: Run) -> None:
    prompt = [1, 2, 3]
    run.assert_computed_by(0, prompt, await served.generate(prompt))
    for version, mode in ((1, pb.INFLIGHT_MODE_KEEP), (2, pb.INFLIGHT_MODE_RECOMPUTE), (3, pb.INFLIGHT_MODE_KEEP)):
        status = await served.serve(run.delta(version, base=version - 1), mode)
        assert "probe" in status.proof and status.engine == "vllm"
        assert 0 < status.fetched_bytes < status.full_bytes / 5
        assert 0 < status.pause_seconds <= status.update_seconds
        run.assert_computed_by(version, prompt, await served.generate(prompt))
    assert await served.metric("millrace_inference_policy_version") == 3, "ours stand beside vLLM's own metrics"
    assert await served.metric("millrace_inference_policy_update_duration_seconds_count") >= 4
    assert await served.metric("vllm:generation_tokens_total") > 0
    chat = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "logprobs": True}
    code, body, _ = await served.post("/v1/chat/completions", {**chat, "return_token_ids": True, "ignore_eos": True})
    [choice] = body["choices"]
    said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    expected = published.logprobs(run.models[3], body["prompt_token_ids"], choice["token_ids"])
    assert code == 200 and len(choice["token_ids"]) == 8
    np.testing.assert_allclose(said, expected, atol=GAP)
    assert choice["policy_spans"] == [{"lineage": 0, "version": 3, "start": 0, "end": 8}]
    plain = {"model": "policy", "prompt": prompt, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    code, body, _ = await served.post("/v1/completions", {**plain, "ignore_eos": True, "n": 2, "seed": 5})
    assert code == 200 and len(body["choices"]) == 2
    for choice in body["choices"]:
        expected = published.logprobs(run.models[3], prompt, choice["token_ids"])
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], expected, atol=GAP)
        assert choice["policy_spans"] == [{"lineage": 0, "version": 3, "start": 0, "end": 8}]
    streamed = [event async for event in served.stream("/v1/chat/completions", {**chat, "ignore_eos": True})]
    entries = [
        e for event in streamed for c in event["choices"] for e in (c.get("logprobs") or {}).get("content") or []
    ]
    assert len(entries) == 8 and streamed[-1]["choices"][0]["finish_reason"] == "length"
    plain |= {"ignore_eos": True, "n": 2}
    for path, request in (("/v1/completions", plain), ("/inference/v1/generate", raw_body(prompt, n=2, max_tokens=8))):
        events = [event async for event in served.stream(path, request)]
        for index in range(2):
            tokens, spans = joined(events, index)
            assert len(tokens) == 8 and spans == [{"lineage": 0, "version": 3, "start": 0, "end": 8}]


async def test_an_environment_that_has_a_text_completed_gets_exact_tokens(server: Any, served: Any, run: Run) -> None:
    tasks = Dataset.from_list([{"prompt": "abc", "answer": ""}])
    module = ModuleType("completing")
    module.load_environment = lambda: vf.SingleTurnEnv(  # type: ignore[attr-defined]
        dataset=tasks, eval_dataset=tasks, message_type="completion", rubric=vf.Rubric([lambda **_: 1.0])
    )
    adapter = V0Adapter.load(EnvSpec(id="completing"), module, {})
    await adapter.start()
    asked = [
        PlayGroupRequest(
            run_uid="u", purpose=rollout_pb2.PURPOSE_TRAIN, ordinal=0, members=[member], group_size=3,
            env=EnvSpec(id="completing"),
            base_url=f"{server.http}/v1", task_index=0, model="policy",
            sampling=Sampling(temperature=1.0, max_tokens=max_tokens, extra_body_json='{"ignore_eos": true}'),
        )
        for member, max_tokens in enumerate((8, 8, None))
    ]  # fmt: skip
    played = await asyncio.gather(*(adapter.play(each, tokenizer_dir="") for each in asked))
    await adapter.close()
    for [outcome], request in zip(played, asked, strict=True):
        assert outcome.status is RolloutStatus.OK, outcome
        [sample] = outcome.samples
        count, tokens = sample.loss_mask.tolist().index(True), sample.token_ids.tolist()
        assert len(tokens) == (FLAGS["max_model_len"] if not request.sampling.max_tokens else count + 8)
        expected = published.logprobs(run.models[0], tokens[:count], tokens[count:])
        np.testing.assert_allclose(sample.inference_logprobs[count:], expected, atol=GAP)
        assert sample.policy_spans == (PolicySpan(lineage=0, version=0, start=count, end=len(tokens)),)


async def test_a_stream_says_at_its_end_which_policy_made_which_token(served: Any, run: Run) -> None:
    asked = {"model": "policy", "max_tokens": 200, "logprobs": True, "return_token_ids": True, "ignore_eos": True}

    async def read(prompt: list[int]) -> list[dict[str, Any]]:
        body = {**asked, "messages": [{"role": "user", "content": "hi" * prompt[0]}], "seed": prompt[0]}
        return [event async for event in served.stream("/v1/chat/completions", body)]

    async with in_flight(served, [[1 + index] for index in range(2 * SEQS)], read) as tasks:
        await served.serve(run.delta(1, base=0))
    streams = await asyncio.gather(*tasks)
    for index, events in enumerate(streams):
        tokens, spans = joined(events, 0)
        cut = spans[0]["end"] if index < SEQS else 0
        both = [{"lineage": 0, "version": 0, "start": 0, "end": cut}] if cut else []
        assert spans == [*both, {"lineage": 0, "version": 1, "start": cut, "end": 200}] and len(tokens) == 200
        content = [c["logprobs"]["content"] for event in events for c in event["choices"] if c.get("logprobs")]
        said = [entry["logprob"] for entries in content for entry in entries]
        prompt = next(event["prompt_token_ids"] for event in events if event.get("prompt_token_ids"))
        old = published.logprobs(run.models[0], prompt, tokens)[:cut]
        begun = [run.models[0], run.models[1], prompt, tokens, cut]
        new = published.kept_logprobs(*begun) if cut else published.logprobs(run.models[1], prompt, tokens)
        np.testing.assert_allclose(said, [*old, *new], atol=GAP)


def raw_body(prompt: list[int], **sampling: Any) -> dict[str, Any]:
    return {"token_ids": prompt, "sampling_params": {**sampling, "ignore_eos": True}}


def joined(events: list[dict[str, Any]], index: int) -> tuple[list[int], list[dict[str, int]]]:
    """Return the token ids of a streamed choice, and its spans, which only its last chunk has."""
    chunks = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    assert [chunk for chunk in chunks if chunk.get("policy_spans")] == chunks[-1:], "not where it ends"
    return [token for chunk in chunks for token in chunk.get("token_ids") or []], chunks[-1]["policy_spans"]


@pytest.mark.parametrize("mode", [pb.INFLIGHT_MODE_KEEP, pb.INFLIGHT_MODE_RECOMPUTE])
async def test_scores_of_a_prompt_never_come_from_the_cache_of_another_version(
    served: Any, run: Run, mode: "pb.InflightMode"
) -> None:
    prompt = [(11 * index) % 250 for index in range(100)]
    assert (await served.generate([*prompt, 1])).num_cached == 0
    await assert_scored_by(run, 0, served, prompt)
    assert (await served.generate([*prompt, 2])).num_cached == 96, "the cache works, so that it can be wrong"
    await served.pause()
    waiting = [asyncio.create_task(assert_scored_by(run, 1, served, prompt, last)) for last in range(2)]
    await served.open_requests(len(waiting))
    await served.serve(run.delta(1, base=0), mode)
    await served.resume()
    await asyncio.gather(*waiting)
    await assert_scored_by(run, 1, served, prompt)
    after = await served.generate([*prompt, 3])
    run.assert_computed_by(1, [*prompt, 3], after)
    assert after.num_cached == 96, "what a scored prompt left in the cache is of the new version"


async def assert_scored_by(run: Run, version: int, client: Any, prompt: list[int], last: int = 9) -> None:
    """A request for prompt log-probs gets those of that version, also if it asks for cached ones."""
    tokens = [*prompt, last]
    for options in ({}, {"skip_reading_prefix_cache": False}):
        body = raw_body(tokens, max_tokens=1, prompt_logprobs=0, **options)
        code, answer, _ = await client.post("/inference/v1/generate", body)
        assert code == 200, answer
        rows = answer["prompt_logprobs"]
        said = [row[str(token)]["logprob"] for row, token in zip(rows[1:], tokens[1:], strict=True)]
        expected = published.logprobs(run.models[version], tokens[:1], tokens[1:])
        np.testing.assert_allclose(said, expected, atol=GAP)


async def test_recompute_leaves_nothing_of_the_old_version(served: Any, run: Run) -> None:
    prompts = [[10 + index, 20, 30] for index in range(2 * SEQS)]
    async with in_flight(served, prompts, lambda prompt: served.generate(prompt, 200)) as tasks:
        await served.serve(run.delta(1, base=0), pb.INFLIGHT_MODE_RECOMPUTE)
        left = (await served.status()).num_requests
        assert left >= SEQS, "the probe went before all that waited, and before what had run"
    found = await asyncio.gather(*tasks)
    for prompt, one in zip(prompts, found, strict=True):
        versions = np.array(one.version_of())
        for version, model in run.models.items():
            gap = np.abs(published.logprobs(model, prompt, one.token_ids) - one.logprobs)
            assert gap[versions == version].max(initial=0) <= GAP
    assert sum(len(one.spans) == 2 for one in found) == SEQS, "those that ran have tokens of both versions"


async def test_keep_goes_on_with_the_kv_cache_and_begins_the_others_anew(served: Any, run: Run) -> None:
    shared = [(7 * index) % 250 for index in range(100)]
    assert (await served.generate([*shared, 1])).num_cached == 0
    assert (await served.generate([*shared, 2])).num_cached == 96, "the prefix cache works, so that it can be wrong"
    prompts = [[*shared, 10 + index] for index in range(2 * SEQS)]
    async with in_flight(served, prompts, lambda prompt: served.generate(prompt, 140)) as tasks:
        await served.serve(run.delta(1, base=0), pb.INFLIGHT_MODE_KEEP)
    found = await asyncio.gather(*tasks)
    kept = [(prompt, one) for prompt, one in zip(prompts, found, strict=True) if len(one.spans) == 2]
    assert len(kept) == SEQS
    for prompt, one in kept:
        cut = one.version_of().index(1)
        old = published.logprobs(run.models[0], prompt, one.token_ids)[:cut]
        new = published.kept_logprobs(run.models[0], run.models[1], prompt, one.token_ids, cut)
        np.testing.assert_allclose(one.logprobs, [*old, *new], atol=GAP)
    for prompt, one in zip(prompts, found, strict=True):
        if len(one.spans) == 1:
            run.assert_computed_by(1, prompt, one)
    for last in (3, 4):
        after = await served.generate([*shared, last])
        run.assert_computed_by(1, [*shared, last], after)
        assert after.num_cached == 96


async def test_a_replica_that_slept_has_no_kv_cache_and_computes_it_anew(served: Any, run: Run) -> None:
    """A CPU keeps the memory; what vLLM makes of requests, caches and scheduler is the same as on a GPU."""
    preemptions = "vllm:num_preemptions_total"
    shared = [(7 * index) % 250 for index in range(100)]
    prompts = [[*shared, 10 + index] for index in range(2 * SEQS)]
    async with in_flight(served, prompts, lambda prompt: served.generate(prompt, 140)) as tasks:
        entry, before = run.delta(1, base=0), await served.metric(preemptions)
        assert (await served.sleep()).is_asleep
        request = pb.UpdatePolicyRequest(run_uid=served.uid, policy=entry, epoch=1, wait_seconds=0.1)
        refused = (await call(served.stub.UpdatePolicy, request, timeout_s=30)).status
        assert refused.is_asleep and refused.version == 0 and refused.num_requests == len(prompts)
        code, body, _ = await served.post("/reload_weights", {})
        assert code >= 400, body
        assert not (await served.wake()).is_asleep
    found = await asyncio.gather(*tasks)
    for prompt, one in zip(prompts, found, strict=True):
        run.assert_computed_by(0, prompt, one)
    assert await served.metric(preemptions) >= before + SEQS, "those that ran began again behind what they had"
    await served.sleep()
    await served.wake()
    assert (await served.generate([*shared, 1])).num_cached == 0
    await served.serve(entry)
    run.assert_computed_by(1, [1, 2, 3], await served.generate([1, 2, 3]))


async def test_an_update_of_a_full_replica_is_served_when_a_slot_is_free(served: Any, run: Run) -> None:
    """As many streams as `max_num_seqs` run, and others wait: the probe gets the first slot, and no stream dies."""

    async def read(prompt: list[int]) -> list[dict[str, Any]]:
        return [event async for event in served.stream("/inference/v1/generate", raw_body(prompt, max_tokens=200))]

    prompts = [[10 + index, 20, 30] for index in range(2 * SEQS)]
    async with in_flight(served, prompts, read) as tasks:
        await served.serve(run.delta(1, base=0))
    versions = []
    for events in await asyncio.gather(*tasks):
        tokens, spans = joined(events, 0)
        assert len(tokens) == 200
        versions.append([span["version"] for span in spans])
    assert versions == SEQS * [[0, 1]] + SEQS * [[1]]
