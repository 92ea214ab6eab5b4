"""Optimizer state in bfloat16 and on the host: what a step makes of it, and that it comes out the same again."""

import pytest
import torch
from torch import nn

from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.trainer.learning.optimizer import PolicyOptimizer, round_by_chance

KINDS = ("adamw", "muon", "sgd")


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))


def _train(kind: str, steps: range, model: nn.Module, optimizer: PolicyOptimizer) -> None:
    for step in steps:
        torch.manual_seed(step)
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step(step)


def _optimizer(model: nn.Module, kind: str, *, offloads: bool = False, **keys: object) -> PolicyOptimizer:
    optim = OptimConfig.model_validate({"type": kind, "lr": 1e-2, **keys})
    return PolicyOptimizer(model, optim=optim, scheduler=SchedulerConfig(), max_steps=None, offloads_state=offloads)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_on_the_host_changes_no_bit(kind: str):
    plain, offloaded = _model(), _model()
    _train(kind, range(5), plain, _optimizer(plain, kind))
    _train(kind, range(5), offloaded, _optimizer(offloaded, kind, offloads=True))
    for one, other in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_in_bfloat16_takes_half_and_learns_nearly_the_same(kind: str):
    plain, rounded = _model(), _model()
    _train(kind, range(20), plain, _optimizer(plain, kind))
    optimizer = _optimizer(rounded, kind, state_dtype="bfloat16")
    _train(kind, range(20), rounded, optimizer)
    parts = [part for each in optimizer.state_tensors().values() for name, part in each.items() if name != "step"]
    assert parts and all(part.dtype == torch.bfloat16 for part in parts)
    start = _model()
    for one, other, first in zip(plain.parameters(), rounded.parameters(), start.parameters(), strict=True):
        assert (one - other).norm() < 0.1 * (one - first).norm()


def test_a_run_that_goes_on_from_a_state_in_bfloat16_has_the_same_bits():
    whole, broken = _model(), _model()
    _train("adamw", range(6), whole, _optimizer(whole, "adamw", state_dtype="bfloat16"))
    first = _optimizer(broken, "adamw", state_dtype="bfloat16")
    _train("adamw", range(3), broken, first)
    second = _optimizer(broken, "adamw", state_dtype="bfloat16")
    for name, parts in second.state_tensors().items():
        for part, tensor in parts.items():
            tensor.copy_(first.state_tensors()[name][part])
    _train("adamw", range(3, 6), broken, second)
    assert all(torch.equal(one, other) for one, other in zip(whole.parameters(), broken.parameters(), strict=True))


def test_a_second_moment_in_bfloat16_decays():
    """Rounded to the nearest, 1.0 would stay for ever: a step of 0.001 is less than half of its last bit."""
    values = torch.ones(4096, dtype=torch.bfloat16)
    for step in range(1000):
        values = round_by_chance(values.float() * 0.999, salt=step)
    assert (torch.ones((), dtype=torch.bfloat16).float() * 0.999).bfloat16() == 1
    assert values.float().mean() == pytest.approx(0.999**1000, rel=0.02)


def test_rounding_is_fair_and_keeps_what_is_not_finite():
    value = 1 + 2**-9  # a quarter of the way from 1 to the next number in bfloat16
    found = round_by_chance(torch.full((100_000,), value), salt=7)
    assert sorted(set(found.tolist())) == [1.0, 1.0078125]
    assert found.float().mean() == pytest.approx(value, abs=1e-4)
    assert torch.equal(found, round_by_chance(torch.full((100_000,), value), salt=7))
    assert not torch.equal(found, round_by_chance(torch.full((100_000,), value), salt=8))
    odd = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0, -0.0])
    assert str(round_by_chance(odd, salt=1).tolist()) == str(odd.tolist())
