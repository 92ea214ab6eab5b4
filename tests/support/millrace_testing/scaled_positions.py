"""Tiny models whose rotary factors follow the longest position of a call: longrope and dynamic, with a border of 24."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Phi3Config, PhimoeConfig

BORDER = 24
_SIZES: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "eos_token_id": 258,
    "pad_token_id": 256,
    "bos_token_id": None,
    "dtype": "float32",
}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 16,
    "long_factor": [float(each + 4) for each in range(16)],
    "original_max_position_embeddings": BORDER,
}
_MSCALE = {"short_mscale": 1.2, "long_mscale": 1.5}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}
KINDS = ("longrope", "longrope_experts", "dynamic")


def config_of(kind: str) -> Any:
    """Return the config of a kind: Phi-3, Phi-3.5-MoE, or Llama."""
    if kind == "dynamic":
        llama = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": BORDER}
        return LlamaConfig(**_SIZES, **llama, rope_parameters=_DYNAMIC)
    sizes = {**_SIZES, "max_position_embeddings": 256}
    if kind == "longrope_experts":
        return PhimoeConfig(**sizes, num_local_experts=4, rope_parameters=_LONGROPE | _MSCALE)
    phi3 = {"architectures": ["Phi3ForCausalLM"], "original_max_position_embeddings": BORDER}
    return Phi3Config(**sizes, **phi3, rope_parameters=_LONGROPE)


def model_of(kind: str, seed: int = 0) -> Any:
    """Return a model of a kind, as transformers computes it."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config_of(kind)).eval()
