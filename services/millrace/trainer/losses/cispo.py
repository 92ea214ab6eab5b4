"""`cispo`: clipped importance weights, no token is dropped (arXiv:2506.13585; ScaleRL, arXiv:2510.13786)."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier, between, clip_range


def cispo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = r, clipped to 1 - clip_low … 1 + clip_high."""
    members, ratio = inputs.rl_members, inputs.log_ratio.exp()
    lowest, highest = clip_range(config)
    low, high = between(lowest, ratio, highest)
    factor = torch.where(members, ratio.clamp(lowest, highest), 0.0)
    return Multiplier(factor=factor, low=members & low, high=members & high)
