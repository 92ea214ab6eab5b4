"""Policy losses, one small function each, corrections for off-policy data, and how tokens are weighted."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from millrace.config.sections.loss import CorrectionConfig, LossConfig
from millrace.custom_code import CustomCode, bad_code
from millrace.errors import InvalidSpecError
from millrace.models.torch_support import is_shortage

# The types of a policy loss: a detached multiplier per token, its inputs, and the losses made from it.
#
# With t = trainer log-prob, i = inference log-prob, l = t - i (0 outside of the mask), r = exp(l), A = advantage and
# w = weight of the token (`token_weights`), the loss of a token of the rl component is
#
#     -w A f exp(t - sg(t)), so that its value is -w A f and its gradient -w A f * grad t,
#
# with f the multiplier, detached, of the loss times those of the corrections. Cross-entropy of a token is -t.
# Each component is summed over its member tokens and divided by a number of the *whole* batch, so that the
# gradient does not depend on how the batch is cut into micro-batches and ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Per-token tensors of one shape, [B, T]: a row is a sample. `loss_mask` is bool: 1 where the policy sampled.

    `proximal_logprobs` are those of the policy before the batch, from the batch's second optimizer step on and if the
    loss needs them; None means that they equal the trainer's. `entropy` of the policy, with its gradient, is set if it
    is part of the loss; `reference_logprobs` are those of the start model if the run compares with it. `group_tokens`
    [B, 1] are the rl tokens of each row's group in the minibatch, if tokens are weighted by them.
    """

    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    rl_weights: torch.Tensor
    ce_weights: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    group_tokens: torch.Tensor | None = None

    @property
    def rl_members(self) -> torch.Tensor:
        """Return which tokens the policy loss covers, bool [B, T]: sampled ones whose rl weight is not 0."""
        return self.loss_mask & (self.rl_weights != 0)

    @property
    def log_ratio(self) -> torch.Tensor:
        """Return the trainer's log-prob minus the inference log-prob, with its gradient.

        It is 0 for tokens that were not sampled.
        """
        return torch.where(self.loss_mask, self.trainer_logprobs - self.inference_logprobs, 0.0)

    @property
    def proximal_log_ratio(self) -> torch.Tensor:
        """Return the log-prob before the batch's first optimizer step minus the inference log-prob, without gradient.

        It is 0 for tokens that were not sampled. Without `proximal_logprobs` the trainer's log-probs take their place.
        """
        proximal = self.trainer_logprobs if self.proximal_logprobs is None else self.proximal_logprobs
        return torch.where(self.loss_mask, proximal - self.inference_logprobs, 0.0).detach()


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplier:
    """The factor f of every token, 0 if it is dropped or no member; `low` and `high` are those dropped or clipped."""

    factor: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor


PolicyLoss = Callable[[LossInputs, LossConfig], Multiplier]
"""A policy loss; called without gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLosses:
    """Weighted loss per token of both components (0 outside their members), and what the metrics need.

    `rl_members` and `ce_members` select each component's tokens. `mismatch_kl` is k3 of the log-ratio. `is_masked_low`
    and `is_masked_high` say which rl tokens the trust region dropped or clipped, and on which side. `advantages` are
    those that the loss used.
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
"""A loss as `millrace run replay --loss my.module:fn` takes it: `policy_losses` is one."""


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return exp(l) - l - 1 of each log-ratio l, an estimate of the KL divergence that is never negative, in float64.

    In float32 the result would be rounding error.
    """
    # Schulman, "Approximating KL Divergence" (2020). Near 0 the result is l²/2, which exp(l) - 1 would lose to
    # cancellation; what rounding leaves below 0 is cut off.
    exact = log_ratio.double()
    return (torch.expm1(exact) - exact).clamp_min(0)


def outside_support(trainer_logprobs: torch.Tensor) -> torch.Tensor:
    """Return which tokens have the log-prob -inf under the trainer's policy.

    Those are the ones that truncation of the distribution (top-k, top-p) excludes.
    """
    return trainer_logprobs == -math.inf


def sample_means(values: torch.Tensor, members: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` over each row's members, [B, T] → [B, 1]; 0 for a row without members."""
    return (values * members).sum(-1, keepdim=True) / members.sum(-1, keepdim=True).clamp_min(1)


