"""Policy losses, one small function each, corrections for off-policy data, and how tokens are weighted."""

from functools import partial

import torch

from millrace.config.sections.loss import LossConfig
from millrace.custom_code import CustomCode
from millrace.trainer.losses.base import LossFunction, LossInputs, PolicyLoss, TokenLosses, k3, outside_support
from millrace.trainer.losses.corrections import correction, divisor, log_ratio_to_reference, regularized, token_weights
from millrace.trainer.losses.custom import load_custom_loss, try_loss
from millrace.trainer.losses.policy import cispo, dppo, gspo, importance_sampling, ipo, ppo

LOSSES: dict[str, PolicyLoss] = {
    "default": dppo,
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "importance_sampling": importance_sampling,
    "ipo": ipo,
}
"""From `[trainer.loss] type` to the function. A new loss is one function, one line here, one row in its test."""


def token_losses(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """Return loss and diagnostics of every token as `[trainer.loss]` says, with KL and entropy terms.

    For `type = "custom"` this is the default loss; `loss_function` loads the user's.
    """
    return regularized(policy_losses, inputs, config)


def loss_function(config: LossConfig, code: CustomCode) -> LossFunction:
    """Return the loss function of a run; raise InvalidSpecError if the user's own function is unusable."""
    if config.type != "custom":
        return token_losses
    loss_of = partial(regularized, load_custom_loss(config.import_path or "", code))
    try_loss(loss_of, config)
    return loss_of


def policy_losses(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """Return policy loss and cross-entropy with corrections and weights, without the KL and entropy terms.

    A loss of the user's own may call it: for `type = "custom"` it is the default loss.
    """
    rl_members, ce_members = inputs.rl_members, inputs.ce_weights != 0
    log_ratio = inputs.log_ratio
    with torch.no_grad():
        made = LOSSES["default" if config.type == "custom" else config.type](inputs, config)
        factor = made.factor
        if config.max_importance_ratio is not None:
            factor = factor.clamp(max=config.max_importance_ratio)
        for each in config.correction:
            weight = correction(inputs, each)
            factor = torch.where(weight == 0, 0.0, factor * weight)  # a dropped token's ratio may be infinite
        factor = -config.adv_tau * inputs.advantages * factor
        weights = token_weights(inputs, config)
        if weights is not None:
            factor = factor * weights
        mismatch_kl = k3(log_ratio)
    # 1 in value, with the gradient of t; values of tokens that are no members must not reach exp.
    unit = torch.exp(torch.where(rl_members, inputs.trainer_logprobs - inputs.trainer_logprobs.detach(), 0.0))
    policy_term = torch.where(rl_members, factor * unit, 0.0)
    if config.type in ("default", "ipo", "custom"):
        penalty = config.kl_tau * log_ratio**2
        policy_term = policy_term + (penalty if weights is None else penalty * weights)
    return TokenLosses(
        rl=torch.where(rl_members, inputs.rl_weights * policy_term, 0.0),
        ce=torch.where(ce_members, -inputs.trainer_logprobs * inputs.ce_weights, 0.0),
        rl_members=rl_members,
        ce_members=ce_members,
        mismatch_kl=mismatch_kl,
        is_masked_low=made.low,
        is_masked_high=made.high,
        advantages=inputs.advantages,
    )


def total_loss(losses: TokenLosses, *, rl_divisor: int, num_ce_tokens: int) -> torch.Tensor:
    """Return the micro-batch's share of the batch's loss; `rl_divisor` and `num_ce_tokens` are of the whole batch."""
    return losses.rl.sum() / max(rl_divisor, 1) + losses.ce.sum() / max(num_ce_tokens, 1)


__all__ = [
    "LOSSES",
    "LossFunction",
    "LossInputs",
    "TokenLosses",
    "divisor",
    "k3",
    "log_ratio_to_reference",
    "loss_function",
    "outside_support",
    "token_losses",
    "total_loss",
]
