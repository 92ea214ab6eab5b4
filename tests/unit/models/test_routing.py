"""The choices of routers of every family of mixtures: recorded, and replaced, with weights of their own scores."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from millrace.errors import InternalError, InvalidSpecError
from millrace.models.routing import FREE, Routers, RoutingShape, replay_routing, routers_of
from millrace_testing.lanes import by_default
from millrace_testing.trainer.families import EXPERTS, make_named


def _mixture(name: str, directory: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(make_named(name, directory), dtype=torch.float32)
    return model.eval()


def _logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, use_cache=False).logits


@pytest.mark.parametrize("name", by_default(EXPERTS, {"qwen3_moe", "deepseek_v3, experts", "gpt_oss"}))
def test_a_router_takes_given_experts_and_weighs_them_itself(name: str, tmp_path: Path) -> None:
    model = _mixture(name, tmp_path)
    routers, tokens = Routers.of(model), torch.arange(24).view(2, 12)
    assert routers is not None
    with torch.no_grad():
        plain = _logits(model, tokens)
        with routers.recording() as recorded:
            assert torch.equal(_logits(model, tokens), plain), "watching changes nothing"
        own = recorded()
        assert own.shape == (24, len(routers.shape.layers), routers.shape.top_k)
        routers.give(torch.from_numpy(own.astype(np.int16)))
        assert torch.equal(_logits(model, tokens), plain), "its own choice is no other one"
        others = (own + 1) % routers.shape.num_experts
        given = others.copy()
        given[5:] = FREE
        routers.give(torch.from_numpy(given.astype(np.int16)))
        with routers.recording() as recorded:
            replaced = _logits(model, tokens)
        made = recorded()
        # What precedes in the first layer with experts is the same, so that its routers are free to choose as before.
        assert np.array_equal(made[:5], others[:5]) and np.array_equal(made[5:, 0], own[5:, 0])
        assert not torch.allclose(replaced[0, :5], plain[0, :5], atol=1e-3)
        torch.testing.assert_close(replaced[1], plain[1], atol=1e-4, rtol=1e-4)  # its routers choose
        routers.give(None)
        assert torch.equal(_logits(model, tokens), plain)


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3, experts"])
def test_gradients_reach_the_routers_through_given_experts(name: str, tmp_path: Path) -> None:
    model = _mixture(name, tmp_path)
    routers, tokens = Routers.of(model), torch.arange(12).view(1, 12)
    assert routers is not None
    with torch.no_grad(), routers.recording() as recorded:
        _logits(model, tokens)
    others = (recorded() + 1) % routers.shape.num_experts
    routers.give(torch.from_numpy(others.astype(np.int16)))
    _logits(model, tokens).square().mean().backward()
    gates = [p.grad for n, p in model.named_parameters() if n.endswith("gate.weight")]
    assert len(gates) == len(routers.shape.layers)
    assert all(grad is not None and float(grad.abs().max()) > 0 for grad in gates)


def test_experts_of_another_number_of_tokens_are_refused(tmp_path: Path) -> None:
    model = _mixture("qwen3_moe", tmp_path)
    routers = Routers.of(model)
    assert routers is not None
    routers.give(torch.zeros((5, 2, 2), dtype=torch.int16))
    with pytest.raises(InternalError, match="of 5 tokens are given, and a router sees 6"):
        _logits(model, torch.arange(6).view(1, 6))


def test_a_dense_model_is_refused_by_the_name_of_the_key(tmp_path: Path) -> None:
    dense, mixture = _mixture("qwen3", tmp_path), _mixture("qwen3_moe", tmp_path)
    with pytest.raises(InvalidSpecError) as caught:
        replay_routing(dense, key="trainer.model.moe.replay")
    [violation] = caught.value.violations
    assert violation.field == "trainer.model.moe.replay" and "Qwen3ForCausalLM has no routers" in violation.message
    assert caught.value.reason == "REPLAY_UNSUPPORTED" and routers_of(dense) is None
    shape = replay_routing(mixture, key="trainer.model.moe.replay")
    assert shape == RoutingShape(layers=(0, 1), num_hidden_layers=2, num_experts=4, top_k=2)
    assert routers_of(mixture) is not None


def test_routers_that_choose_otherwise_than_by_one_topk_are_refused_at_the_start(tmp_path: Path) -> None:
    """Phi-MoE's take the largest score twice."""
    config = AutoConfig.for_model(
        "phimoe",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    assert Routers.of(model) is None, "an engine serves it without recording"
    with pytest.raises(InvalidSpecError, match="PhimoeForCausalLM has no routers that choose experts by one topk"):
        replay_routing(model, key="trainer.model.moe.replay")


def test_layers_without_experts_are_left_out_of_what_an_engine_reports_for_all() -> None:
    shape = RoutingShape(layers=(1, 3), num_hidden_layers=4, num_experts=8, top_k=2)
    reported = np.arange(24, dtype=np.uint8).reshape(3, 4, 2) % 8
    for given, expected in [(reported, reported[:, [1, 3]]), (reported[:, :2], reported[:, :2])]:
        chosen = shape.choices(given)
        assert chosen is not None and chosen.dtype == np.int16 and np.array_equal(chosen, expected)


@pytest.mark.parametrize(
    ("experts", "found"),
    [
        (np.zeros((3, 3, 2), np.uint8), "2 experts in each of 3 layers"),
        (np.zeros((3, 2, 3), np.uint8), "3 experts in each of 2 layers"),
        (np.full((3, 2, 2), 8, np.uint8), "expert 8"),
        (np.array([[[0, 1], [2, 2]]], np.uint8), "an expert twice"),
    ],
)
def test_experts_of_another_model_are_refused(experts: np.ndarray, found: str) -> None:
    shape = RoutingShape(layers=(1, 3), num_hidden_layers=4, num_experts=8, top_k=2)
    assert shape.choices(experts) is None and shape.form.problem_of(experts).startswith(f"{found} for a token")
