"""Losses by their names in the SDK, beside their formulas written out token by token."""

import math
from collections.abc import Callable

import pytest
import torch

from millrace.errors import InvalidSpecError
from millrace.tinker.losses import LOSSES, find_loss

L = [-0.5, -2.0, -1.0, -0.1]
Q = [-0.7, -1.0, -1.0, -2.5]
A = [1.0, -0.5, 2.0, -1.5]
MASK = [0.0, 1.0, 1.0, 1.0]


def clip(ratio: float) -> float:
    return min(max(ratio, 0.8), 1.2)


def clipped(ratio: float, advantage: float) -> float:
    return min(ratio * advantage, clip(ratio) * advantage)


RATIOS = [math.exp(a - b) for a, b in zip(L, Q, strict=True)]
SEQUENCE = math.exp(sum(a - b for a, b, m in zip(L, Q, MASK, strict=True) if m) / 3)
EXPECTED = {
    "cross_entropy": -sum(w * v for w, v in zip(A, L, strict=True)),
    "importance_sampling": -sum(r * a for r, a in zip(RATIOS, A, strict=True)),
    "ppo": -sum(map(clipped, RATIOS, A)),
    "cispo": -sum(clip(r) * a * v for r, a, v in zip(RATIOS, A, L, strict=True)),
    "gspo": -sum(clipped(SEQUENCE, a) for a, m in zip(A, MASK, strict=True) if m),
    "dro": -sum(a * v - 0.5 * 0.05 * (v - q) ** 2 for a, v, q in zip(A, L, Q, strict=True)),
}
"""Sums over tokens; weights of the cross-entropy are the advantages here, of which some are negative."""


def inputs_of() -> dict[str, torch.Tensor]:
    made = {"weights": A, "logprobs": Q, "advantages": A, "sequence_ratio_mask": MASK}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in made.items()}


def value_of(name: str, logprobs: torch.Tensor) -> torch.Tensor:
    loss, config = find_loss(name, {})
    return loss.compute(logprobs, inputs_of(), config)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_the_sum_of_its_formula(name: str) -> None:
    assert float(value_of(name, torch.tensor(L, dtype=torch.float64))) == pytest.approx(EXPECTED[name], rel=1e-12)


@pytest.mark.parametrize(
    ("name", "slope"),
    [
        ("cross_entropy", lambda at: -A[at]),
        ("importance_sampling", lambda at: -RATIOS[at] * A[at]),
        ("ppo", lambda at: -RATIOS[at] * A[at] if clipped(RATIOS[at], A[at]) == RATIOS[at] * A[at] else 0.0),
        ("cispo", lambda at: -clip(RATIOS[at]) * A[at]),
        ("dro", lambda at: -(A[at] - 0.05 * (L[at] - Q[at]))),
    ],
)
def test_its_gradient_is_that_of_the_formula(name: str, slope: Callable[[int], float]) -> None:
    logprobs = torch.tensor(L, dtype=torch.float64, requires_grad=True)
    value_of(name, logprobs).backward()
    assert logprobs.grad is not None
    # Where both sides of a minimum are equal either slope is one: the third token's ratio is exactly 1.
    assert logprobs.grad.tolist() == pytest.approx([slope(at) for at in range(len(L))], rel=1e-9)


def test_the_gradient_of_a_sequences_ratio_goes_to_each_token() -> None:
    logprobs = torch.tensor(L, dtype=torch.float64, requires_grad=True)
    value_of("gspo", logprobs).backward()
    assert logprobs.grad is not None
    kept = [m and clipped(SEQUENCE, a) == SEQUENCE * a for m, a in zip(MASK, A, strict=True)]
    expected = [-SEQUENCE * a if keep else 0.0 for a, keep in zip(A, kept, strict=True)]
    assert logprobs.grad.tolist() == pytest.approx(expected)


def test_a_configuration_replaces_the_defaults() -> None:
    loss, config = find_loss("cispo", {"clip_high_threshold": 5.0})
    assert config == {"clip_low_threshold": 0.8, "clip_high_threshold": 5.0}
    logprobs = torch.tensor(L, dtype=torch.float64)
    assert float(loss.compute(logprobs, inputs_of(), config)) != pytest.approx(EXPECTED["cispo"])


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("mean_squared", {}, "loss_fn: must be one of cross_entropy, importance_sampling, ppo"),
        ("stable_reinforce", {}, "its definition is not public"),
        ("ppo", {"beta": 0.1}, "loss_fn_config.beta: is no key of ppo, which has clip_low_threshold"),
        ("ppo", {"clip_low_threshold": 2.0}, "must have 0 <= clip_low_threshold <= clip_high_threshold"),
    ],
)
def test_what_is_no_loss_or_no_key_of_it_is_refused(name: str, config: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidSpecError, match=None) as caught:
        find_loss(name, config)
    assert message in str(caught.value)
