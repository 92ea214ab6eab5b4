"""Truncated distributions: what the embedded engine says of its tokens over HTTP is what the trainer computes."""

from typing import Any

import aiohttp
import numpy as np
import pytest
import torch

from millrace.env_server.adapters.client_v0 import request_body
from millrace.env_server.adapters.v0 import sampling_args
from millrace.internal.v1.play_pb2 import Sampling
from millrace.rollouts.requests import truncation_of
from millrace.rollouts.types import TrainSample
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import build_micro_batch
from millrace.trainer.learning.forward import token_logprobs
from millrace.trainer.learning.metrics import Score, ScoreResult
from millrace_testing.lanes import by_default

TOKENS = 60
CPU = torch.device("cpu")
MESSAGES = [{"role": "user", "content": "turn me around"}]
SAMPLINGS = {
    "full": Sampling(temperature=1.0),
    "top_p": Sampling(temperature=0.8, top_p=0.7),
    "top_k": Sampling(temperature=1.0, top_k=5),
    "min_p": Sampling(temperature=1.3, min_p=0.1),
    "all": Sampling(temperature=1.2, top_p=0.9, top_k=20, min_p=0.02),
}


def sample_of(sampling: Sampling, prompt: list[int], tokens: list[int], said: list[float]) -> TrainSample:
    mask = np.array([0] * len(prompt) + [1] * len(tokens), np.uint8)
    return TrainSample(
        token_ids=np.array([*prompt, *tokens], np.int32),
        loss_mask=mask,
        inference_logprobs=np.array([0.0] * len(prompt) + said, np.float32),
        advantages=np.zeros(len(mask), np.float32),
        ordinal=0,
        member=0,
        attempt=0,
        env="e",
        reward=0.0,
        temperature=sampling.temperature,
        min_version=0,
        max_version=0,
        lineage=0,
        truncation=truncation_of(sampling),
    )


def scored(model: torch.nn.Module, samples: list[TrainSample]) -> ScoreResult:
    micro_batch = build_micro_batch(samples, seq_len=256, device=CPU)
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(model, micro_batch)
    score = Score()
    score.add(micro_batch, logprobs_BT, version=0)
    return score.reduce(Gang())


async def played(served: Any, sampling: Sampling, seeds: range) -> list[TrainSample]:
    body = request_body(MESSAGES, "policy", sampling_args(sampling), None)
    body |= {"ignore_eos": True, "max_completion_tokens": TOKENS}
    samples: list[TrainSample] = []
    async with aiohttp.ClientSession(served.base_url, timeout=aiohttp.ClientTimeout(60)) as http:
        for seed in seeds:
            async with http.post("/v1/chat/completions", json=body | {"seed": seed}) as reply:
                answer = await reply.json()
                assert reply.status == 200, answer
            [choice] = answer["choices"]
            said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            samples.append(sample_of(sampling, answer["prompt_token_ids"], choice["token_ids"], said))
    return samples


@pytest.mark.parametrize("name", by_default(SAMPLINGS, {"full", "all"}))
async def test_log_probs_are_the_trainers(served: Any, name: str) -> None:
    samples = await played(served, SAMPLINGS[name], range(8))
    result = scored(served.model, samples)
    assert result.mismatch_kl <= 1e-6
    assert (result.num_tokens, result.num_outside_tokens) == (8 * TOKENS, 0)  # seeds: the same tokens each time
    assert len({int(token) for sample in samples for token in sample.token_ids[-TOKENS:]}) > 8


async def test_the_full_distribution_would_be_another_one(served: Any) -> None:
    [sample] = await played(served, SAMPLINGS["top_k"], range(1))
    as_full = sample_of(
        Sampling(temperature=1.0),
        sample.token_ids[:-TOKENS].tolist(),
        sample.token_ids[-TOKENS:].tolist(),
        sample.inference_logprobs[-TOKENS:].tolist(),
    )
    assert scored(served.model, [as_full]).mismatch_kl > 0.05
