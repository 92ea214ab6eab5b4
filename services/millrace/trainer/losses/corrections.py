"""Corrections for off-policy data, aggregation over tokens, KL to the start model, and entropy.

A correction is a weight or a mask from the ratio of two policies: the one before the batch (p) to the one that
sampled (i). Truncated importance sampling (Yao et al. 2025), IcePop (arXiv:2510.18855), masks by sequence and by
geometric mean.

A correction that is a weight takes exp(p - i) out of the loss's own ratio exp(t - i), and leaves exp(t - p). In the
first optimizer step of a batch p equals t, so that the remaining ratio is 1.
"""

from dataclasses import replace

import torch

from millrace.config.sections.loss import CorrectionConfig, LossConfig
from millrace.trainer.losses.base import LossFunction, LossInputs, TokenLosses, between, sample_means

_WEIGHING = ("token_tis", "sequence_tis", "icepop")
_MAX_LOG = 30.0
"""Bound of the log of a product of ratios, so that its exponential is finite."""


def ratio_of(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Return the ratio in the loss: r, or exp(t - p) if a correction weighs by exp(p - i)."""
    is_weighed = any(each.type in _WEIGHING for each in config.correction)
    return (inputs.log_ratio - inputs.proximal_log_ratio if is_weighed else inputs.log_ratio).exp()


def correction(inputs: LossInputs, config: CorrectionConfig) -> torch.Tensor:
    """Return the factor of one correction for every token, [B, T]; a mask's factor is 0 or 1."""
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
    """Return the product of the ratios over a sample's members, [B, 1]."""
    return (log_ratio * members).sum(-1, keepdim=True).clamp(max=_MAX_LOG).exp()


def _is_within(config: CorrectionConfig, ratio: torch.Tensor) -> torch.Tensor:
    below, above = between(config.low, ratio, config.high)
    return ~below & ~above


# The weights of tokens in the loss of a batch, and the divisor of the sum; neither depends on rows and ranks.


def token_weights(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    """Return the weight of every token, [B, T], by `config.aggregation`; None if all weights are 1.

    Together with `divisor` a token weighs, for "token": 1 / tokens of the batch; "sequence": 1 / (samples of the batch
    * tokens of the sample); "constant" (Dr. GRPO, arXiv:2503.20783): 1 / (samples of the batch * constant_tokens);
    "prompt" (arXiv:2510.13786): 1 / (groups of the batch * tokens of the group).
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
    """Return the divisor of the loss's sum over a batch: its rl tokens, or its samples or groups with any.

    `config.aggregation` decides. Without `num_groups` each sample counts as a group.
    """
    if config.aggregation == "token":
        return num_tokens
    return num_samples if config.aggregation != "prompt" or num_groups is None else num_groups


# Terms that keep a policy near a reference (KL), or its distributions wide (entropy bonus).
#
# With t = trainer log-prob, i = inference log-prob, l = t - ref and r = exp(t - i), the gradient of KL(policy,
# reference) is the mean of r l grad t over what was sampled. sg(r) l^2 / 2 (k2) and r (exp(-l) - 1 + l) (k3) as
# losses have it, and so has -coef l added to the advantage (k1 in the reward) where the loss weighs by r. As a loss,
# k1 has a gradient whose mean is 0.


def regularized(loss_of: LossFunction, inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """Return the losses of `loss_of` with the terms of `[trainer.loss] kl` and `entropy_coef`.

    With `kl.place = "reward"` the KL term is subtracted from the advantages that `loss_of` gets.
    """
    losses = loss_of(_rewarded(inputs, config), config)
    terms = [term for term in (_kl(inputs, config), _entropy_bonus(inputs, config)) if term is not None]
    if not terms:
        return losses
    members = inputs.rl_members
    weights = token_weights(inputs, config)
    term = sum(terms) * inputs.rl_weights * (1.0 if weights is None else weights)
    return replace(losses, rl=losses.rl + torch.where(members, term, 0.0))


def log_ratio_to_reference(inputs: LossInputs) -> torch.Tensor | None:
    """Return the log-ratio to the reference on sampled tokens, 0 elsewhere; None without a reference."""
    if inputs.reference_logprobs is None:
        return None
    return torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.reference_logprobs, 0.0)


def _rewarded(inputs: LossInputs, config: LossConfig) -> LossInputs:
    log_ratio = log_ratio_to_reference(inputs)
    if config.kl is None or config.kl.place != "reward" or log_ratio is None:
        return inputs
    return replace(inputs, advantages=inputs.advantages - config.kl.coef * log_ratio.detach())


def _kl(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    log_ratio = log_ratio_to_reference(inputs)
    if config.kl is None or config.kl.place != "loss" or log_ratio is None:
        return None
    ratio = torch.exp(torch.where(inputs.rl_members, inputs.log_ratio, 0.0))
    if config.kl.estimator == "k2":
        return config.kl.coef * ratio.detach() * log_ratio**2 / 2
    return config.kl.coef * ratio * (torch.expm1(-log_ratio) + log_ratio)


def _entropy_bonus(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    return None if inputs.entropy is None or not config.entropy_coef else -config.entropy_coef * inputs.entropy
