"""`importance_sampling`: REINFORCE with the ratio to the policy that sampled (Williams 1992, off-policy)."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier
from millrace.trainer.losses.corrections import ratio_of


def importance_sampling(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = r; with a correction that weighs by the ratio, what is left of it."""
    members = inputs.rl_members
    nothing = torch.zeros_like(members)
    return Multiplier(factor=torch.where(members, ratio_of(inputs, config), 0.0), low=nothing, high=nothing)
