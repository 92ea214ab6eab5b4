"""The loss against vectors computed by hand, in float64."""

import math
from typing import Any

import pytest
import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses import LossInputs, token_losses, total_loss


def _inputs(
    trainer: list[float],
    inference: list[float],
    advantages: list[float],
    mask: list[int],
    rl_weights: list[float] | None = None,
    ce_weights: list[float] | None = None,
) -> LossInputs:
    def tensor(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    return LossInputs(
        trainer_logprobs=tensor(trainer).requires_grad_(),
        inference_logprobs=tensor(inference),
        advantages=tensor(advantages),
        loss_mask=torch.tensor(mask, dtype=torch.bool),
        rl_weights=tensor(rl_weights or [1.0] * len(trainer)),
        ce_weights=tensor(ce_weights or [0.0] * len(trainer)),
    )


def _log(*probabilities: float) -> list[float]:
    return [math.log(p) for p in probabilities]


def test_each_branch_of_the_default_loss() -> None:
    # p_trainer, p_inference, A:          kept, l = ln 1.2        rose too far, A > 0   fell too far, A < 0
    #                                     rose far, A < 0: kept   fell far, A > 0: kept A = 0, fell far: low branch
    inputs = _inputs(
        _log(0.6, 0.9, 0.2, 0.9, 0.2, 0.2),
        _log(0.5, 0.5, 0.5, 0.5, 0.5, 0.5),
        [2.0, 2.0, -2.0, -2.0, 2.0, 0.0],
        [1] * 6,
    )
    losses = token_losses(inputs, LossConfig())
    kl = [1e-3 * math.log(r) ** 2 for r in (1.2, 1.8, 0.4, 1.8, 0.4, 0.4)]
    expected = [-2 * 1.2 + kl[0], kl[1], kl[2], 2 * 1.8 + kl[3], -2 * 0.4 + kl[4], kl[5]]
    assert losses.rl.tolist() == pytest.approx(expected, abs=1e-6)
    # The numbers themselves, so that the formula above is not the only witness.
    assert expected[0] == pytest.approx(-2.3999667588, abs=1e-9)
    assert expected[1] == pytest.approx(0.0003454938, abs=1e-9)
    assert expected[2] == pytest.approx(0.0008395887, abs=1e-9)
    assert losses.is_masked_high.tolist() == [False, True, False, False, False, False]
    assert losses.is_masked_low.tolist() == [False, False, True, False, False, True]
    k3 = [r - math.log(r) - 1 for r in (1.2, 1.8, 0.4, 1.8, 0.4, 0.4)]
    assert losses.mismatch_kl.tolist() == pytest.approx(k3, abs=1e-6)


def test_the_gradient_flows_through_ratio_and_log_ratio() -> None:
    inputs = _inputs(_log(0.6, 0.9), _log(0.5, 0.5), [2.0, 2.0], [1, 1])
    total_loss(token_losses(inputs, LossConfig()), rl_divisor=4, num_ce_tokens=0).backward()
    # d/dt of (-A * exp(t - i) + tau * (t - i)^2) / N; a dropped token keeps only the second term.
    expected = [(-2 * 1.2 + 2e-3 * math.log(1.2)) / 4, 2e-3 * math.log(1.8) / 4]
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx(expected, abs=1e-9)


def test_the_mask_decides_what_counts() -> None:
    # Token 0 is a prompt token whose inference log-prob is not one: no loss, no gradient, no overflow.
    inputs = _inputs([-900.0, *_log(0.6)], [0.0, *_log(0.5)], [5.0, 1.0], [0, 1])
    losses = token_losses(inputs, LossConfig())
    assert losses.rl.tolist() == pytest.approx([0.0, -1.2 + 1e-3 * math.log(1.2) ** 2], abs=1e-9)
    losses.rl.sum().backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None and gradient[0] == 0 and torch.isfinite(gradient).all()


def test_weights_scale_and_select_the_rl_component() -> None:
    inputs = _inputs(_log(0.6, 0.6, 0.6), _log(0.5, 0.5, 0.5), [1.0] * 3, [1] * 3, rl_weights=[1.0, 0.5, 0.0])
    losses = token_losses(inputs, LossConfig())
    one = -1.2 + 1e-3 * math.log(1.2) ** 2
    assert losses.rl.tolist() == pytest.approx([one, one / 2, 0.0], abs=1e-9)
    assert losses.rl_members.tolist() == [True, True, False]


def test_cross_entropy_does_not_depend_on_the_loss_mask() -> None:
    inputs = _inputs(_log(0.25, 0.5, 0.5), [0.0, 0.0, 0.0], [0.0] * 3, [0, 0, 1], ce_weights=[1.0, 2.0, 0.0])
    losses = token_losses(inputs, LossConfig())
    assert losses.ce.tolist() == pytest.approx([math.log(4), 2 * math.log(2), 0.0], abs=1e-9)
    assert losses.ce_members.tolist() == [True, True, False]


def test_components_are_divided_by_their_own_global_counts() -> None:
    inputs = _inputs(_log(0.5, 0.25), _log(0.5, 1.0), [3.0, 0.0], [1, 0], ce_weights=[0.0, 1.0])
    losses = token_losses(inputs, LossConfig())
    total = total_loss(losses, rl_divisor=10, num_ce_tokens=5)
    assert float(total.detach()) == pytest.approx(-3.0 / 10 + math.log(4) / 5, abs=1e-9)
    empty = total_loss(token_losses(_inputs([-1.0], [0.0], [0.0], [0]), LossConfig()), rl_divisor=0, num_ce_tokens=0)
    assert float(empty.detach()) == 0.0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"adv_tau": 0.5}, -1.2 + 1e-3 * math.log(1.2) ** 2),
        ({"kl_tau": 0.0}, -2.4),
        ({"dppo_mask_high": 0.05}, 1e-3 * math.log(1.2) ** 2),
    ],
)
def test_every_knob_does_something(change: dict[str, Any], expected: float) -> None:
    losses = token_losses(_inputs(_log(0.6), _log(0.5), [2.0], [1]), LossConfig(**change))
    assert losses.rl.item() == pytest.approx(expected, abs=1e-9)