def clip_range(config: LossConfig) -> tuple[float, float]:
    """Return the bounds of the ratio, 1 - clip_low and 1 + clip_high; a bound that is None counts as 0."""
    low = 0.0 if config.clip_low is None else config.clip_low
    high = 0.0 if config.clip_high is None else config.clip_high
    return 1 - low, 1 + high


def between(low: float, values: torch.Tensor, high: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which values are below `low`, and which are above `high`."""
    return values < low, values > high


# Corrections for off-policy data, aggregation over tokens, KL to the start model, and entropy.
#
# A correction is a weight or a mask from the ratio of two policies: the one before the batch (p) to the one that
# sampled (i). Truncated importance sampling (Yao et al. 2025), IcePop (arXiv:2510.18855), masks by sequence and by
# geometric mean.
#
# A correction that is a weight takes exp(p - i) out of the loss's own ratio exp(t - i), and leaves exp(t - p). In the
# first optimizer step of a batch p equals t, so that the remaining ratio is 1.

_WEIGHING = ("token_tis", "sequence_tis", "icepop")
_OVER_SAMPLES = ("sequence_tis", "sequence_mask", "geometric_mask")
"""Corrections whose factor depends on all tokens of a sample."""
_MAX_LOG = 30.0
"""Bound of the log of a product of ratios, so that its exponential is finite."""


def ratio_of(inputs: LossInputs, config: LossConfig) -> torch.Tensor:
    """Return the ratio of probabilities in the loss for every token, [B, T], with its gradient.

    It is exp(trainer - inference log-prob). If a correction of the config weighs by exp(proximal - inference log-prob),
    it is what is left of it, exp(trainer - proximal log-prob).
    """
    is_weighed = any(each.type in _WEIGHING for each in config.correction)
    return (inputs.log_ratio - inputs.proximal_log_ratio if is_weighed else inputs.log_ratio).exp()


def correction(inputs: LossInputs, config: CorrectionConfig) -> torch.Tensor:
    """Return the factor by which one correction multiplies every token's loss, [B, T]; that of a mask is 0 or 1."""
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
    """Return the product of exp(log_ratio) over each row's members, [B, T] → [B, 1], at most exp(`_MAX_LOG`)."""
    # Clamped before `exp`: the product over a long sample would overflow.
    return (log_ratio * members).sum(-1, keepdim=True).clamp(max=_MAX_LOG).exp()


def _is_within(config: CorrectionConfig, ratio: torch.Tensor) -> torch.Tensor:
    """Return which ratios are neither below `config.low` nor above `config.high`, bool in the shape of `ratio`."""
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
    """Return the number by which the sum of a batch's rl losses is divided, as `config.aggregation` says.

    It is one of the arguments, which count the whole batch's rl tokens, and its samples and groups with rl tokens.
    `num_groups` None: each sample counts as a group.
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
    """Return the losses that `loss_of` computes, with the terms of `[trainer.loss] kl` and `entropy_coef` added.

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
    """Return the trainer's minus the reference's log-prob, [B, T], with gradient; 0 for tokens that were not sampled.

    None without reference log-probs.
    """
    if inputs.reference_logprobs is None:
        return None
    return torch.where(inputs.loss_mask, inputs.trainer_logprobs - inputs.reference_logprobs, 0.0)


def _rewarded(inputs: LossInputs, config: LossConfig) -> LossInputs:
    """Return the inputs with the KL term subtracted from the advantages if `kl.place` is "reward", else unchanged."""
    log_ratio = log_ratio_to_reference(inputs)
    if config.kl is None or config.kl.place != "reward" or log_ratio is None:
        return inputs
    # Detached, because an advantage is a constant of the policy gradient.
    return replace(inputs, advantages=inputs.advantages - config.kl.coef * log_ratio.detach())


def _kl(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    """Return the KL term of every token's loss, [B, T]; None unless `kl.place` is "loss" and there is a reference."""
    log_ratio = log_ratio_to_reference(inputs)
    if config.kl is None or config.kl.place != "loss" or log_ratio is None:
        return None
    # `where` multiplies the gradient of the branch that it drops by 0, and 0 · inf is nan: a token that is no member
    # must not overflow in `exp` first.
    ratio = torch.exp(torch.where(inputs.rl_members, inputs.log_ratio, 0.0))
    if config.kl.estimator == "k2":
        return config.kl.coef * ratio.detach() * log_ratio**2 / 2
    # The ratio keeps its gradient here: both parts together have the gradient r l grad t.
    return config.kl.coef * ratio * (torch.expm1(-log_ratio) + log_ratio)


def _entropy_bonus(inputs: LossInputs, config: LossConfig) -> torch.Tensor | None:
    """Return the entropy term of every token's loss, [B, T]: minus the coefficient times the entropy.

    None if the coefficient is 0 or there is no entropy.
    """
    return None if inputs.entropy is None or not config.entropy_coef else -config.entropy_coef * inputs.entropy


# The policy losses: a factor for every sampled token, from log-probs and advantages.

# `default`: DPPO with binary total variation (arXiv:2602.04879), as prime-rl has it.


def dppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return the factor r = exp(t - i) of every token, or 0 outside of the trust region.

    t and i are log-probs of trainer and inference, A the advantage. Dropped are tokens with exp(t) - exp(i) >
    dppo_mask_high and A > 0 (`high`), and those with exp(t) - exp(i) < -dppo_mask_low and A <= 0 (`low`).
    """
    members, is_positive = inputs.rl_members, inputs.advantages > 0
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    # Only steps that would lead further away are dropped: one that leads back into the region is taken.
    high = members & is_positive & (difference > config.dppo_mask_high)
    low = members & ~is_positive & (difference < -config.dppo_mask_low)
    keep = members & ~high & ~low
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )


# `cispo`: clipped importance weights, no token is dropped (arXiv:2506.13585; ScaleRL, arXiv:2510.13786).


def cispo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return the factor r = exp(trainer - inference log-prob) of every token, clipped to 1 - clip_low … 1 + clip_high.

    No token is dropped; `low` and `high` mark the clipped ones.
    """
    members, ratio = inputs.rl_members, inputs.log_ratio.exp()
    lowest, highest = clip_range(config)
    low, high = between(lowest, ratio, highest)
    factor = torch.where(members, ratio.clamp(lowest, highest), 0.0)
    return Multiplier(factor=factor, low=members & low, high=members & high)


# `gspo`: group sequence policy optimization (arXiv:2507.18071), with the gradient of its token form.

_MAX_LOG_RATIO = 10.0
"""Bound of the log of the ratio, as verl has it."""


def gspo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return as factor of all a sample's tokens the geometric mean s of their ratios, or 0 where it is clipped.

    That is where A > 0 and s > 1 + clip_high (`high`), or A < 0 and s < 1 - clip_low (`low`); A is the token's
    advantage.
    """
    members = inputs.rl_members
    ratio = sample_means(inputs.log_ratio, members).clamp(max=_MAX_LOG_RATIO).exp().expand_as(inputs.log_ratio)
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)


# `importance_sampling`: REINFORCE with the ratio to the policy that sampled (Williams 1992, off-policy).


def importance_sampling(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return the ratio that `ratio_of` returns as the factor of every token; nothing is clipped or dropped."""
    members = inputs.rl_members
    nothing = torch.zeros_like(members)
    return Multiplier(factor=torch.where(members, ratio_of(inputs, config), 0.0), low=nothing, high=nothing)


# `ipo`: importance sampling in a symmetric trust region of the probability, as prime-rl has it.


def ipo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return the factor r = exp(t - i) of every token, or 0 where |exp(t) - exp(i)| is above `ipo_threshold`.

    t and i are log-probs of trainer and inference. The advantage's sign does not matter; `low` and `high` mark the
    dropped tokens by the sign of the difference.
    """
    difference = torch.exp(inputs.trainer_logprobs) - torch.exp(inputs.inference_logprobs)
    below, above = between(-config.ipo_threshold, difference, config.ipo_threshold)
    low, high = inputs.rl_members & below, inputs.rl_members & above
    keep = inputs.rl_members & ~low & ~high
    return Multiplier(
        factor=torch.where(keep, torch.exp(torch.where(keep, inputs.log_ratio, 0.0)), 0.0), low=low, high=high
    )


# `ppo`: the clipped surrogate (arXiv:1707.06347), clip-higher (arXiv:2503.14476), dual clip (arXiv:1912.09729).
#
# GRPO and DAPO use it. With a correction that weighs by the ratio, this is decoupled PPO: the policy before the batch
# replaces the one that sampled, and nothing is clipped in the first optimizer step of a batch.


def ppo(inputs: LossInputs, config: LossConfig) -> Multiplier:
    """Return the ratio r that `ratio_of` returns as the factor of every token, or 0 where it is clipped.

    That is where A > 0 and r > 1 + clip_high, or A < 0 and r > dual_clip (`high`), and where A < 0 and r < 1 - clip_low
    (`low`); A is the token's advantage.
    """
    ratio, members = ratio_of(inputs, config), inputs.rl_members
    lowest, highest = clip_range(config)
    below, above = between(lowest, ratio, highest)
    low = members & (inputs.advantages < 0) & below
    high = members & (inputs.advantages > 0) & above
    if config.dual_clip is not None:
        # With a negative advantage the surrogate has no bound as the ratio grows.
        high = high | (members & (inputs.advantages < 0) & (ratio > config.dual_clip))
    return Multiplier(factor=torch.where(members & ~low & ~high, ratio, 0.0), low=low, high=high)


# A loss of the user's own, for `trainer.loss.type = "custom"` and for `millrace run replay --loss`.

FIELD = "trainer.loss.import_path"
_FLOATS = ("rl", "ce", "mismatch_kl")
_REMEDY = "write it like millrace.trainer.losses.policy_losses: (LossInputs, LossConfig) -> TokenLosses"
_BOOLEANS = ("rl_members", "ce_members", "is_masked_low", "is_masked_high")


def load_custom_loss(import_path: str, code: CustomCode, *, field: str = FIELD) -> LossFunction:
    """Import the function of `my.module:fn`; return it wrapped in a check of its result.

    `field` is the config's key or the option that names it, for messages. Raises InvalidSpecError if it cannot be
    imported; the returned function raises InvalidSpecError if the user's one raises or returns something unusable. The
    user's function must have the signature of `millrace.trainer.losses.policy_losses`:

        def fn(inputs: LossInputs, config: LossConfig) -> TokenLosses

    It is pure, over tensors of one shape [B, T]: `rl` and `ce` are the weighted loss of every token and 0 outside the
    bool tensors `rl_members` and `ce_members`; config is the run's `[trainer.loss]`, `config.kwargs` are the user's own
    options. The other fields only feed metrics.
    """
    function = code.load(import_path, field=field, remedy=_REMEDY)

    def bad(problem: str) -> InvalidSpecError:
        """Make the error that the user's function is unusable; `problem` says why."""
        return bad_code(field, import_path, problem, reason="LOSS_INVALID", remedy=_REMEDY)

    def checked(inputs: LossInputs, config: LossConfig) -> TokenLosses:
        """Call the user's function, and check that it returns usable losses; raise InvalidSpecError if not."""
        try:
            losses = function(inputs, config)
        except Exception as error:  # a user's function may raise anything
            if is_shortage(error):  # no mistake of the function: reported as a shortage
                raise
            raise bad(f"it raised {type(error).__name__}: {error}") from error
        if not isinstance(losses, TokenLosses):
            raise bad(f"it returned a {type(losses).__name__}, not a millrace.trainer.losses.TokenLosses")
        if problem := _problem(losses, shape=inputs.trainer_logprobs.shape):
            raise bad(problem)
        return losses

    return checked


def try_loss(loss_of: LossFunction, config: LossConfig) -> None:
    """Compute the loss of two small samples; raises InvalidSpecError, before a model is loaded, if that is unusable."""
    shape = (2, 3)
    logprobs = torch.full(shape, -1.0, requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, True, False]])
    loss_of(
        LossInputs(
            trainer_logprobs=logprobs,
            inference_logprobs=torch.full(shape, -1.1),
            advantages=torch.tensor([[0.5], [-0.5]]).expand(shape),
            loss_mask=mask,
            rl_weights=torch.ones(shape),
            ce_weights=torch.zeros(shape),
            entropy=logprobs + 2.0 if config.entropy_coef else None,
            reference_logprobs=torch.full(shape, -1.2) if config.kl is not None else None,
        ),
        config,
    )


