"""`default`: DPPO with binary total variation (arXiv:2602.04879), as prime-rl has it."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier


def dppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = r, but 0 where exp(t) - exp(i) is above mask_high and A > 0, or below -mask_low and A <= 0."""
    members, is_positive = inputs.rl_members, inputs.advantages > 0
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    high = members & is_positive & (difference > config.dppo_mask_high)
    low = members & ~is_positive & (difference < -config.dppo_mask_low)
    keep = members & ~high & ~low
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )
