"""`ppo`: the clipped surrogate (arXiv:1707.06347), clip-higher (arXiv:2503.14476), dual clip (arXiv:1912.09729).

GRPO and DAPO use it. With a correction that weighs by the ratio, this is decoupled PPO: the policy before the batch
takes the place of the one that sampled, and nothing is clipped in the first optimizer step of a batch.
"""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs, Multiplier, between, clip_range
from millrace.trainer.losses.corrections import ratio_of


def ppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """f = r, but 0 where A > 0 and r > 1 + clip_high, where A < 0 and r < 1 - clip_low, or A < 0 and r > dual_clip."""
    ratio, members = ratio_of(inputs, config), inputs.rl_members
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    if config.dual_clip is not None:
        high = high | (members & (inputs.advantages < 0) & (ratio > config.dual_clip))
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)
