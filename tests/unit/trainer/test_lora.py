"""Adapters on a frozen base: what is trained, where it starts, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.config.sections.trainer import LoraConfig, OptimConfig, SchedulerConfig
from millrace.errors import InvalidStateError
from millrace.inference.vllm.lora import parse_adapter_config
from millrace.policies.peft.config import AdapterSpec, model_name, parse_peft_config
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import digest_of, state_tensors
from millrace.trainer.learning.optimizer import PolicyOptimizer
from millrace.trainer.model.lora import (
    LoraLinear,
    adapted_layers,
    add_adapters,
    round_base,
    set_learning,
    weight_tensors,
)
from millrace.trainer.model.pretrained import load_model
from millrace.trainer.model.published import policy_tensors
from millrace_testing.trainer.families import make_family

TOKENS = torch.arange(24)[None] * 7 % 200


def _model(example: Path, seed: int = 1, **keys: Any) -> tuple[torch.nn.Module, AdapterSpec]:
    model = load_model(example / "base")
    return model, add_adapters(model, LoraConfig(**keys), seed=seed)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


def _optimizer(model: torch.nn.Module) -> PolicyOptimizer:
    optim, scheduler = OptimConfig(lr=0.01, weight_decay=0.0), SchedulerConfig()
    return PolicyOptimizer(model, optim=optim, scheduler=scheduler, max_steps=None)


def test_version_zero_is_the_base_and_only_adapters_learn(example: Path) -> None:
    base = load_model(example / "base")
    model, spec = _model(example, rank=4, alpha=8.0)
    assert torch.equal(_logits(model), _logits(base))
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    optimizer = _optimizer(model)
    for step in range(2):
        _logits(model).logsumexp(-1).mean().backward()
        optimizer.step(step)
    now = model.state_dict()
    assert all(torch.equal(now[name], tensor) for name, tensor in frozen.items())
    moved = {name for name in now.keys() - frozen.keys() if name.endswith("lora_B.weight") and now[name].any()}
    assert len(moved) == 7 * 2  # seven kinds of layers, two of each
    state = state_tensors(model, optimizer, gang=Gang())
    assert {name for name in state if name.startswith("model.")} == {f"model.{n}" for n in now.keys() - frozen.keys()}
    assert all(".lora_" in name or name.startswith("rng.") for name in state)
    assert spec == AdapterSpec(
        rank=4,
        alpha=8.0,
        target_modules=("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"),
    )


def test_the_adapter_is_alpha_over_rank_times_b_times_a(example: Path) -> None:
    model, _ = _model(example, rank=4, alpha=6.0, target_modules=["layers.0.self_attn.q_proj"])
    layer = model.get_submodule("model.layers.0.self_attn.q_proj")
    assert isinstance(layer, LoraLinear)
    assert type(model.get_submodule("model.layers.1.self_attn.q_proj")) is torch.nn.Linear
    torch.manual_seed(0)
    torch.nn.init.normal_(layer.lora_B.weight, std=0.05)
    adapted = _logits(model)
    merged = load_model(example / "base")
    with torch.no_grad():
        weight: Any = merged.get_submodule("model.layers.0.self_attn.q_proj").weight
        weight += 1.5 * layer.lora_B.weight @ layer.lora_A.weight
    assert not torch.allclose(adapted, _logits(load_model(example / "base")), atol=1e-3)
    torch.testing.assert_close(adapted, _logits(merged), atol=1e-5, rtol=0)


def test_the_start_follows_from_the_seed_and_the_layer(example: Path) -> None:
    def starts(seed: int, *targets: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(torch.seed())  # the global generator must not matter
        model, _ = _model(example, seed=seed, rank=4, target_modules=list(targets))
        return {name: tensor for name, tensor in model.state_dict().items() if name.endswith("lora_A.weight")}

    one, other, more = starts(1, "q_proj"), starts(2, "q_proj"), starts(1, "q_proj", "v_proj")
    assert all(torch.equal(tensor, more[name]) and not torch.equal(tensor, other[name]) for name, tensor in one.items())
    first, second = one.values()
    assert not torch.equal(first, second)
    assert 0.1 < float(first.abs().max()) <= 1 / first.shape[1] ** 0.5


def test_published_are_the_base_and_then_the_adapters(example: Path) -> None:
    base = load_model(example / "base")
    model, spec = _model(example, rank=4, target_modules=["o_proj"], modules_to_save=["model.norm"])
    assert weight_tensors(model).keys() == weight_tensors(base).keys()
    whole = digest_of(policy_tensors(base, dtype=torch.float32))
    assert digest_of(policy_tensors(model, dtype=torch.float32, version=0)) == whole
    adapters = dict(policy_tensors(model, dtype=torch.bfloat16, version=3))
    layers = [f"base_model.model.model.layers.{layer}.self_attn.o_proj" for layer in range(2)]
    names = {f"{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    assert adapters.keys() == names | {"base_model.model.model.norm.weight"}
    assert {tensor.dtype for tensor in adapters.values()} == {"bfloat16"}
    assert {model_name(name, source="x") for name in adapters} <= model.state_dict().keys()
    assert parse_adapter_config(spec.to_config(), source="x") == spec
    assert spec.modules_to_save == ("model.norm",)


@pytest.mark.parametrize(
    ("targets", "saved", "named"),
    [
        (["q_proj", "v_proj"], [], (["q_proj", "v_proj"], [])),
        (["layers.0.self_attn.q_proj"], [], (["layers.0.self_attn.q_proj"], [])),
        ([r"layers\.1\..*(q|o)_proj"], [], ([f"model.layers.1.self_attn.{name}_proj" for name in "oq"], [])),
        (["(q|o)_proj"], [], (["o_proj", "q_proj"], [])),
        (["q_proj"], ["norm"], (["q_proj"], ["model.norm"])),  # PEFT would take every name that ends in these letters
    ],
)
def test_an_adapter_names_the_layers_that_it_has_as_peft_finds_them(
    example: Path, targets: list[str], saved: list[str], named: tuple[list[str], list[str]]
) -> None:
    model, spec = _model(example, rank=4, target_modules=targets, modules_to_save=saved)
    config = json.loads(spec.to_config())
    assert (config["target_modules"], config["modules_to_save"] or []) == named
    meant = parse_peft_config(spec.to_config(), source="x")
    names = [name for name, _ in model.named_modules()]
    assert {name for name in names if meant.targets(name)} == set(adapted_layers(model))


def test_dropout_is_active_while_learning_only(example: Path) -> None:
    model, _ = _model(example, dropout=0.5, target_modules=["q_proj"])
    for module in model.modules():
        if isinstance(module, LoraLinear):
            torch.nn.init.normal_(module.lora_B.weight)
    model.train()  # of the base: the adapters' dropout is apart from it
    assert torch.equal(_logits(model), _logits(model))
    set_learning(model, True)
    assert not torch.equal(_logits(model), _logits(model))
    set_learning(model, False)
    assert torch.equal(_logits(model), _logits(model))


@pytest.mark.parametrize(("compute", "held"), [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32)])
def test_the_base_has_the_published_values(example: Path, compute: torch.dtype, held: torch.dtype) -> None:
    model = load_model(example / "base")
    exact = digest_of(policy_tensors(model, dtype=torch.bfloat16))
    round_base(model, LoraConfig(), publish_dtype=torch.bfloat16, compute_dtype=compute)
    assert {parameter.dtype for parameter in model.parameters()} == {held}
    assert digest_of(policy_tensors(model, dtype=torch.bfloat16)) == exact
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight  # type: ignore[operator]
    rounded = next(model.parameters()).float()
    assert torch.equal(rounded, rounded.bfloat16().float())
    add_adapters(model, LoraConfig(), seed=0)
    assert _logits(model).dtype == held


def test_adapters_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    model = load_model(make_family("mixtral", tmp_path))
    for pattern in ("gate_up_proj", r"model\.layers\.0\.mlp\.experts\.down_proj"):
        with pytest.raises(InvalidStateError, match=r"MixtralForCausalLM .*names weights of experts") as told:
            add_adapters(model, LoraConfig(target_modules=["q_proj", pattern]), seed=0)
        assert told.value.reason == "LORA_TARGET_UNKNOWN"
    assert "mlp.experts" not in str(add_adapters(model, LoraConfig(), seed=0).target_modules), "these stay frozen"


@pytest.mark.parametrize(
    ("keys", "reason", "message"),
    [
        ({"target_modules": ["q_porj"]}, "LORA_TARGET_UNKNOWN", "'q_porj'.*fits no linear layer.*q_proj"),
        ({"target_modules": ["q_proj", "norm"]}, "LORA_TARGET_UNKNOWN", "'norm'.*fits no linear layer"),
        ({"modules_to_save": ["lm_haed"]}, "LORA_SAVED_UNKNOWN", "'lm_haed'.*fits no layer"),
        ({"modules_to_save": ["lm_head"]}, "LORA_SAVED_TIED", "lm_head, whose weight is tied to model.embed_tokens"),
    ],
)
def test_layers_that_do_not_fit_are_named(example: Path, keys: dict[str, Any], reason: str, message: str) -> None:
    with pytest.raises(InvalidStateError, match=message) as raised:
        _model(example, **keys)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "keys", [{"target_modules": []}, {"target_modules": ["q_proj("]}, {"rank": 0}, {"alpha": 0.0}, {"dropout": 1.0}]
)
def test_keys_that_cannot_be_meant_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(keys))):
        LoraConfig(**keys)


@pytest.mark.parametrize(
    "change", [{"use_dora": True}, {"peft_type": "IA3"}, {"target_modules": ".*"}, {"rank_pattern": {"q_proj": 2}}]
)
def test_adapters_of_other_kinds_are_not_served_unmerged(change: dict[str, Any]) -> None:
    config = json.loads(AdapterSpec(rank=4, alpha=8.0, target_modules=("q_proj",)).to_config()) | change
    with pytest.raises(InvalidStateError, match="somewhere") as raised:
        parse_adapter_config(json.dumps(config).encode(), source="somewhere")
    assert raised.value.reason == "ADAPTER_NOT_SUPPORTED"
