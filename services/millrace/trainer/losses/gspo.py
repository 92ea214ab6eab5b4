"""`gspo`: group sequence policy optimization (arXiv:2507.18071), with the gradient of its token form."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier, between, clip_range, sample_means

_MAX_LOG = 10.0
"""Bound of the log of the ratio, as verl has it."""


def gspo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = s, the geometric mean of r over the sample, but 0 for all of its tokens where s is clipped as in ppo."""
    members = inputs.rl_members
    ratio = sample_means(inputs.log_ratio, members).clamp(max=_MAX_LOG).exp().expand_as(inputs.log_ratio)
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)
