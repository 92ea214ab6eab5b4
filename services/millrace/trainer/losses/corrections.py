"""Corrections for off-policy data: weights and masks from the ratio of two policies, that before the batch (p) to the
one that sampled (i).

Truncated importance sampling (Yao et al. 2025), IcePop (arXiv:2510.18855), masks by sequence and by geometric mean.
A correction that weighs takes exp(p - i) out of the loss's own ratio exp(t - i), and leaves exp(t - p). In the first
optimizer step of a batch the policy before it is the trained one, so that the latter is 1.
"""

import torch

from millrace.config.sections.loss import CorrectionConfig, LossConfig
from millrace.trainer.losses.base import LossInputs, between, sample_means

_WEIGHING = ("token_tis", "sequence_tis", "icepop")
_MAX_LOG = 30.0
"""Bound of the log of a product of ratios: above it, its size says nothing."""


def ratio_of(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """The ratio that a loss is made of: r; exp(t - p) where a correction weighs by exp(p - i)."""
    is_weighed = any(each.type in _WEIGHING for each in config.correction)
    return (inputs.log_ratio - inputs.proximal_log_ratio if is_weighed else inputs.log_ratio).exp()


def correction(inputs: LossInputs, config: CorrectionConfig) -> torch.Tensor:
    """The factor of one correction for every token, [B, T]."""
    members, log_ratio = inputs.rl_members, inputs.proximal_log_ratio
    match config.type:
        case "token_tis":
            return log_ratio.exp().clamp(max=config.high)
        case "sequence_tis":
            return _product(log_ratio, members).clamp(max=config.high).expand_as(log_ratio)
        case "icepop":
            ratio = log_ratio.exp()
            return torch.where(_is_within(config, ratio), ratio, 0.0)
        case "token_mask":
            return _is_within(config, log_ratio.exp()).to(log_ratio.dtype)
        case "sequence_mask":
            kept = _is_within(config, _product(log_ratio, members))
        case "geometric_mask":
            kept = _is_within(config, sample_means(log_ratio, members).exp())
    return kept.to(log_ratio.dtype).expand_as(log_ratio)


def _product(log_ratio: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """The product of the ratios over a sample's members, [B, 1]."""
    return (log_ratio * members).sum(-1, keepdim=True).clamp(max=_MAX_LOG).exp()


def _is_within(config: CorrectionConfig, ratio: torch.Tensor) -> torch.Tensor:
    below, above = between(config.low, ratio, config.high)
    return ~below & ~above
