"""Models whose positions follow the longest sequence: the embedded engine's log-probs are the trainer's, as it batches
rows of all lengths, and on both sides of the length where the factors change."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millrace.errors import InvalidStateError
from millrace.inference.embedded.engine import EmbeddedEngine
from millrace.inference.engine import GenerateRequest, Generation, PolicyIdentity, SamplingParams
from millrace.models.context_length import fix_context_length
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.metrics import Score, ScoreResult
from millrace.trainer.learning.plan import Packing, in_order, plan_micro_batches
from millrace.trainer.model.pretrained import probe
from millrace_testing import scaled_positions
from millrace_testing.inference import tiny
from millrace_testing.lanes import pairs_by_default
from millrace_testing.scaled_positions import BORDER

CPU = torch.device("cpu")
LONG = 64
PACKED = Packing(per_token=1.0, per_square=1.0, causal_cost=1.0, masked_cost=1.0, is_always=True)
V0 = PolicyIdentity(run_uid="r", lineage=0, version=0)
KINDS = ("longrope", "dynamic")


def trained(kind: str, length: int) -> Any:
    """Return the model as the trainer of a run with this context has it."""
    model = scaled_positions.model_of(kind).requires_grad_(False)
    fix_context_length(model, length)
    return model


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of each kind, with its tokenizer."""
    directory = tmp_path_factory.mktemp("positions")
    for kind in KINDS:
        scaled_positions.model_of(kind).save_pretrained(directory / kind)
        tiny.tiny_tokenizer().save_pretrained(directory / kind)
    return directory


@pytest.fixture
async def engines() -> AsyncIterator[Any]:
    opened: list[EmbeddedEngine] = []

    def new(**settings: Any) -> EmbeddedEngine:
        opened.append(EmbeddedEngine(max_num_seqs=5, **settings))
        return opened[-1]

    yield new
    for engine in opened:
        await engine.close()


async def played(engine: EmbeddedEngine, longest: int) -> list[TrainSample]:
    """Return completions of prompts of all lengths, several at once; the longest fill the context."""
    rng = random.Random(0)

    async def play(number: int) -> TrainSample:
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, longest - 2)))
        sampling = SamplingParams(max_tokens=rng.choice([4, 16, longest]), ignore_eos=True)
        await asyncio.sleep(0.002 * (number % 4))  # they join while others decode
        request = GenerateRequest(request_id=str(number), prompt_token_ids=prompt, sampling=sampling)
        return sample_of(prompt, await engine.generate(request))

    return await asyncio.gather(*(play(number) for number in range(16)))


def sample_of(prompt: tuple[int, ...], given: Generation) -> TrainSample:
    mask = np.array([0] * len(prompt) + [1] * len(given.token_ids), np.uint8)
    return TrainSample(
        token_ids=np.array([*prompt, *given.token_ids], np.int32),
        loss_mask=mask,
        inference_logprobs=np.concatenate([np.zeros(len(prompt), np.float32), given.logprobs]),
        advantages=np.zeros(len(mask), np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def scored(model: torch.nn.Module, samples: list[TrainSample], packing: Packing | None) -> ScoreResult:
    score, lengths = Score(), [sample.num_tokens for sample in samples]
    for rows in plan_micro_batches(lengths, max_tokens=256, packing=packing)[0]:
        taken = [samples[index] for row in rows for index in row]
        micro_batch = build_micro_batch(taken, rows=in_order(rows), seq_len=LONG, device=CPU)
        with torch.no_grad():
            score.add(micro_batch, token_logprobs(model, micro_batch)[0], version=0)
    return score.reduce(Gang())


@pytest.mark.parametrize(("kind", "length"), pairs_by_default(KINDS, [BORDER, LONG]))
async def test_log_probs_are_the_trainers_on_both_sides(
    kind: str, length: int, directories: Path, engines: Any
) -> None:
    model, engine = trained(kind, length), engines(max_model_len=length)
    staged = tiny.staged_of(scaled_positions.model_of(kind), probe(model, vocabulary=256, device=CPU))
    await engine.load(directories / kind, staged, identity=V0)
    assert (await engine.prove(staged)).proof == "readback+probe"
    samples = await played(engine, length)
    assert max(each.num_tokens for each in samples) == length and min(each.num_tokens for each in samples) < BORDER
    for packing in (None, PACKED):
        result = scored(model, samples, packing)
        assert result.mismatch_kl <= 1e-9 and result.num_tokens > 100, packing
    other = trained(kind, LONG if length == BORDER else BORDER)
    assert scored(other, samples, None).mismatch_kl > 1e-3, "the factors of the other side are others"


@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_takes_the_context_of_the_policy(kind: str, directories: Path, engines: Any) -> None:
    """It was started for longer sequences, as the replicas of a stack are that runs already."""
    proof, engine = probe(trained(kind, BORDER - 4), vocabulary=256, device=CPU), engines(max_model_len=LONG)
    await engine.load(directories / kind, staged := tiny.staged_of(scaled_positions.model_of(kind), proof), identity=V0)
    await engine.prove(staged)
    assert engine.status().max_model_len == BORDER


@pytest.mark.parametrize(("kind", "needed"), [("longrope", "at least 25 tokens"), ("dynamic", "64 to 64 tokens")])
async def test_an_engine_of_too_short_a_context_refuses_the_policy(
    kind: str, needed: str, directories: Path, engines: Any
) -> None:
    proof, engine = probe(trained(kind, LONG), vocabulary=256, device=CPU), engines(max_model_len=BORDER)
    with pytest.raises(InvalidStateError, match=f"{needed}, and this engine serves 24") as caught:
        await engine.load(directories / kind, tiny.staged_of(scaled_positions.model_of(kind), proof), identity=V0)
    assert caught.value.reason == "CONTEXT_DIFFERS" and "inference.model.max_model_len" in caught.value.remedy


@pytest.mark.parametrize(("kind", "context"), [("longrope", BORDER), ("dynamic", 8 * BORDER)])
async def test_a_fixed_model_has_the_context_that_vllm_would_give_it(
    kind: str, context: int, directories: Path, engines: Any
) -> None:
    engine = engines()
    await engine.load(directories / kind, None, identity=V0)
    assert engine.status().max_model_len == context