def _problem(losses: TokenLosses, *, shape: torch.Size) -> str:
    """Return what is wrong with the fields of a loss function's result, in words; empty if nothing is.

    `shape` is the one that every tensor must have.
    """
    for name in (*_FLOATS, *_BOOLEANS):
        value = getattr(losses, name)
        if not isinstance(value, torch.Tensor) or value.shape != shape:
            got = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            return f"its {name} must be a tensor of shape {tuple(shape)}, one value per token, not {got}"
        if (value.dtype == torch.bool) != (name in _BOOLEANS):
            return f"its {name} must be {'bool' if name in _BOOLEANS else 'floating'}, not {value.dtype}"
    if not (losses.rl.requires_grad or losses.ce.requires_grad):
        return "neither its rl nor its ce depends on inputs.trainer_logprobs, so it trains nothing"
    return ""


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
    """Return loss and diagnostics of every token as `[trainer.loss]` says, with its KL and entropy terms.

    For `type = "custom"` this is the default loss; `loss_function` loads the user's.
    """
    return regularized(policy_losses, inputs, config)


def loss_function(config: LossConfig, code: CustomCode) -> LossFunction:
    """Return the loss function that `[trainer.loss]` says, the user's own for `type = "custom"`.

    `code` imports the user's modules. The user's function is tried on small samples; raises InvalidSpecError if it is
    unusable.
    """
    if config.type != "custom":
        return token_losses
    loss_of = partial(regularized, load_custom_loss(config.import_path or "", code))
    try_loss(loss_of, config)
    return loss_of


