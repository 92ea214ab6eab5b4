"""Tiny models of the families whose layers and rows ranks may share, as their config.json names them."""

import copy
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


_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
_NO_AUX = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What the files of DeepSeek-V3 say of its router, and transformers takes for granted: vLLM asks, and has others."""
_GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LINEAR = {f"linear_{name}": 2 for name in ("num_key_heads", "num_value_heads")}
_LINEAR |= {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
_HYBRID = {**_LINEAR, **_ROPE, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
_SEEN = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
_SEES: dict[str, Any] = {**_SEEN, "depth": 1, "num_heads": 2, "out_hidden_size": 16, "num_position_embeddings": 16}
_IMAGES = {f"{name}_token_id": 60 + index for index, name in enumerate(("image", "video", "vision_start"))}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3, experts": ("deepseek_v3", {**FAMILIES["deepseek_v3"], **_ROUTED, **_GROUPS, **_NO_AUX}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8}),
    "gemma3": (
        "gemma3",
        {
            "text_config": {**_SIZES, **_WINDOWS, "num_hidden_layers": 2},
            "vision_config": {**_SEEN, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14},
            "mm_tokens_per_image": 4,
        },
    ),
    "glm4_moe": ("glm4_moe", {**_ROUTED, **_GROUPS, "n_group": 1, "head_dim": 8}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 4}),
    "qwen3_5, text part": (
        "qwen3_5",
        {"text_config": {**_SIZES, **_HYBRID}, "vision_config": _SEES, **_IMAGES, "vision_end_token_id": 63},
    ),
    "qwen3_5_moe, text part": (
        "qwen3_5_moe",
        {
            "text_config": {**_SIZES, **_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 12},
            "vision_config": _SEES,
            **_IMAGES,
            "vision_end_token_id": 63,
        },
    ),
    "qwen3, tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}
"""Models that hold something apart: type and config. Fused experts, what stays float32, a text part, a tie, states."""

_MIXED = {"num_local_experts": 4, "num_experts_per_tok": 2}
_STATES = {"ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 8}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "minimax": ("minimax", {**_MIXED, "head_dim": 8, "block_size": 8}),
    "minimax_m2": ("minimax_m2", {**_MIXED, "head_dim": 8}),
    "nemotron_h": (
        "nemotron_h",
        {
            **_ROUTED,
            **_STATES,
            "moe_shared_expert_intermediate_size": 12,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "num_hidden_layers": 4,
            "head_dim": 8,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_next": ("qwen3_next", {**_HYBRID, **_EXPERTS, "shared_expert_intermediate_size": 12}),
}
"""Further models with experts: type and config. What transformers 4 and vLLM make of them was not looked at."""
_TYPES = {**{name: (name, said) for name, said in FAMILIES.items()}, **OTHERS, **MIXTURES}
EXPERTS = {
    name: kind
    for name, (kind, said) in _TYPES.items()
    if any(key.endswith("_experts") and key != "n_shared_experts" for key in {**said, **said.get("text_config", {})})
}
"""The type of each model of all that has layers of experts, which ranks can share."""


def keys_of(name: str) -> set[str]:
    """Return what the config of one of these models says, or that of its text part."""
    said = _TYPES[name][1]
    return set(said.get("text_config", {**_SIZES, **said}))


def make_named(name: str, directory: Path, **changes: Any) -> Path:
    """Write a tiny model of any of these; `changes` are of its config, or that of its text part."""
    return (make_family if name in FAMILIES else make_other)(name, directory, **changes)


def make_family(family: str, directory: Path, **changes: Any) -> Path:
    """Write a tiny model; norms and biases are drawn, too, because a zero has no relative error."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    said = copy.deepcopy({**_SIZES, **FAMILIES[family], **changes})  # transformers writes into it
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **said))
    return _write(model, directory / family)


def make_other(name: str, directory: Path, **changes: Any) -> Path:
    """Write one of `OTHERS` or `MIXTURES`, in bfloat16 but for what transformers keeps in float32: so they come."""
    import transformers
    from transformers import AutoConfig

    kind, said = copy.deepcopy(_TYPES[name])
    changes = copy.deepcopy(changes)
    if "text_config" in said:
        said["text_config"] |= changes
    else:
        said = {**_SIZES, **said, **changes}
    config = AutoConfig.for_model(kind, **said)
    mappings = (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING)
    loader: Any = next(each[type(config)] for each in mappings if type(config) in each)
    torch.manual_seed(0)
    exact = _write(loader(config), directory / f"{name} exact")
    loader.from_pretrained(exact, dtype=torch.bfloat16).save_pretrained(directory / name)
    return directory / name


def _write(model: Any, directory: Path) -> Path:
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            if tensor.is_floating_point() and (tensor.ndim == 1 or not tensor.any()):
                tensor.add_(torch.randn_like(tensor), alpha=0.2)
    model.save_pretrained(directory)
    return directory
