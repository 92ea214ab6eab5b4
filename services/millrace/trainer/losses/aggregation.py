"""What a token weighs in the loss of a batch, and what the sum is divided by: no layout of rows or ranks changes it."""

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.base import LossInputs


def token_weights(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    """The weight of every token of rows [B, T]; None where all weigh 1.

    token: 1 / tokens of the batch. sequence: 1 / (samples of the batch * tokens of the sample). constant (Dr. GRPO,
    arXiv:2503.20783): 1 / (samples of the batch * constant_tokens). prompt (arXiv:2510.13786): 1 / (groups of the batch
    * tokens of the group). `divisor` has the batch's part of it.
    """
    rl_members, dtype = inputs.rl_members, inputs.advantages.dtype
    if config.aggregation == "token":
        return None
    if config.aggregation == "constant":
        tokens = 1 if config.constant_tokens is None else config.constant_tokens
        return torch.full_like(rl_members, 1.0 / tokens, dtype=dtype)
    counts = rl_members.sum(-1, keepdim=True) if config.aggregation == "sequence" else inputs.group_tokens
    if counts is None:  # each row a group of its own
        counts = rl_members.sum(-1, keepdim=True)
    return counts.clamp_min(1).to(dtype).reciprocal().expand_as(rl_members)


def divisor(config: LossConfig, *, num_tokens: int, num_samples: int, num_groups: int | None = None) -> int:
    """Return what the sum over the batch is divided by: its rl tokens, or its samples or groups with any.

    Without `num_groups` each sample is a group of its own.
    """
    if config.aggregation == "token":
        return num_tokens
    return num_samples if config.aggregation != "prompt" or num_groups is None else num_groups