def test_low_knob_drops_what_fell() -> None:
    kept = token_losses(_inputs(_log(0.4), _log(0.5), [-1.0], [1]), LossConfig())
    dropped = token_losses(_inputs(_log(0.4), _log(0.5), [-1.0], [1]), LossConfig(dppo_mask_low=0.05))
    assert kept.rl.item() == pytest.approx(0.8 + 1e-3 * math.log(0.8) ** 2, abs=1e-9)
    assert dropped.rl.item() == pytest.approx(1e-3 * math.log(0.8) ** 2, abs=1e-9)


def _float32(trainer: list[float], inference: list[float], advantages: list[float]) -> LossInputs:
    ones = torch.ones(len(trainer))
    return LossInputs(
        trainer_logprobs=torch.tensor(trainer).requires_grad_(),
        inference_logprobs=torch.tensor(inference),
        advantages=torch.tensor(advantages),
        loss_mask=ones.bool(),
        rl_weights=ones,
        ce_weights=ones * 0,
    )


def test_a_dropped_token_with_an_infinite_ratio_keeps_the_gradient_finite() -> None:
    # exp(100) overflows float32: the trust region drops the token, and what is left of it is the squared log-ratio.
    inputs = _float32([-0.01, -0.5], [-100.01, -0.6], [1.0, 1.0])
    losses = token_losses(inputs, LossConfig())
    assert losses.is_masked_high.tolist() == [True, False]
    assert losses.rl.tolist() == pytest.approx([1e-3 * 100**2, -math.exp(0.1) + 1e-3 * 0.1**2], rel=1e-5)
    losses.rl.sum().backward()
    gradient = inputs.trainer_logprobs.grad
    assert gradient is not None
    assert gradient.tolist() == pytest.approx([2e-3 * 100, -math.exp(0.1) + 2e-3 * 0.1], rel=1e-5)


def test_ordinary_tokens_are_bit_for_bit_those_of_the_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    trainer = -torch.rand(1000, generator=generator) * 6
    inference = trainer + torch.randn(1000, generator=generator) * 0.5
    advantages = torch.randn(1000, generator=generator)
    inputs = _float32(trainer.tolist(), inference.tolist(), advantages.tolist())
    losses = token_losses(inputs, LossConfig())
    losses.rl.sum().backward()
    leaf = trainer.clone().requires_grad_()
    log_ratio = leaf - inference
    difference = leaf.detach().exp() - inference.exp()
    keep = ~torch.where(advantages > 0, difference > 0.2, difference < -0.2)
    assert 0 < int(keep.sum()) < 1000
    expected = torch.where(keep, -advantages * torch.exp(log_ratio), 0.0) + 1e-3 * log_ratio**2
    expected.sum().backward()
    assert torch.equal(losses.rl, expected)
    assert inputs.trainer_logprobs.grad is not None and leaf.grad is not None
    assert torch.equal(inputs.trainer_logprobs.grad, leaf.grad)


def test_the_mismatch_of_nearly_equal_log_probs_is_half_the_square_and_never_negative() -> None:
    differences = [0.0, 1e-7, -1e-7, 3e-4, -3e-4, 1e-3]
    inputs = _float32([-20.0 + d for d in differences], [-20.0] * len(differences), [0.0] * len(differences))
    exact = (inputs.trainer_logprobs - inputs.inference_logprobs).double().tolist()  # as float32 has them
    found = token_losses(inputs, LossConfig()).mismatch_kl
    assert found.dtype == torch.float64 and (found >= 0).all()
    assert found.tolist() == pytest.approx([math.expm1(d) - d for d in exact], rel=1e-6, abs=1e-18)
