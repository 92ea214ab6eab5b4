"""After a delta a worker of real vLLM holds what a fresh load holds: parameters, and all that is derived from them."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from millrace_testing.inference import published, vllm_programs
from millrace_testing.inference.vllm_programs import orders

GAP = 0.1  # of bfloat16 log-probs to those of Hugging Face's model
pytestmark = pytest.mark.timeout(1200)

SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "initializer_range": 0.08,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
TWO_KV_HEADS: dict[str, Any] = {"num_key_value_heads": 2, "head_dim": 32}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,  # vLLM's kernel for CPUs has this size only
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "first_k_dense_replace": 2,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
ROUTED |= {"topk_method": "noaux_tc"}  # by which vLLM knows that the router has a bias
ROUTED |= {"moe_intermediate_size": 64}
FAMILIES: dict[str, tuple[PreTrainedConfig, tuple[str, ...]]] = {
    "tied": (Qwen3Config(**SIZES, **TWO_KV_HEADS, tie_word_embeddings=True), ()),
    "biased": (
        Qwen2Config(**{**SIZES, "num_attention_heads": 2}, num_key_value_heads=2, tie_word_embeddings=False),
        ("qkv_proj.bias",),
    ),
    "experts": (Qwen3MoeConfig(**SIZES, **TWO_KV_HEADS, **EXPERTS), ("w13_weight", "w2_weight")),
    "latent": (DeepseekV2Config(**SIZES, **LATENT, q_lora_rank=None), ("W_UV", "W_UK_T")),
    "latent-copied": (DeepseekV2Config(**SIZES, **LATENT, q_lora_rank=None), ("W_UV", "W_UK_T")),
    "latent-experts": (
        DeepseekV3Config(**{**SIZES, **LATENT, "first_k_dense_replace": 1}, **ROUTED, q_lora_rank=48),
        ("w13_weight", "w2_weight", "W_UV", "W_UK_T"),
    ),
    "latent-v3": (DeepseekV3Config(**SIZES, **LATENT, q_lora_rank=48), ("W_UV", "W_UK_T")),
}
"""A config by family, and tensors that its workers have to hold."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_delta_leaves_what_a_fresh_load_leaves(family: str, vllm_python: str, tmp_path: Path) -> None:
    config, wanted = FAMILIES[family]
    torch.manual_seed(0)
    first: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval().requires_grad_(False)
    for weight in first.parameters():
        if not weight.any():  # biases, of which nothing could be stale
            weight.normal_(std=0.02)
    second: Any = published.nudged(first, 1).to(torch.bfloat16)
    for name, model in (("first", first), ("second", second)):
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(tmp_path / name)
    options = ("copies",) if family == "latent-copied" else ()
    found = held(vllm_python, tmp_path / "first", orders(tmp_path, first, second), *options)
    fresh = held(vllm_python, tmp_path / "second", [], *options)
    assert found["now"].keys() == fresh["now"].keys()
    other = [path for path, digest in fresh["now"].items() if found["now"][path] != digest]
    assert not other, "these are not as a fresh load leaves them"
    changed = [path for path, digest in found["first"].items() if fresh["now"][path] != digest]
    assert all(any(path.endswith(each) for path in changed) for each in wanted), "a stale tensor would be seen"
    assert any(path.endswith("()") for path in changed), "a stale packed layer would be seen"
    assert (found["tokens"], found["logprobs"]) == (fresh["tokens"], fresh["logprobs"])
    said = published.logprobs(second, [1, 2, 3, 4, 5], found["tokens"])
    np.testing.assert_allclose(found["logprobs"], said, atol=GAP)


def held(python: str, model: Path, orders: list[dict[str, Any]], *options: str) -> dict[str, Any]:
    """Return what a worker holds that was started with a model, and has taken the orders."""
    ended = run(python, model, orders, *options)
    assert ended.returncode == 0, ended.stderr[-6000:] + ended.stdout[-3000:]
    return json.loads((model.parent / f"{model.name}.held").read_text())


def run(python: str, model: Path, orders: list[dict[str, Any]], *options: str) -> subprocess.CompletedProcess[str]:
    asked, out = model.parent / f"{model.name}.orders", model.parent / f"{model.name}.held"
    asked.write_text(json.dumps(orders))
    return vllm_programs.run(python, "vllm_memory.py", [str(model), str(asked), str(out), *options])
