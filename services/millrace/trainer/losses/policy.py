"""The policy losses: a factor for every sampled token, from log-probs and advantages."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier, between, clip_range, sample_means
from millrace.trainer.losses.corrections import ratio_of

# `default`: DPPO with binary total variation (arXiv:2602.04879), as prime-rl has it.


def dppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = r, but 0 where exp(t) - exp(i) is above mask_high and A > 0, or below -mask_low and A <= 0."""
    members, is_positive = inputs.rl_members, inputs.advantages > 0
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    high = members & is_positive & (difference > config.dppo_mask_high)
    low = members & ~is_positive & (difference < -config.dppo_mask_low)
    keep = members & ~high & ~low
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )


# `cispo`: clipped importance weights, no token is dropped (arXiv:2506.13585; ScaleRL, arXiv:2510.13786).


def cispo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = r, clipped to 1 - clip_low … 1 + clip_high."""
    members, ratio = inputs.rl_members, inputs.log_ratio.exp()
    lowest, highest = clip_range(config)
    low, high = between(lowest, ratio, highest)
    factor = torch.where(members, ratio.clamp(lowest, highest), 0.0)
    return Multiplier(factor=factor, low=members & low, high=members & high)


# `gspo`: group sequence policy optimization (arXiv:2507.18071), with the gradient of its token form.

_MAX_LOG = 10.0
"""Bound of the log of the ratio, as verl has it."""


def gspo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = s, the geometric mean of r over the sample, but 0 for all its tokens if s is outside ppo's bounds."""
    members = inputs.rl_members
    ratio = sample_means(inputs.log_ratio, members).clamp(max=_MAX_LOG).exp().expand_as(inputs.log_ratio)
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)


# `importance_sampling`: REINFORCE with the ratio to the policy that sampled (Williams 1992, off-policy).


def importance_sampling(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = r, or exp(t - p) if a correction weighs by the rest of the ratio; nothing is clipped."""
    members = inputs.rl_members
    nothing = torch.zeros_like(members)
    return Multiplier(factor=torch.where(members, ratio_of(inputs, config), 0.0), low=nothing, high=nothing)


# `ipo`: importance sampling in a symmetric trust region of the probability, as prime-rl has it.


def ipo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = r, but 0 where |exp(t) - exp(i)| is above `ipo_threshold`, for advantages of either sign."""
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    below, above = between(-config.ipo_threshold, difference, config.ipo_threshold)
    low, high = inputs.rl_members & below, inputs.rl_members & above
    keep = inputs.rl_members & ~low & ~high
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )


# `ppo`: the clipped surrogate (arXiv:1707.06347), clip-higher (arXiv:2503.14476), dual clip (arXiv:1912.09729).
#
# GRPO and DAPO use it. With a correction that weighs by the ratio, this is decoupled PPO: the policy before the batch
# replaces the one that sampled, and nothing is clipped in the first optimizer step of a batch.


def ppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return f = r (`ratio_of`), but 0 where r is clipped.

    That is where A > 0 and r > 1 + clip_high, A < 0 and r < 1 - clip_low, or A < 0 and r > dual_clip.
    """
    ratio, members = ratio_of(inputs, config), inputs.rl_members
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    if config.dual_clip is not None:
        high = high | (members & (inputs.advantages < 0) & (ratio > config.dual_clip))
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)