def policy_losses(inputs: LossInputs, config: LossConfig) -> TokenLosses:
    """Return policy loss and cross-entropy of every token with corrections and weights, without KL and entropy terms.

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
    # prime-rl's losses penalise the squared log-ratio; the published ones have no such term.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """The loss that one optimizer step minimises, as a function of a micro-batch's inputs.

    `rl_divisor` and `num_ce_tokens` are those of `total_loss`.
    """

    loss_of: LossFunction
    config: LossConfig
    rl_divisor: int
    num_ce_tokens: int

    def __call__(self, inputs: LossInputs) -> tuple[TokenLosses, torch.Tensor]:
        """Return the loss of every token, and the micro-batch's share of the whole, a scalar with its gradient."""
        losses = self.loss_of(inputs, self.config)
        return losses, total_loss(losses, rl_divisor=self.rl_divisor, num_ce_tokens=self.num_ce_tokens)

    def is_by_token(self, *, is_truncated: bool) -> bool:
        """Return whether each token's share depends on its own log-prob and entropy only, and not on other tokens'.

        `is_truncated` says whether the micro-batch has tokens sampled from less than the whole vocabulary. Those that
        fall outside under the trainer's policy are no members, and "sequence" divides by the number of members. A loss
        of the user's own may do anything.
        """
        is_over_samples = any(each.type in _OVER_SAMPLES for each in self.config.correction)
        is_counted = is_truncated and self.config.aggregation == "sequence"
        return self.loss_of is token_losses and self.config.type != "gspo" and not is_over_samples and not is_counted


def total_loss(losses: TokenLosses, *, rl_divisor: int, num_ce_tokens: int) -> torch.Tensor:
    """Return the loss of a micro-batch, a scalar: its tokens' losses, divided by numbers of the whole batch.

    `rl_divisor` is what `divisor` returns for the batch, and `num_ce_tokens` the number of its cross-entropy tokens.
    The sum over all micro-batches is the loss of the batch.
    """
    return losses.rl.sum() / max(rl_divisor, 1) + losses.ce.sum() / max(num_ce_tokens, 1)
