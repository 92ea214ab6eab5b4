"""What is sampled on vLLM is what the request says, whatever the model's generation config says, and truncated
distributions are the trainer's."""

from collections.abc import AsyncIterator, Iterator
from typing import Any

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
from millrace.trainer.learning.metrics import Score
from millrace_testing.inference import published, vllm_server

TOKENS = 40
FLAGS = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 4, "block_size": 32}
OPINIONS = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5, "max_new_tokens": 4}
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return published.model(7)


@pytest.fixture(scope="module")
def server(vllm_python: str, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    directory = tmp_path_factory.mktemp("sampling")
    published.files(model, directory / "model")
    model.generation_config.update(**OPINIONS, do_sample=True)
    model.save_pretrained(directory / "model")
    assert "repetition_penalty" in (directory / "model" / "generation_config.json").read_text()
    yield from vllm_server.serving(vllm_python, directory / "model", directory, **FLAGS)


@pytest.fixture
async def client(server: Any) -> AsyncIterator[Any]:
    async with server.client() as client:
        yield client


def scored(model: torch.nn.Module, sampling: Sampling, prompt: list[int], tokens: list[int], said: list[float]) -> Any:
    """Return how far the trainer agrees with the engine."""
    mask = np.array([0] * len(prompt) + [1] * len(tokens), np.uint8)
    sample = TrainSample(
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
    micro_batch = build_micro_batch([sample], seq_len=256, device=torch.device("cpu"))
    with torch.no_grad():
        logprobs_BT, _ = token_logprobs(model, micro_batch)
    score = Score()
    score.add(micro_batch, logprobs_BT, version=0)
    return score.reduce(Gang())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_p=0.7),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.3, min_p=0.1),
        Sampling(temperature=1.2, top_p=0.9, top_k=20, min_p=0.02),
    ],
    ids=["full", "top_p", "top_k", "min_p", "all"],
)
async def test_log_probs_are_the_trainers_whatever_the_generation_config_says(
    client: Any, model: torch.nn.Module, sampling: Sampling
) -> None:
    messages = [{"role": "user", "content": "turn me around"}]
    args = sampling_args(sampling)
    body = request_body(messages, "policy", args, None) | {"ignore_eos": True}
    total = 0
    for seed in range(4):
        body["max_completion_tokens"] = TOKENS
        code, answer, _ = await client.post("/v1/chat/completions", body | {"seed": seed})
        assert code == 200, answer
        [choice] = answer["choices"]
        said = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        result = scored(model, sampling, answer["prompt_token_ids"], choice["token_ids"], said)
        assert result.mismatch_kl <= 1e-6
        assert result.num_tokens + result.num_outside_tokens == TOKENS and result.num_outside_tokens <= 1
        total += len(set(choice["token_ids"]))
    assert total > 8, "a distribution of which one token is left would prove nothing"


async def test_a_completion_without_a_bound_is_not_cut_by_the_generation_config(client: Any) -> None:
    body = request_body([{"role": "user", "content": "hi"}], "policy", sampling_args(Sampling(temperature=1.0)), None)
    code, answer, _ = await client.post("/v1/chat/completions", body | {"ignore_eos": True})
    assert code == 200 and len(answer["choices"][0]["token_ids"]) > OPINIONS["max_new_tokens"]
