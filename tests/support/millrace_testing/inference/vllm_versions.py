"""Versions of a tied float32 model for a replica on real vLLM, and requests that are in flight when one comes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import torch

from millrace.storage.local import LocalStore
from millrace_testing.inference import published

GAP = 1e-5  # of float32 log-probs between vLLM and a forward pass of Hugging Face's model
SEQS = 4
ATTEMPTS = 20  # at a moment in which requests run, on a machine that others use
FLAGS = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": SEQS,
    "block_size": 32,
    "enable_prompt_tokens_details": True,
}


class Run:
    """Versions of one run: each is the model before it with some weights changed, from version 0 on."""

    def __init__(self, directory: Path, uid: str) -> None:
        self.publisher = published.Publisher(LocalStore(directory / "store"), directory, uid)
        self.models: dict[int, torch.nn.Module] = {}

    def full(self, version: int, seed: int, **options: Any) -> Any:
        self.models[version] = published.model(seed)
        return self.publisher.full(self.models[version], version, **options)

    def delta(self, version: int, *, base: int, **options: Any) -> Any:
        self.models[version] = published.nudged(self.models[base], version)
        return self.publisher.delta(self.models[version], version, base=base, **options)

    def gaps(self, prompt: list[int], found: Any) -> dict[int, float]:
        """Return the greatest difference to the log-probs of every version."""
        return {
            version: float(np.abs(published.logprobs(model, prompt, found.token_ids) - found.logprobs).max())
            for version, model in self.models.items()
        }

    def assert_computed_by(self, version: int, prompt: list[int], found: Any) -> None:
        """Assert that each token came from this version's weights and KV cache; no other version would give the
        same.
        """
        assert set(found.version_of()) == {version}
        gaps = self.gaps(prompt, found)
        assert gaps.pop(version) <= GAP
        assert all(gap > 100 * GAP for gap in gaps.values()), "versions that compute the same prove nothing"


@contextlib.asynccontextmanager
async def in_flight(
    client: Any, prompts: list[list[int]], ask: Callable[[list[int]], Coroutine[Any, Any, Any]]
) -> AsyncIterator[list[Any]]:
    """Pause the engine in the block while half of the requests have tokens and the other half have none."""
    for _ in range(ATTEMPTS):
        tasks = await running(client, prompts[:SEQS], ask)
        if (await client.status()).num_requests == SEQS:
            break
        await client.resume()  # this machine stood still between two calls, and vLLM has come to the end of some
        await asyncio.gather(*tasks)
    else:
        raise AssertionError("they are too short for this machine")
    try:
        tasks += [asyncio.create_task(ask(prompt)) for prompt in prompts[SEQS:]]
        await client.open_requests(len(prompts))
        yield tasks
    finally:
        await client.resume()  # the next test uses the same replica


async def running(
    client: Any, prompts: list[list[int]], ask: Callable[[list[int]], Coroutine[Any, Any, Any]]
) -> list[asyncio.Task[Any]]:
    """Start the requests, and pause the engine once each has at least one token; return their tasks."""
    first_tokens = "vllm:time_to_first_token_seconds_count"
    before = await client.metric(first_tokens)
    await client.pause()
    tasks = [asyncio.create_task(ask(prompt)) for prompt in prompts]
    await client.open_requests(len(prompts))
    async with asyncio.timeout(60):
        while await client.metric(first_tokens) < before + len(prompts):
            await client.resume()  # for some steps
            await client.pause()
    return tasks
