"""Corrections for off-policy data: weights and masks from the ratio of the trained policy to the one that sampled.

Truncated importance sampling (Yao et al. 2025), IcePop (arXiv:2510.18855), masks by sequence and by geometric mean.
With one optimizer step per batch the policy before the step is the trained one, so its ratio to the one that sampled is
r, and that to the trained one is 1: a correction that weighs takes the place of the loss's own ratio.
"""

import torch

from millrace.config.sections.loss import CorrectionConfig, LossConfig
from millrace.trainer.losses.base import LossInputs, between, sample_means

_WEIGHING = ("token_tis", "sequence_tis", "icepop")
_MAX_LOG = 30.0
"""Bound of the log of a product of ratios: above it, its size says nothing."""


def ratio_of(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """The ratio that a loss is made of: r; 1 where a correction weighs by r."""
    is_weighed = any(each.type in _WEIGHING for each in config.correction)
    return torch.ones_like(inputs.log_ratio) if is_weighed else inputs.log_ratio.exp()


def correction(inputs: LossInputs, config: CorrectionConfig) -> torch.Tensor:
    """The factor of one correction for every token, [B, T]."""
    members = inputs.rl_members
    match config.type:
        case "token_tis":
            return inputs.log_ratio.exp().clamp(max=config.high)
        case "sequence_tis":
            return _product(inputs, members).clamp(max=config.high).expand_as(inputs.log_ratio)
        case "icepop":
            ratio = inputs.log_ratio.exp()
            return torch.where(_is_within(config, ratio), ratio, 0.0)
        case "token_mask":
            return _is_within(config, inputs.log_ratio.exp()).to(inputs.log_ratio.dtype)
        case "sequence_mask":
            kept = _is_within(config, _product(inputs, members))
        case "geometric_mask":
            kept = _is_within(config, sample_means(inputs.log_ratio, members).exp())
    return kept.to(inputs.log_ratio.dtype).expand_as(inputs.log_ratio)


def _product(inputs: LossInputs, members: torch.Tensor) -> torch.Tensor:
    """The product of r over a sample's members, [B, 1]."""
    return (inputs.log_ratio * members).sum(-1, keepdim=True).clamp(max=_MAX_LOG).exp()


def _is_within(config: CorrectionConfig, ratio: torch.Tensor) -> torch.Tensor:
    below, above = between(config.low, ratio, config.high)
    return ~below & ~above
