"""Schedules: prime-rl's curves, without its crash at one decay step. The oracle is torch's own schedulers."""

import math
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from millrace.config.sections.trainer import OptimConfig, SchedulerConfig
from millrace.errors import InvalidSpecError
from millrace.trainer.learning.optimizer import PolicyOptimizer, clip, learning_rate

LR, MAX_STEPS = 0.1, 20


def _curve(**config: Any) -> list[float]:
    scheduler = SchedulerConfig(**config)
    return [learning_rate(step, lr=LR, config=scheduler, max_steps=MAX_STEPS) for step in range(MAX_STEPS)]


def _torch_curve(make: Any) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
    scheduler = make(optimizer)
    values = []
    for _ in range(MAX_STEPS):
        values.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return values


def _warmup(optimizer: Any, min_lr: float, steps: int) -> LinearLR:
    return LinearLR(optimizer, start_factor=max(min_lr / LR, 1e-8), end_factor=1.0, total_iters=steps)


def test_linear_is_warmup_stable_decay() -> None:
    def make(optimizer: Any) -> SequentialLR:
        parts = [
            _warmup(optimizer, 0.01, 4),
            ConstantLR(optimizer, factor=1.0, total_iters=10),
            LinearLR(optimizer, start_factor=1.0, end_factor=0.1, total_iters=5),
        ]
        return SequentialLR(optimizer, parts, milestones=[4, 14])

    ours = _curve(type="linear", warmup_steps=4, decay_steps=6, min_lr=0.01)
    assert ours == pytest.approx(_torch_curve(make), rel=1e-9)
    assert ours[0] == pytest.approx(0.01) and ours[14] == LR and ours[-1] == pytest.approx(0.01)


def test_cosine_follows_the_warmup() -> None:
    def make(optimizer: Any) -> SequentialLR:
        parts = [_warmup(optimizer, 0.0, 5), CosineAnnealingLR(optimizer, T_max=15, eta_min=0.0)]
        return SequentialLR(optimizer, parts, milestones=[5])

    ours = _curve(type="cosine", warmup_steps=5, min_lr=0.0)
    assert ours == pytest.approx(_torch_curve(make), rel=1e-6, abs=1e-12)
    assert ours[5] == LR and ours[19] == pytest.approx(LR * (1 + math.cos(math.pi * 14 / 15)) / 2)


def test_constant_with_and_without_warmup() -> None:
    assert _curve(type="constant") == [LR] * MAX_STEPS
    warmed = _curve(type="constant", warmup_steps=4)
    assert warmed[:5] == pytest.approx([LR * 1e-8, LR * 0.25, LR * 0.5, LR * 0.75, LR]) and set(warmed[4:]) == {LR}


@pytest.mark.parametrize("decay_steps", [0, 1, 2])
def test_short_decays_do_not_crash(decay_steps: int) -> None:
    curve = _curve(type="linear", warmup_steps=0, decay_steps=decay_steps, min_lr=0.02)
    assert curve[: MAX_STEPS - 2] == [LR] * (MAX_STEPS - 2)
    assert curve[-1] == pytest.approx(LR if decay_steps == 0 else 0.02)


def test_a_peak_of_zero_is_zero_everywhere() -> None:
    for kind in ("constant", "linear", "cosine"):
        config = SchedulerConfig(type=kind, warmup_steps=3)
        assert {learning_rate(step, lr=0.0, config=config, max_steps=9) for step in range(9)} == {0.0}


def test_a_decay_without_an_end_is_refused() -> None:
    with pytest.raises(InvalidSpecError, match="max_steps"):
        learning_rate(50, lr=0.1, config=SchedulerConfig(type="cosine"), max_steps=None)


def _model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 2)


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    ours, theirs = _model(), _model()
    optim = OptimConfig(lr=0.1, weight_decay=0.1, max_norm=0.5, betas1=0.8, betas2=0.9)
    optimizer = PolicyOptimizer(ours, optim=optim, scheduler=SchedulerConfig(), max_steps=None)
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1, betas=(0.8, 0.9), weight_decay=0.1)
    for step in range(3):
        norms = []
        for model in (ours, theirs):
            (model(torch.arange(3.0) + step) ** 2).sum().backward()
            norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()))  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
        reference.step()
        reference.zero_grad()
        report = optimizer.step(step)
        assert norms[0] > 0.5 and report.grad_norm == pytest.approx(norms[0])
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):  # the plain one has other roundings
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0.0)
    assert all(p.grad is None for p in ours.parameters())


