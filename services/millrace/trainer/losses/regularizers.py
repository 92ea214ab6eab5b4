"""What keeps a policy near a reference, or its distributions wide: a KL term and an entropy bonus.

With t = trainer log-prob, i = inference log-prob, l = t - ref and r = exp(t - i), the gradient of KL(policy, reference)
is the mean of r l grad t over what was sampled. sg(r) l^2 / 2 (k2) and r (exp(-l) - 1 + l) (k3) as losses have it, and
so has -coef l added to the advantage (k1 in the reward) where the loss weighs by r. As a loss, k1 has a gradient whose
mean is 0.
"""

from dataclasses import replace

import torch

from millrace.config.sections.loss import LossConfig
from millrace.trainer.losses.aggregation import token_weights
from millrace.trainer.losses.base import LossFunction, LossInputs, TokenLosses


def regularized(loss_of: LossFunction, inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """The losses of `loss_of` with what `[trainer.loss] kl` and `entropy_coef` add to advantages and loss."""
    losses = loss_of(_rewarded(inputs, config), config)
    terms = [term for term in (_kl(inputs, config), _entropy_bonus(inputs, config)) if term is not None]
    if not terms:
        return losses
    members = inputs.rl_members
    weights = token_weights(inputs, config)
    term = sum(terms) * inputs.rl_weights * (1.0 if weights is None else weights)
    return replace(losses, rl=losses.rl + torch.where(members, term, 0.0))


def log_ratio_to_reference(inputs: LossInputs) -> torch.Tensor | None:
    """l where the policy sampled, 0 elsewhere; None without a reference."""
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
