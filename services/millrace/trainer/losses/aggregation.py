"""What a token weighs in the loss of a batch, and what the sum is divided by: no layout of rows or ranks changes it."""

import torch

from millrace.config.sections.loss import LossConfig


def token_weights(rl_members: torch.Tensor, config: LossConfig, *, dtype: torch.dtype) -> torch.Tensor | None:
    """The weight of every token of rows [B, T]; None where all weigh 1.

    token: 1 / tokens of the batch. sequence: 1 / (samples of the batch * tokens of the sample). constant (Dr. GRPO,
    arXiv:2503.20783): 1 / (samples of the batch * constant_tokens). `divisor` has the batch's part of it.
    """
    if config.aggregation == "token":
        return None
    if config.aggregation == "constant":
        tokens = 1 if config.constant_tokens is None else config.constant_tokens
        return torch.full_like(rl_members, 1.0 / tokens, dtype=dtype)
    return rl_members.sum(-1, keepdim=True).clamp_min(1).to(dtype).reciprocal().expand_as(rl_members)


def divisor(config: LossConfig, *, num_tokens: int, num_samples: int) -> int:
    """What the sum over the batch is divided by: its rl tokens, or its samples with any."""
    return num_tokens if config.aggregation == "token" else num_samples
