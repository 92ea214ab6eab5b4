"""The types of a policy loss: a detached multiplier per token, its inputs, and the losses made from it.

With t = trainer log-prob, i = inference log-prob, l = t - i (0 outside of the mask), r = exp(l), A = advantage and
w = weight of the token (`corrections.py`), the loss of a token of the rl component is

    -w A f exp(t - sg(t)),   so that its value is -w A f and its gradient -w A f * grad t,

with f the multiplier, detached, of the loss (one file each) times those of the corrections. Cross-entropy of a token is
-t. Each component is summed over its member tokens and divided by a number of the *whole* batch, so that the gradient
does not depend on how the batch is cut into micro-batches and ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from millrace.config.sections.loss import LossConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token tensors of one shape, [B, T]: a row is a sample. `loss_mask` is bool: 1 where the policy sampled.

    `proximal_logprobs` are those of the policy before the batch, from the batch's second optimizer step on and if the
    loss needs them; None means that they equal the trainer's. `entropy` of the policy, with its gradient, is set if it
    is part of the loss; `reference_logprobs` are those of the start model if the run compares with it. `group_tokens`
    [B, 1] are the rl tokens of each row's group in the minibatch, if tokens are weighted by them.
    """

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    rl_weights: torch.Tensor
    ce_weights: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    group_tokens: torch.Tensor | None = None

    @property
    def rl_members(self) -> torch.Tensor:
        """Return the tokens of the rl component, bool."""
        return self.loss_mask & (self.rl_weights != 0)

    @property
    def log_ratio(self) -> torch.Tensor:
        """Return l with its gradient; 0 outside of the mask, where there is no inference log-prob."""
        return torch.where(self.loss_mask, self.trainer_logprobs - self.inference_logprobs, 0.0)

    @property
    def proximal_log_ratio(self) -> torch.Tensor:
        """Return p - i without gradient, 0 outside of the mask; p is the log-prob under the policy before the batch."""
        proximal = self.trainer_logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return torch.where(self.loss_mask, proximal - self.inference_logprobs, 0.0).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """The factor f of every token, 0 if it is dropped or no member; `low` and `high` are those dropped or clipped."""

    factor: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


PolicyLoss = Callable[[LossInputs, LossConfig], Multiplier]
"""A policy loss; called without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Weighted loss per token of both components (0 outside their members), and what the metrics need.

    `rl_members` and `ce_members` select each component's tokens. `mismatch_kl` is k3 of the log-ratio. `is_masked_low`
    and `is_masked_high` say which rl tokens the trust region dropped or clipped, and on which side. `advantages` are
    those that the loss used.
    """

    rl: torch.Tensor
    ce: torch.Tensor
    rl_members: torch.Tensor
    ce_members: torch.Tensor
    mismatch_kl: torch.Tensor
    is_masked_low: torch.Tensor
    is_masked_high: torch.Tensor
    advantages: torch.Tensor


LossFunction = Callable[[LossInputs, LossConfig], TokenLosses]
"""A loss as `millrace run replay --loss my.module:fn` takes it: `policy_losses` is one."""


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(l) - l - 1, computed in float64: in float32 the result would be rounding error. Never negative."""
    exact = log_ratio.double()
    return (torch.expm1(exact) - exact).clamp_min(0)


def outside_support(trainer_logprobs: torch.Tensor) -> torch.Tensor:
    """Return which tokens the truncation excludes under the trainer's policy: those with the log-prob -inf."""
    return trainer_logprobs == -math.inf


def sample_means(values: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Return the mean of each row's members, [B, 1]; 0 for a row without members."""
    return (values * members).sum(-1, keepdim=True) / members.sum(-1, keepdim=True).clamp_min(1)


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Return the bounds of the ratio, 1 - clip_low and 1 + clip_high; None of them counts as 0."""
    low = 0.0 if config.clip_low is None else config.clip_low
    high = 0.0 if config.clip_high is None else config.clip_high
    return 1 - low, 1 + high


def between(low: float, values: torch.Tensor, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which values are below `low`, and which are above `high`."""
    return values < low, values > high
