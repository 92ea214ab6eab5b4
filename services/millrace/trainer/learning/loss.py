"""The loss, as pure functions over per-token tensors.

With t = trainer log-prob, i = inference log-prob, l = t - i, rho = exp(l), A = advantage and dp = exp(t) - exp(i), the
default loss of a token is

    -keep * adv_tau * A * rho + kl_tau * l**2,    keep = not (dp > mask_high if A > 0 else dp < -mask_low)

("DPPO binary total variation", arXiv:2602.04879, with the squared log-ratio of Kimi K2.5, arXiv:2602.02276, as prime-rl
combines them). The gradient flows through rho and l; the ratio is not clipped. Cross-entropy of a token is -t. Each
component is summed over its member tokens, times their weights, and divided by their number in the *whole* batch, so
the gradient does not depend on how the batch is cut into micro-batches and ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from millrace.config.sections.trainer import LossConfig
from millrace.trainer.learning.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token tensors of one shape. `loss_mask` is bool: 1 where the policy sampled the token."""

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    rl_weights: torch.Tensor
    ce_weights: torch.Tensor

    @classmethod
    def of(cls, micro_batch: MicroBatch, trainer_logprobs_BT: torch.Tensor) -> "LossInputs":
        """The inputs of a micro-batch.

        Tokens outside of what the truncation leaves under the trainer's policy are masked: they have no log-prob there.
        Advantages that are log-ratios of a reference to the behaviour policy become those to the trainer's.
        """
        is_outside_BT = outside_support(trainer_logprobs_BT)
        logprobs_BT = torch.where(is_outside_BT, micro_batch.inference_logprobs_BT, trainer_logprobs_BT)
        moved_BT = (logprobs_BT.detach() - micro_batch.inference_logprobs_BT) * micro_batch.loss_mask_BT
        return cls(
            trainer_logprobs=logprobs_BT,
            inference_logprobs=micro_batch.inference_logprobs_BT,
            advantages=micro_batch.advantages_BT - micro_batch.reference_kl_B[:, None] * moved_BT,
            loss_mask=micro_batch.loss_mask_BT & ~is_outside_BT,
            rl_weights=micro_batch.rl_weights_BT,
            ce_weights=micro_batch.ce_weights_BT * ~is_outside_BT,
        )


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """exp(l) - l - 1 in float64, never negative: in float32 it would be the rounding error of its terms."""
    exact = log_ratio.double()
    return (torch.expm1(exact) - exact).clamp_min(0)


def outside_support(trainer_logprobs: torch.Tensor) -> torch.Tensor:
    """Sampled tokens that the truncation leaves out under the trainer's policy (`forward.token_logprobs`)."""
    return trainer_logprobs == -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Weighted loss per token of both components (0 outside their members), and what the metrics need.

    `rl_members` and `ce_members` select each component's tokens. `mismatch_kl` is k3 of the log-ratio. `is_masked_low`
    and `is_masked_high` say which rl tokens the trust region dropped, and on which side. `advantages` are those that
    the loss used.
    """

    rl: torch.Tensor
    ce: torch.Tensor
    rl_members: torch.Tensor
    ce_members: torch.Tensor
    mismatch_kl: torch.Tensor
    is_masked_low: torch.Tensor
    is_masked_high: torch.Tensor
    advantages: torch.Tensor


LossFunction = Callable[[LossInputs, LossConfig], TokenLosses]
"""What `millrace run replay --loss my.module:fn` takes: `token_losses` is one."""


def token_losses(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """Loss and diagnostics of every token."""
    rl_members = inputs.loss_mask & (inputs.rl_weights != 0)
    ce_members = inputs.ce_weights != 0
    # Outside the mask the inference log-prob is not one: a zero log-ratio keeps those tokens out of exp and gradient.
    log_ratio = torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.inference_logprobs, 0.0)
    with torch.no_grad():
        difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
        is_positive = inputs.advantages > 0
        is_masked_high = rl_members & is_positive & (difference > config.dppo_mask_high)
        is_masked_low = rl_members & ~is_positive & (difference < -config.dppo_mask_low)
        keep = rl_members & ~is_masked_high & ~is_masked_low
        mismatch_kl = k3(log_ratio)
    # A dropped token must not reach exp: its ratio may be infinite (log-ratio above 88), and 0 * inf is NaN backwards.
    ratio = torch.exp(torch.where(keep, log_ratio, 0.0))
    policy_term = torch.where(keep, -config.adv_tau * inputs.advantages * ratio, 0.0)
    kl_term = config.kl_tau * log_ratio**2
    rl = torch.where(rl_members, inputs.rl_weights * (policy_term + kl_term), 0.0)
    ce = torch.where(ce_members, -inputs.trainer_logprobs * inputs.ce_weights, 0.0)
    return TokenLosses(
        rl=rl,
        ce=ce,
        rl_members=rl_members,
        ce_members=ce_members,
        mismatch_kl=mismatch_kl,
        is_masked_low=is_masked_low,
        is_masked_high=is_masked_high,
        advantages=inputs.advantages,
    )


def total_loss(losses: TokenLosses, *, num_rl_tokens: int, num_ce_tokens: int) -> torch.Tensor:
    """This micro-batch's share of the batch's loss; the counts are those of the whole batch over all ranks."""
    return losses.rl.sum() / max(num_rl_tokens, 1) + losses.ce.sum() / max(num_ce_tokens, 1)
