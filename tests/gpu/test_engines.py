"""vLLM on a GPU, with its graphs captured: what it generates after deltas is what a fresh load generates."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, PretrainedConfig, Qwen3MoeConfig

from millrace.storage.local import LocalStore
from millrace_testing.inference import published
from millrace_testing.inference.gpu_replicas import ROUNDING, dense, generated, made, rounded, serving

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]

SHARED = {"num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 272, "eos_token_id": 258, "pad_token_id": 256}


def moe() -> PretrainedConfig:
    return Qwen3MoeConfig(
        **SHARED,
        hidden_size=64,
        head_dim=64,
        num_key_value_heads=2,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        initializer_range=0.08,
    )


def mla() -> PretrainedConfig:
    return DeepseekV3Config(
        **SHARED,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=SHARED["num_hidden_layers"],  # vLLM and transformers name the experts differently
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        initializer_range=0.08,
    )


CASES: dict[str, tuple[Callable[[], PretrainedConfig], dict[str, Any], int]] = {
    "dense": (lambda: dense(is_tied=False), {}, 1),
    "tied head": (lambda: dense(is_tied=True), {}, 1),
    "two parts of layers": (lambda: dense(is_tied=False), {"tensor_parallel_size": 2}, 2),
    "two stages": (lambda: dense(is_tied=False), {"pipeline_parallel_size": 2}, 2),
    "experts": (moe, {}, 1),
    "MLA": (mla, {}, 1),
    "fp8 weights": (lambda: dense(is_tied=False), {"quantization": "fp8"}, 1),
    "fp8 cache": (lambda: dense(is_tied=False), {"kv_cache_dtype": "fp8"}, 1),
}
"""Model, flags, GPUs."""


@pytest.mark.parametrize("case", CASES)
async def test_deltas_on_captured_graphs_are_a_fresh_load(
    gpu: torch.device, cuda_vllm: str, tmp_path: Path, case: str
) -> None:
    """8 and 9 of the list: after two deltas a server with graphs says what it says after a whole load of their sum.

    The same server, because another one compiles graphs of its own, which round otherwise: that alone changes what a
    model of experts finds most likely (one that is computed twice on a CPU, by sdpa and by hand, within 26 tokens).
    Of a server that has loaded nothing else the first tokens' log-probs are compared, which is enough for a layer.
    """
    make, flags, gpus = CASES[case]
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    masters = [made(make(), 0)]
    masters += [published.nudged(masters[0], 1)]
    masters += [published.nudged(masters[1], 2)]
    versions = [rounded(each) for each in masters]
    with serving(cuda_vllm, tmp_path / "updated", made(make(), 99).bfloat16(), flags) as server:
        store = published.Publisher(LocalStore(server.directory / "store"), tmp_path, "run1")
        async with server.client() as client:
            await client.serve(store.full(versions[0], 0))
            first = await generated(server)
            for version in (1, 2):
                await client.serve(store.delta(versions[version], version, base=version - 1))
            updated = await generated(server)
            await client.serve(store.full(versions[2], 3))
            loaded = await generated(server)
    assert [tokens for tokens, _ in updated] == [tokens for tokens, _ in loaded]
    for (_, of_updated), (_, of_loaded) in zip(updated, loaded, strict=True):
        assert of_updated == pytest.approx(of_loaded, abs=1e-3)
    with serving(cuda_vllm, tmp_path / "fresh", versions[2], flags) as server:
        fresh = await generated(server)
    begin = [logprobs[0] for _, logprobs in updated]
    assert begin == pytest.approx([logprobs[0] for _, logprobs in fresh], abs=ROUNDING)
    assert begin != pytest.approx([logprobs[0] for _, logprobs in first], abs=ROUNDING), "versions that say the same"


async def test_spans_under_async_scheduling_with_256_in_flight(
    gpu: torch.device, cuda_vllm: str, tmp_path: Path
) -> None:
    """11 of the list: versions change while all generate; each token says its own, in order, without a gap."""
    model = made(dense(is_tied=False), 0)
    flags = {"max_num_seqs": 256, "async_scheduling": True, "max_model_len": 2048}
    with serving(cuda_vllm, tmp_path / "replica", rounded(model), flags) as server:
        store = published.Publisher(LocalStore(server.directory / "store"), tmp_path, "run1")
        async with server.client() as client:
            await client.serve(store.full(rounded(model), 0))
            playing = [asyncio.create_task(client.generate([1, 2, seed % 200], 1800, seed=seed)) for seed in range(256)]
            await client.open_requests(256)
            for version in (1, 2):
                model = published.nudged(model, version)
                await client.serve(store.delta(rounded(model), version, base=version - 1))
            found = [each.version_of() for each in await asyncio.gather(*playing)]
            assert all(versions == sorted(versions) for versions in found)
            assert {versions[0] for versions in found} == {0} and {versions[-1] for versions in found} <= {0, 1, 2}
            assert any(len(set(versions)) > 1 for versions in found), "no version changed under any of them"
            after = await client.generate([1, 2, 3], 8)
            assert set(after.version_of()) == {2}
