"""The router's load over the experts of each layer."""

import pytest
import torch

from millrace.trainer.learning.metrics import ExpertLoad, StepMetrics, load_metrics


def test_an_even_load_is_no_excess_and_a_full_expert_is_one() -> None:
    even = torch.full((2, 4), 3.0, dtype=torch.float64)
    assert load_metrics(even) == {"max_vio/mean": 0.0, "max_vio/max": 0.0, "idle_experts/mean": 0.0}
    uneven = torch.tensor([[3.0, 3.0, 3.0, 3.0], [12.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    assert load_metrics(uneven) == {"max_vio/mean": 1.5, "max_vio/max": 3.0, "idle_experts/mean": 3 / 8}
    nothing = torch.zeros((1, 4), dtype=torch.float64)
    assert load_metrics(nothing)["idle_experts/mean"] == 1.0


def test_what_the_experts_see_is_counted_while_learning_only() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    model = Qwen3MoeForCausalLM(config)
    load = ExpertLoad.of(model)
    assert load is not None
    tokens = torch.arange(10).view(2, 5)
    with torch.no_grad():
        model(input_ids=tokens)
    assert not load.take().any()
    model(input_ids=tokens)
    metrics = StepMetrics([])
    metrics.add_expert_load(load)
    assert not load.take().any(), "what was taken is not counted again"
    model(input_ids=tokens)
    counts = load.take()
    assert counts.shape == (2, 4) and counts.sum(1).tolist() == [20.0, 20.0]
    merged = StepMetrics.merged([metrics, metrics]).values()
    assert merged["max_vio/max"] == pytest.approx(load_metrics(counts)["max_vio/max"])
    assert ExpertLoad.of(torch.nn.Linear(2, 2)) is None
