"""Adapters on one base: their gradients and steps are those of a model that has the adapter alone."""

from pathlib import Path

import numpy as np
import pytest
import torch

from millrace.config.sections.trainer import LoraConfig
from millrace.errors import InvalidSpecError, InvalidStateError
from millrace.models import loading
from millrace.tinker.examples import Example
from millrace.tinker.losses import find_loss
from millrace.tinker.states import ALPHA
from millrace.tinker.training import AdapterShape, SharedBase, StepParams, TrainedAdapter
from millrace.trainer.model.lora import add_adapters
from millrace_testing.model_files import make_qwen3

LOSS, CONFIG = find_loss("cross_entropy", {})
ADAM = StepParams(learning_rate=0.01)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("base"), is_tied=True)


@pytest.fixture(scope="module")
def base(directory: Path) -> SharedBase:
    return SharedBase(directory)


def example(*tokens: int, weights: list[float] | None = None) -> Example:
    ids = np.array(tokens, np.int64)
    values = np.array(weights or [1.0] * (len(tokens) - 1), np.float32)
    return Example(tokens=ids[:-1], targets=ids[1:], values={"weights": values})


DATA = [example(1, 2, 3, 4, weights=[0.5, -1.0, 0.25]), example(5, 6), example(7, 8, 9)]


def backward(base: SharedBase, adapter: TrainedAdapter, data: list[Example]) -> float:
    return base.forward_backward(adapter, data, LOSS, CONFIG, learns=True)[1]


def steps(base: SharedBase, adapter: TrainedAdapter, count: int) -> None:
    for number in range(count):
        backward(base, adapter, DATA[number % 2 :])
        adapter.step(ADAM)


