"""`ipo`: importance sampling in a symmetric trust region of the probability, as prime-rl has it."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier, between


def ipo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = r, but 0 where exp(t) - exp(i) is outside of plus or minus `ipo_threshold`, whatever the advantage is."""
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    below, above = between(-config.ipo_threshold, difference, config.ipo_threshold)
    low, high = inputs.rl_members & below, inputs.rl_members & above
    keep = inputs.rl_members & ~low & ~high
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )
