"""The estimate of models of many families, of which only the config exists; or a refusal that says what to do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    T5Config,
)

from millrace.config.sections.trainer import TrainerConfig
from millrace.errors import InvalidStateError, NotFoundError
from millrace.trainer.estimate import load_config
from millrace.trainer.estimate_step import simulate, simulate_whole
from millrace_testing.lanes import by_default

pytestmark = pytest.mark.computes

SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPE: dict[str, Any] = SIZES | {"num_key_value_heads": 2}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
FAMILIES: dict[str, Callable[[int], PretrainedConfig]] = {
    "Llama": lambda blocks: LlamaConfig(**SHAPE, num_hidden_layers=blocks),
    "Qwen2": lambda blocks: Qwen2Config(**SHAPE, num_hidden_layers=blocks),
    "Mistral": lambda blocks: MistralConfig(**SHAPE, num_hidden_layers=blocks),
    "Gemma 2": lambda blocks: Gemma2Config(**SHAPE, num_hidden_layers=blocks, head_dim=16),
    "Gemma 3, text": lambda blocks: Gemma3TextConfig(**SHAPE, num_hidden_layers=blocks, head_dim=16),
    "GPT-NeoX": lambda blocks: GPTNeoXConfig(**SIZES, num_hidden_layers=blocks),
    "GPT-2": lambda blocks: GPT2Config(
        vocab_size=512, n_embd=64, n_layer=blocks, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
    ),
    "OLMo 2": lambda blocks: Olmo2Config(**SHAPE, num_hidden_layers=blocks),
    "Phi 3": lambda blocks: Phi3Config(**SHAPE, num_hidden_layers=blocks),
    "Mixtral": lambda blocks: MixtralConfig(**SHAPE, **EXPERTS, num_hidden_layers=blocks),
    "GPT-OSS": lambda blocks: GptOssConfig(**SHAPE, **EXPERTS, num_hidden_layers=blocks, head_dim=16),
    "DeepSeek V3": lambda blocks: DeepseekV3Config(**LATENT, num_hidden_layers=blocks, first_k_dense_replace=1),
    "Mamba, without attention": lambda blocks: MambaConfig(
        vocab_size=512, hidden_size=64, state_size=4, num_hidden_layers=blocks
    ),
    "experts in every second block": lambda blocks: Qwen3MoeConfig(
        **SHAPE,
        num_hidden_layers=blocks,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
    ),
    "sparse blocks, then dense ones": lambda blocks: Glm4MoeLiteConfig(
        **LATENT,
        num_hidden_layers=blocks,
        mlp_layer_types=["sparse"] * (blocks - blocks // 2) + ["dense"] * (blocks // 2),
    ),
}
LONG = 6
CORNERS = ("Llama", "GPT-2", "DeepSeek V3", "GPT-OSS", "Mamba, without attention")
"""Plain, without rotations, latent attention, experts with biases, no attention: the others are variants of these."""
MIXED = ("sparse blocks, then dense ones", "experts in every second block")


def trainer(**model: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"model": {"name": "x", "seq_len": 8, **model}, "micro_batch_tokens": 16})


def own_count(config: PretrainedConfig) -> int:
    """Return how many parameters transformers' model has."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("family", by_default(FAMILIES, CORNERS))
def test_a_family_is_estimated_with_all_of_its_parameters(family: str):
    config = FAMILIES[family](2)
    found = simulate(trainer(), config, num_gpus=0)
    assert found.num_parameters == found.num_trained == own_count(config)
    state = 4 * found.num_parameters
    assert found.learning["parameters"] == found.learning["gradients"] == state
    assert found.stepping["optimizer"] >= 2 * state and found.learning["activations"] > 0 < found.learning["logits"]
    assert found.flops.per_token > 0 and (found.flops.per_square > 0) == (family != "Mamba, without attention")


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_model_of_a_family_is_the_whole_one(family: str):
    """Where blocks are alike two short models represent it; where they are not, none may."""
    config = FAMILIES[family](LONG)
    found = simulate(trainer(), config, num_gpus=0)
    assert found == simulate_whole(trainer(), config, num_gpus=0)
    assert found.num_parameters == own_count(config)


@pytest.mark.parametrize("family", MIXED)
def test_blocks_of_different_weights_do_not_stand_for_each_other(family: str):
    config = FAMILIES[family](LONG)
    assert simulate(trainer(), config, num_gpus=0).num_parameters == own_count(config)


@pytest.mark.parametrize("family", ["GPT-2", "GPT-NeoX", "Mamba, without attention"])
def test_adapters_of_layers_that_a_family_does_not_have_are_refused_with_those_that_it_has(family: str):
    with pytest.raises(InvalidStateError, match=r"lora\.target_modules names 'q_proj, .*lm_head") as raised:
        simulate(trainer(lora={"rank": 4}), FAMILIES[family](2), num_gpus=0)
    assert raised.value.remedy == "name layers of this model"


def test_adapters_of_layers_that_a_family_names_are_estimated():
    adapters = {"rank": 4, "target_modules": ["query_key_value", "dense"]}
    found = simulate(trainer(lora=adapters), FAMILIES["GPT-NeoX"](2), num_gpus=0)
    in_a_block = 4 * (64 + 3 * 64) + 4 * (64 + 64)
    assert found.num_trained == 2 * in_a_block


def test_a_model_that_does_not_generate_text_is_refused(tmp_path: Path):
    T5Config(vocab_size=512, d_model=64, num_layers=2).save_pretrained(tmp_path)
    with pytest.raises(NotFoundError, match="of type t5, of which transformers has no causal language model") as raised:
        load_config(str(tmp_path))
    assert raised.value.reason == "MODEL_NOT_FOUND" and "from left to right" in str(raised.value.remedy)


def test_a_directory_without_a_config_is_refused_with_what_it_needs(tmp_path: Path):
    with pytest.raises(NotFoundError, match=r"cannot be read: the directory holds no config\.json") as raised:
        load_config(str(tmp_path))
    assert raised.value.reason == "MODEL_NOT_FOUND" and "with a config.json" in str(raised.value.remedy)
