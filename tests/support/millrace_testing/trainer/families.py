"""Tiny models of the families whose layers and rows ranks may share, as their config.json names them."""

from pathlib import Path
from typing import Any

import torch

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "max_position_embeddings": 64,
}
_WINDOWS = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.0],
    "long_factor": [4.0, 5.0],
    "original_max_position_embeddings": 8,
}
"""Samples are on both sides of its border, and so are the pieces of rows that ranks share."""
FAMILIES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "cohere2": {"sliding_window": 4},
    "deepseek_v3": {
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
        "first_k_dense_replace": 2,
        "num_key_value_heads": 4,
    },
    "ernie4_5": {},
    "exaone4": {"sliding_window": 4},
    "gemma": {"head_dim": 8},
    "gemma2": _WINDOWS,
    "gemma3_text": _WINDOWS,
    "glm4": {"head_dim": 8},
    "gpt_neox": {},
    "granite": {},
    "helium": {"head_dim": 4},
    "llama": {},
    "ministral": {"head_dim": 8, "sliding_window": 4},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 4},
    "phi": {},
    "phi3": {"original_max_position_embeddings": 8, "rope_parameters": _LONGROPE},
    "qwen2": {},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 12},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "starcoder2": {"sliding_window": 4},
}
"""What each family's config has beside the usual sizes."""


def make_family(family: str, directory: Path) -> Path:
    """Write a tiny model; norms and biases are drawn, too, because a zero has no relative error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**_SIZES, **FAMILIES[family]}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(directory / family)
    return directory / family
