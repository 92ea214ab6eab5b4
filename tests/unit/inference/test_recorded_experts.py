"""The experts that the embedded engine records: those of a plain forward pass, for prompts and completions."""

import asyncio
import copy
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from millrace.errors import InvalidSpecError
from millrace.inference.embedded import scheduler as scheduler_module
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.embedded.rows import Running
from millrace.inference.embedded.scheduler import Scheduler
from millrace.inference.engine import GenerateRequest, Generation, InflightMode, PolicyIdentity, SamplingParams
from millrace.inference.http.responses import Completed, generate_body, text_body
from millrace.inference.http.schema import CompletionBody, GenerateBody
from millrace.models.routing import Routers
from millrace.rollouts.routed_experts import from_answer
from millrace_testing import polling
from millrace_testing.inference.tiny import tiny_tokenizer
from millrace_testing.trainer.families import make_named

V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
V1 = PolicyIdentity(run_uid="r", lineage=0, version=1)


@pytest.fixture(scope="module", params=["qwen3_moe", "deepseek_v3, experts"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_named(request.param, tmp_path_factory.mktemp("mixture"), max_position_embeddings=128)


@pytest.fixture
async def engine(directory: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(max_num_seqs=4, returns_experts=True)
    await engine.load(directory, None, identity=V0)
    yield engine
    await engine.close()


async def test_the_engine_says_what_its_experts_look_like(engine: EmbeddedEngine, directory: Path) -> None:
    form = engine.status().routed
    assert form is not None
    generation = await engine.generate(_request(1))
    assert generation.routed_experts is not None and form.problem_of(generation.routed_experts) == ""
    assert form.problem_of(generation.routed_experts + form.num_experts).startswith("expert ")
    silent = EmbeddedEngine(max_num_seqs=1)
    try:
        await silent.load(directory, None, identity=V0)
        assert silent.status().routed is None
    finally:
        await silent.close()


def _request(number: int, *, prompt: list[int] | None = None, max_tokens: int | None = None) -> GenerateRequest:
    random = np.random.default_rng(number)
    tokens = prompt or random.integers(2, 60, random.integers(1, 30)).tolist()
    length = max_tokens or int(random.integers(1, 20))
    sampling = SamplingParams(max_tokens=length, ignore_eos=True, seed=number)
    return GenerateRequest(request_id=str(number), prompt_token_ids=tuple(tokens), sampling=sampling)


def _expected(directory: Path, tokens: list[int]) -> np.ndarray:
    """Return the experts of a plain forward pass over the tokens but the last."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto").eval()
    routers = Routers.of(model)
    assert routers is not None
    with torch.inference_mode(), routers.recording() as recorded:
        model(input_ids=torch.tensor([tokens[:-1]]), use_cache=False)
    return recorded()


def _sorted(experts: np.ndarray) -> np.ndarray:
    return np.sort(experts.astype(np.int64), axis=-1)


def _share_of_equal(directory: Path, sent: GenerateRequest, got: Generation) -> float:
    tokens = [*sent.prompt_token_ids, *got.token_ids.tolist()]
    experts, expected = got.routed_experts, _expected(directory, tokens)
    assert experts is not None and experts.dtype == np.uint8 and experts.shape == expected.shape
    return float((_sorted(experts) == _sorted(expected)).all(axis=-1).mean())


async def test_every_token_but_the_last_has_the_experts_of_a_forward_pass(
    engine: EmbeddedEngine, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "PREFILL_TOKENS", 50)  # several passes per admission
    shared = list(range(3, 20))  # a group's prompt is computed once
    requests = [_request(n) for n in range(12)] + [_request(n, prompt=shared, max_tokens=9) for n in range(12, 18)]
    results = await asyncio.gather(*(engine.generate(each) for each in requests))  # through four rows: they move
    shares = [_share_of_equal(directory, sent, got) for sent, got in zip(requests, results, strict=True)]
    # Passes of another shape round otherwise, and may turn a choice that is nearly even, in bfloat16 more often.
    assert np.mean(shares) > 0.97 and np.median(shares) == 1.0


def test_what_was_recorded_stays_when_caches_are_computed_again(directory: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    request, ended = _request(5, prompt=list(range(3, 12)), max_tokens=20), list[Generation]()

    def play(num_before: int) -> Generation:
        """Generate with other weights, and caches computed again, from so many tokens on."""
        scheduler = Scheduler(
            model,
            identity=V0,
            eos_token_ids=(),
            decoder=None,
            max_num_seqs=2,
            kv_tokens=1 << 20,
            routers=Routers.of(model),
        )
        failures = list[Exception]()
        scheduler.submit(Running(request=request, seed=5, limit=29, deliver=ended.append, refuse=failures.append))
        kept = copy.deepcopy(model.state_dict())
        with torch.inference_mode():
            for number in range(20):
                if number == num_before:
                    for parameter in model.parameters():
                        parameter.neg_()
                    scheduler.set_identity(V1, InflightMode.RECOMPUTE)
                scheduler.step()
        model.load_state_dict(kept)
        assert not failures
        return ended.pop()

    model.requires_grad_(False)
    alone, updated = play(20), play(6)
    assert [(span.version, span.start, span.end) for span in updated.policy_spans] == [(0, 0, 6), (1, 6, 20)]
    assert alone.routed_experts is not None and updated.routed_experts is not None
    assert len(alone.routed_experts) == len(updated.routed_experts) == 9 + 20 - 1
    known = 9 + 6 - 1
    assert np.array_equal(updated.routed_experts[:known], alone.routed_experts[:known])
    assert not np.array_equal(updated.routed_experts[known:], alone.routed_experts[known:])


async def test_nothing_is_recorded_unless_it_is_asked_for_or_where_there_are_no_experts(
    directory: Path, tmp_path: Path
) -> None:
    dense = make_named("qwen3", tmp_path, max_position_embeddings=128)
    for place, returns in ((directory, False), (dense, True)):
        engine = EmbeddedEngine(returns_experts=returns)
        try:
            await engine.load(place, None, identity=V0)
            assert (await engine.generate(_request(1))).routed_experts is None
        finally:
            await engine.close()


async def test_an_aborted_request_has_none(engine: EmbeddedEngine) -> None:
    await engine.pause("test")
    task = asyncio.create_task(engine.generate(_request(1)))
    await polling.until(lambda: engine.status().num_waiting > 0, timeout_s=20.0, poll_s=0.001)
    await engine.abort("1")
    assert (await task).routed_experts is None


async def test_answers_of_every_route_have_them_from_where_the_request_says(engine: EmbeddedEngine) -> None:
    sent = _request(1, prompt=[3, 4, 5, 6], max_tokens=4)
    got = await engine.generate(sent)
    item = Completed(prompt_ids=sent.prompt_token_ids, generation=got)
    sampling = {"max_tokens": 4, "routed_experts_prompt_start": 3}
    body = GenerateBody.model_validate({"token_ids": [3, 4, 5, 6], "sampling_params": sampling})
    [choice] = generate_body("id", body, [item])["choices"]
    call = from_answer(choice, num_tokens=8, start=3)
    assert call is not None and got.routed_experts is not None
    assert np.array_equal(call.experts, got.routed_experts[3:])
    text = CompletionBody.model_validate({"prompt": [3, 4, 5, 6]})
    [choice] = text_body("id", "m", text, tiny_tokenizer(), [item])["choices"]
    call = from_answer(choice, num_tokens=8)
    assert call is not None and np.array_equal(call.experts, got.routed_experts)
    stream = CompletionBody.model_validate({"prompt": [3, 4, 5, 6], "stream": True})
    [choice] = text_body("id", "m", stream, tiny_tokenizer(), [item])["choices"]
    assert "routed_experts" not in choice
    beyond = GenerateBody.model_validate(
        {"token_ids": [3, 4, 5, 6], "sampling_params": {**sampling, "routed_experts_prompt_start": 5}}
    )
    with pytest.raises(InvalidSpecError, match="the prompt has 4 tokens"):
        generate_body("id", beyond, [item])
