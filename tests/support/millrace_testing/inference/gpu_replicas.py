"""Replicas of vLLM on a GPU, with graphs captured, for tests: their flags, what they serve, and what they say."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from millrace_testing.inference import published, tiny, vllm_server

START_S = 900.0
FLAGS = {
    "dtype": "bfloat16",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 1 << 30,
    "gpu_memory_utilization": 0.2,  # others may test on this GPU, too
}
PROMPTS = ([1, 2, 3], [7] * 20, list(range(40, 90)))
TOKENS = 48
ROUNDING = 0.05
"""Of log-probs in bfloat16 by other kernels; twice what was seen of these models."""


def dense(*, is_tied: bool) -> PretrainedConfig:
    return tiny.tiny_config(head_dim=64, tie_word_embeddings=is_tied, max_position_embeddings=2048)


def made(config: PretrainedConfig, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    model.config.architectures = [type(model).__name__]
    return model


def rounded(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy in bfloat16, as it is published."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    return copy.bfloat16().eval().requires_grad_(False)


@contextmanager
def serving(python: str, directory: Path, model: torch.nn.Module, flags: dict[str, Any]) -> Iterator[Any]:
    """Serve a replica of a model, which must end without an error."""
    directory.mkdir()
    published.files(model, directory / "model")
    model.save_pretrained(directory / "model")  # pyright: ignore[reportCallIssue]
    server = vllm_server.Server.start(python, directory / "model", directory, FLAGS | flags, start_s=START_S)
    try:
        yield server
        assert server.stop()[0] == 0, server.log()
    finally:
        server.kill()


async def generated(server: Any) -> list[tuple[list[int], list[float]]]:
    """Return the tokens and log-probs that follow the prompts, always the most likely ones."""
    sampling = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "logprobs": 1}
    found = []
    async with server.client() as client:
        for prompt in PROMPTS:
            code, body, _ = await client.post(
                "/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling}
            )
            assert code == 200, body
            [choice] = body["choices"]
            found.append((choice["token_ids"], [each["logprob"] for each in choice["logprobs"]["content"]]))
    return found
