"""The operations of a step are those that torch counts, and the MFU is their share of the peak."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from millrace.config.sections.trainer import LoraConfig
from millrace.trainer.learning.packing import FlopCount, Utilization
from millrace.trainer.model.lora import add_adapters

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def model(kind: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind == "experts":
        config = Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
        return Qwen3MoeForCausalLM(config)
    made = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=kind == "tied"))
    if kind == "adapters":
        add_adapters(made, LoraConfig(rank=2), seed=0)
    return made


@pytest.mark.parametrize("kind", ["tied", "untied", "adapters"])
def test_products_are_those_that_torch_counts(kind: str) -> None:
    made, length = model(kind), 64
    made.set_attn_implementation("eager")  # whose products torch counts on every device; not causal: all of n²
    with FlopCounterMode(display=False) as counter:
        made(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    count = FlopCount.of(made)
    ours = count.per_token * length + 2 * count.per_square * length**2
    assert ours == pytest.approx(counter.get_total_flops(), rel=0.03)


def test_an_expert_counts_by_the_share_of_its_tokens() -> None:
    made = model("experts")
    attention = 32 * 16 * (4 + 2 + 2 + 4)
    experts, router = 2 * 3 * 32 * 16, 4 * 32
    assert FlopCount.of(made).per_token == 6 * (3 * (attention + experts + router) + 96 * 32)


def test_the_utilization_is_of_the_peak_of_all_ranks() -> None:
    made = model("tied")
    arguments: dict[str, Any] = {"compute_dtype": torch.float32, "device": torch.device("cpu"), "world_size": 4}
    assert Utilization.of(made, tflops=None, **arguments) is None
    used = Utilization.of(made, tflops=0.5, **arguments)
    assert used is not None
    assert used.mfu([10, 20], seconds=2.0) == pytest.approx(FlopCount.of(made).of_samples([10, 20]) / 4e12)