class _Small(torch.nn.Module):
    """An embedding, a hidden matrix, a bias and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(7, 4)
        self.hidden = torch.nn.Linear(4, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, step: int) -> torch.Tensor:
        logits = self.head(torch.tanh(self.hidden(self.embedding(torch.tensor([step % 7, 3])))))
        return torch.log_softmax(logits, -1)[:, 2].sum()


def _by_hand(model: _Small, optim: OptimConfig) -> list[torch.optim.Optimizer]:
    if optim.type == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, nesterov=True, weight_decay=0.05)]
    matrices = [model.hidden.weight] if optim.type == "muon" else []
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW(others, lr=0.1, betas=(0.9, 0.99), weight_decay=0.05, fused=True)
    if optim.type == "adamw":
        return [adamw]
    muon = torch.optim.Muon(matrices, lr=0.1, momentum=0.7, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [adamw, muon]


_OPTIMIZERS = [
    OptimConfig(type="adamw", lr=0.1, betas2=0.99, weight_decay=0.05, max_norm=0.3),
    OptimConfig(type="muon", lr=0.1, betas2=0.99, mu=0.7, weight_decay=0.05, max_norm=0.3),
    OptimConfig(type="sgd", lr=0.1, momentum=0.8, weight_decay=0.05, max_norm=0.3),
]


@pytest.mark.parametrize("optim", _OPTIMIZERS, ids=lambda optim: optim.type)
def test_every_optimizer_is_torchs_on_the_clipped_gradient(optim: OptimConfig) -> None:
    ours, theirs = _Small(), _Small()
    optimizer = PolicyOptimizer(ours, optim=optim, scheduler=SchedulerConfig(), max_steps=None)
    references = _by_hand(theirs, optim)
    for step in range(4):
        for model in (ours, theirs):
            (model(step) * -1).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        for reference in references:
            reference.step()
            reference.zero_grad()
        report = optimizer.step(step)
        assert float(norm) > 0.3 and report.grad_norm == pytest.approx(float(norm))
        assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True))


def test_gradients_in_bfloat16_are_clipped_to_a_norm_that_is_not_rounded_to_it() -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(size, size, dtype=torch.bfloat16)) for size in (3, 17, 40)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = math.hypot(*(float(gradient.double().norm()) for gradient in gradients))
    assert clip(parameters, max_norm=1.0) == pytest.approx(norm, rel=1e-6)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, (gradient.double() / (norm + 1e-6)).bfloat16())


@pytest.mark.parametrize("optim", _OPTIMIZERS, ids=lambda optim: optim.type)
def test_state_that_is_filled_in_place_goes_on_bit_for_bit(optim: OptimConfig) -> None:
    def take(model: _Small, optimizer: PolicyOptimizer, steps: range) -> None:
        for step in steps:
            (model(step) * -1).backward()
            optimizer.step(step)

    whole, begun, resumed = _Small(), _Small(), _Small()
    first, second, third = (
        PolicyOptimizer(model, optim=optim, scheduler=SchedulerConfig(), max_steps=None)
        for model in (whole, begun, resumed)
    )
    take(whole, first, range(5))
    take(begun, second, range(3))
    with torch.no_grad():
        for mine, theirs in zip(resumed.parameters(), begun.parameters(), strict=True):
            mine.copy_(theirs)
    for name, parts in third.state_tensors().items():
        for part, tensor in parts.items():
            tensor.copy_(second.state_tensors()[name][part])
    take(resumed, third, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(value: float) -> None:
    model, before = _model(), _model()
    optimizer = PolicyOptimizer(model, optim=OptimConfig(lr=0.1), scheduler=SchedulerConfig(), max_steps=None)
    (model(torch.ones(3)) * value).sum().backward()
    report = optimizer.step(0)
    assert report.was_skipped
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
    assert all(float(t.abs().sum()) == 0 for parts in optimizer.state_tensors().values() for t in parts.values())


def test_learning_rate_zero_keeps_negative_zeros() -> None:
    model = _model()
    with torch.no_grad():
        model.weight.fill_(-0.0)
    optimizer = PolicyOptimizer(model, optim=OptimConfig(lr=0.0), scheduler=SchedulerConfig(), max_steps=None)
    model(torch.ones(3)).sum().backward()
    assert not optimizer.step(0).was_skipped
    assert torch.signbit(model.weight).all()
