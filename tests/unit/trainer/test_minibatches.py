"""Several optimizer steps per batch: how it is cut, decoupled PPO in float64, and what the steps report together."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.config.load import validate_document
from millrace.config.sections.loss import LossConfig
from millrace.errors import InvalidSpecError
from millrace.trainer.learning.optimizer import OptimizerReport
from millrace.trainer.learning.plan import plan_minibatches
from millrace.trainer.losses import LossInputs, token_losses, total_loss

A = 0.7


@given(st.lists(st.integers(0, 12), min_size=1, max_size=40), st.integers(1, 8))
def test_groups_stay_whole_and_are_dealt_evenly(ordinals: list[int], count: int) -> None:
    parts = plan_minibatches(ordinals, count)
    assert sorted(index for part in parts for index in part) == list(range(len(ordinals)))
    groups = [{ordinals[index] for index in part} for part in parts]
    assert sum(map(len, groups)) == len(set(ordinals)), "no group is in two of them"
    assert len(parts) == min(count, len(set(ordinals)))
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert all(part == sorted(part) for part in parts)


def test_the_cut_by_hand() -> None:
    """The groups 3 and 7 are the first and third, 5 and 9 the second and fourth."""
    assert plan_minibatches([7, 7, 3, 3, 9, 9, 5], 2) == [[0, 1, 2, 3], [4, 5, 6]]
    assert plan_minibatches([4, 4], 3) == [[0, 1]]
    assert plan_minibatches([], 3) == [[]]


TOKENS = [(-1.0, -1.3, -2.4), (-0.4, -0.1, -0.2), (-2.0, -1.5, -0.9), (-0.9, -0.9, -1.0), (-0.5, -0.9, -0.7)]
"""Log-probs of the trained policy (t), of that before the batch (p) and of that which sampled (i)."""


def inputs_of(advantage: float, *, is_first: bool = False) -> LossInputs:
    t, p, i = (torch.tensor([[-50.0, *column]], dtype=torch.float64) for column in zip(*TOKENS, strict=True))
    ones = torch.ones_like(t)
    mask = torch.tensor([[False] + [True] * len(TOKENS)])
    return LossInputs(
        trainer_logprobs=(p if is_first else t).requires_grad_(),
        inference_logprobs=i,
        advantages=ones * advantage,
        loss_mask=mask,
        rl_weights=ones,
        ce_weights=ones * 0,
        proximal_logprobs=None if is_first else p,
    )


def gradient(inputs: LossInputs, config: LossConfig) -> list[float]:
    total_loss(token_losses(inputs, config), rl_divisor=len(TOKENS), num_ce_tokens=0).backward()
    assert inputs.trainer_logprobs.grad is not None
    return inputs.trainer_logprobs.grad[0, 1:].tolist()


def decoupled(advantage: float, weight: Any, *, low: float, high: float) -> list[float]:
    """Return the objective of decoupled PPO (arXiv:2110.00641, eq. 5), token by token, weighed by a function of p /
    mu.
    """
    found = []
    for t, p, i in TOKENS:
        log_prob = torch.tensor(t, dtype=torch.float64, requires_grad=True)
        ratio = log_prob.exp() / math.exp(p)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
        (-weight(math.exp(p) / math.exp(i)) * surrogate / len(TOKENS)).backward()
        found.append(float(log_prob.grad or 0.0))
    return found


@pytest.mark.parametrize("advantage", [A, -A])
@pytest.mark.parametrize(
    ("correction", "weight"),
    [
        ({"type": "token_tis", "high": 1.2}, lambda r: min(r, 1.2)),
        ({"type": "icepop", "low": 0.6, "high": 2.0}, lambda r: r if 0.6 <= r <= 2.0 else 0.0),
        (
            {"type": "sequence_tis", "high": 1.6},
            lambda r: min(math.prod(math.exp(p - i) for _, p, i in TOKENS), 1.6),
        ),
    ],
    ids=["token_tis", "icepop", "sequence_tis"],
)
def test_decoupled_ppo_clips_around_the_policy_before_the_batch(
    correction: dict[str, Any], weight: Any, advantage: float
) -> None:
    config = LossConfig.model_validate({"type": "ppo", "clip_high": 0.28, "correction": [correction]})
    wanted = decoupled(advantage, weight, low=0.2, high=0.28)
    assert gradient(inputs_of(advantage), config) == pytest.approx(wanted, abs=1e-12)
    assert 0.0 in wanted and any(wanted), "some are clipped, some are not"


@pytest.mark.parametrize("type_", ["ppo", "importance_sampling"])
def test_in_the_first_step_nothing_has_moved(type_: str) -> None:
    """No proximal policy represents the trained one."""
    config = LossConfig.model_validate({"type": type_, "correction": [{"type": "token_tis"}]})
    first = inputs_of(A, is_first=True)
    same = replace(first, trainer_logprobs=first.trainer_logprobs.detach().clone().requires_grad_())
    same = replace(same, proximal_logprobs=same.trainer_logprobs.detach())
    wanted = [-min(math.exp(p - i), 2.0) * A / len(TOKENS) for _, p, i in TOKENS]
    assert gradient(first, config) == gradient(same, config) == pytest.approx(wanted)


@pytest.mark.parametrize("type_", ["default", "ppo", "gspo", "cispo", "importance_sampling"])
def test_without_a_correction_a_loss_looks_at_the_policy_that_sampled(type_: str) -> None:
    config = LossConfig.model_validate({"type": type_})
    assert gradient(inputs_of(A), config) == gradient(replace(inputs_of(A), proximal_logprobs=None), config)


def test_a_mask_looks_at_the_policy_before_the_batch() -> None:
    config = LossConfig.model_validate(
        {"type": "importance_sampling", "correction": [{"type": "token_mask", "low": 0.5, "high": 2.0}]}
    )
    wanted = [-math.exp(t - i) * A / len(TOKENS) if 0.5 <= math.exp(p - i) <= 2 else 0.0 for t, p, i in TOKENS]
    assert gradient(inputs_of(A), config) == pytest.approx(wanted) and 0.0 in wanted


def test_reports_of_several_steps_are_one() -> None:
    one, bad = OptimizerReport(lr=0.1, grad_norm=2.0), OptimizerReport(lr=0.1, grad_norm=math.nan, num_skipped=1)
    both = OptimizerReport.merged([one, bad, OptimizerReport(lr=0.1, grad_norm=4.0)])
    assert (both.lr, both.grad_norm, both.num_steps, both.num_skipped) == (0.1, 3.0, 3, 1) and not both.was_skipped
    assert OptimizerReport.merged([bad, bad]).was_skipped and math.isnan(OptimizerReport.merged([bad, bad]).grad_norm)
    assert OptimizerReport.merged([one]) == one


def document(**keys: Any) -> dict[str, Any]:
    orchestrator = {"batch_size": 12, "rollouts_per_example": 4, "env": [{"id": "e"}]}
    return {"model": {"name": "gpt2"}, "orchestrator": orchestrator, "trainer": keys}


def test_more_steps_than_groups_are_refused_with_the_reason() -> None:
    assert validate_document(document(minibatches=3)).trainer.minibatches == 3
    with pytest.raises(InvalidSpecError, match="must be at most the groups of a batch, which are 3") as raised:
        validate_document(document(minibatches=4))
    assert raised.value.violations[0].field == "trainer.minibatches"
    with pytest.raises(InvalidSpecError, match="minibatches"):
        validate_document(document(minibatches=0))