def test_gradients_and_steps_are_those_of_the_trainers_own_adapters(directory: Path, base: SharedBase) -> None:
    """The trainer's layers, plain autograd over one example at a time, and torch's AdamW, beside ours."""
    model = loading.empty_model(directory, dtype=torch.float32)
    loading.fill_model(model, directory, device=torch.device("cpu"))
    add_adapters(
        model, LoraConfig(rank=4, alpha=ALPHA, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]), seed=5
    )
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    optimizer = torch.optim.AdamW(
        trained.values(), lr=ADAM.learning_rate, betas=(ADAM.beta1, ADAM.beta2), eps=ADAM.eps, weight_decay=0.0
    )
    shape = AdapterShape(rank=4, seed=5, train_mlp=False, train_unembed=False)
    adapter = base.new_adapter(shape)
    assert adapter.parameters.keys() == trained.keys()
    for _ in range(3):
        expected = torch.zeros(())
        for row in DATA:
            logprobs = model(input_ids=torch.from_numpy(row.tokens)[None]).logits[0].log_softmax(-1)
            own = logprobs.gather(-1, torch.from_numpy(row.targets)[:, None])[:, 0]
            expected = expected - (own * torch.from_numpy(row.values["weights"])).sum()
        expected.backward()
        assert backward(base, adapter, DATA) == pytest.approx(float(expected.detach()), rel=1e-5)
        for name, gradient in adapter.gradients.items():
            torch.testing.assert_close(gradient, trained[name].grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
        optimizer.zero_grad()
        adapter.step(ADAM)
        # A first step of Adam has the size of the learning rate whatever the gradient's: near 0 it may differ in sign.
        for name, parameter in adapter.parameters.items():
            torch.testing.assert_close(parameter, trained[name], rtol=1e-3, atol=2e-4)


def test_calls_sum_their_gradients_until_a_step(base: SharedBase) -> None:
    shape = AdapterShape(rank=2, seed=1)
    once, parts = base.new_adapter(shape), base.new_adapter(shape)
    backward(base, once, DATA)
    for row in DATA:
        backward(base, parts, [row])
    for name, gradient in once.gradients.items():
        torch.testing.assert_close(gradient, parts.gradients[name], rtol=1e-4, atol=1e-6)
    before = {name: each.clone() for name, each in parts.gradients.items()}
    base.forward_backward(parts, DATA, LOSS, CONFIG, learns=False)
    assert all(torch.equal(each, parts.gradients[name]) for name, each in before.items()), "forward alone adds nothing"


def test_an_adapter_is_bitwise_the_same_whatever_is_trained_between_its_steps(base: SharedBase) -> None:
    alone, beside = (base.new_adapter(AdapterShape(rank=4, seed=2)) for _ in range(2))
    other = base.new_adapter(AdapterShape(rank=3, seed=9, train_unembed=False))
    steps(base, alone, 4)
    for number in range(4):
        backward(base, other, DATA)
        backward(base, beside, DATA[number % 2 :])
        other.step(ADAM)
        beside.step(ADAM)
    assert beside.export() == alone.export()


def test_a_restored_state_goes_on_bitwise_with_gradients_and_optimizer(base: SharedBase) -> None:
    shape = AdapterShape(rank=4, seed=3)
    first, second = base.new_adapter(shape), base.new_adapter(shape)
    steps(base, first, 2)
    backward(base, first, DATA)
    second.restore(first.export())
    assert second.export() == first.export()
    for adapter in (first, second):
        adapter.step(ADAM)
        steps(base, adapter, 2)
    assert second.export() == first.export()
    third = base.new_adapter(shape)
    third.restore(first.export(), with_optimizer=False, with_gradients=False)
    assert third.num_steps == 0 and not third.gradients
    assert all(torch.equal(each, first.parameters[name]) for name, each in third.parameters.items())


def test_what_no_step_can_be_taken_with_is_refused(base: SharedBase) -> None:
    adapter = base.new_adapter(AdapterShape(rank=4, seed=4))
    with pytest.raises(InvalidStateError, match="no gradient"):
        adapter.step(ADAM)
    with pytest.raises(InvalidSpecError, match="beta1"):
        StepParams(beta1=1.0)
    with pytest.raises(InvalidSpecError, match="same rank"):
        base.new_adapter(AdapterShape(rank=2, seed=4)).restore(adapter.export())
    with pytest.raises(InvalidSpecError, match="at least one of"):
        base.new_adapter(AdapterShape(rank=2, seed=4, train_attn=False, train_mlp=False, train_unembed=False))


def test_a_gradient_that_is_not_finite_changes_no_weight(base: SharedBase) -> None:
    adapter = base.new_adapter(AdapterShape(rank=4, seed=6))
    before = adapter.export_weights()
    backward(base, adapter, DATA)
    next(iter(adapter.gradients.values())).fill_(float("inf"))
    assert adapter.step(ADAM) == {"skipped": 1.0}
    assert adapter.export_weights() == before
    with pytest.raises(InvalidStateError):
        adapter.step(ADAM)


def test_the_gradients_norm_is_clipped(base: SharedBase) -> None:
    shape = AdapterShape(rank=4, seed=8)
    clipped, scaled = base.new_adapter(shape), base.new_adapter(shape)
    for adapter in (clipped, scaled):
        backward(base, adapter, DATA)
    norm = float(torch.nn.utils.get_total_norm(list(scaled.gradients.values())))
    for gradient in scaled.gradients.values():
        gradient.mul_(0.5 / (norm + 1e-6))
    # With such an eps a step follows the gradient's size.
    big = {"learning_rate": 0.01, "eps": 1.0}
    assert clipped.step(StepParams(**big, grad_clip_norm=0.5))["grad_norm"] == pytest.approx(norm)
    scaled.step(StepParams(**big))
    for name, parameter in clipped.parameters.items():
        torch.testing.assert_close(parameter, scaled.parameters[name], rtol=1e-5, atol=1e-7)


def test_an_eps_that_is_0_in_float32_is_refused(base: SharedBase) -> None:
    for eps in (0.0, 1e-60):
        with pytest.raises(InvalidSpecError, match="eps"):
            StepParams(eps=eps)
    # A's gradient is 0 at first: whatever eps is taken leaves numbers.
    adapter = base.new_adapter(AdapterShape(rank=2, seed=1))
    backward(base, adapter, DATA)
    adapter.step(StepParams(learning_rate=0.1, eps=1e-37))
    assert all(bool(torch.isfinite(each).all()) for each in adapter.parameters.values())
