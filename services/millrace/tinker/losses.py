"""Losses by the names of the SDK: sums over tokens, without any mean.

With l the log-prob of a target under the model, q that under which it was sampled, A its advantage, r = exp(l - q):

    cross_entropy          - Σ w l
    importance_sampling    - Σ r A
    ppo                    - Σ min(r A, clip(r, low, high) A)            Schulman et al., arXiv:1707.06347
    cispo                  - Σ stop(clip(r, low, high)) A l              MiniMax-M1, arXiv:2506.13585
    gspo                   - Σ min(s A, clip(s, low, high) A)            Zheng et al., arXiv:2507.18071
    dro                    - Σ (A l - ½ β (l - q)²)                      Richemond et al., arXiv:2405.19107

In gspo s is the ratio of the sequence, exp of the mean of l - q over the tokens with `sequence_ratio_mask`, as a value;
its gradient goes to each token's own log-prob: s = stop(s) r / stop(r), GSPO-token of that paper.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from millrace.errors import InvalidSpecError
from millrace.tinker.examples import refused

Inputs = Mapping[str, torch.Tensor]
Compute = Callable[[torch.Tensor, Inputs, Mapping[str, float]], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One loss: the names of what it needs of each token, the defaults of its configuration, and its function.

    `compute` takes the log-probs [T] of an example, its inputs [T] by name and the configuration; it returns a scalar.
    """

    inputs: tuple[str, ...]
    defaults: Mapping[str, float]
    compute: Compute


def find_loss(name: str, config: Mapping[str, float]) -> tuple[Loss, dict[str, float]]:
    """Return the loss of this name with its whole configuration.

    Raises InvalidSpecError for an unknown name, or a key that the loss does not have.
    """
    loss = LOSSES.get(name)
    if loss is None:
        raise _unknown(name)
    for key in config:
        if key not in loss.defaults:
            has = ", ".join(loss.defaults) or "none"
            raise refused(f"loss_fn_config.{key}", f"is no key of {name}, which has {has}")
    whole = {**loss.defaults, **config}
    if whole.get(_LOW, 0.0) > whole.get(_HIGH, 0.0) or whole.get(_LOW, 0.0) < 0:
        raise refused("loss_fn_config", f"must have 0 <= {_LOW} <= {_HIGH}", whole)
    return loss, whole


def _unknown(name: str) -> InvalidSpecError:
    """Make the error for a loss that is not here."""
    why = ": its definition is not public" if name == "stable_reinforce" else ""
    return refused("loss_fn", f"must be one of {', '.join(LOSSES)}{why}", name)


_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_CLIP = {_LOW: 0.8, _HIGH: 1.2}


def _cross_entropy(logprobs: torch.Tensor, inputs: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    """Return - Σ w l; weights are real numbers, also negative ones."""
    return -(logprobs * inputs["weights"]).sum()


def _ratio(logprobs: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """Return r = exp(l - q), [T]."""
    return torch.exp(logprobs - inputs["logprobs"])


def _importance_sampling(logprobs: torch.Tensor, inputs: Inputs, _: Mapping[str, float]) -> torch.Tensor:
    """Return - Σ r A."""
    return -(_ratio(logprobs, inputs) * inputs["advantages"]).sum()


def _clipped(ratio: torch.Tensor, advantages: torch.Tensor, config: Mapping[str, float]) -> torch.Tensor:
    """Return - Σ min(r A, clip(r) A)."""
    clipped = ratio.clamp(config[_LOW], config[_HIGH])
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def _ppo(logprobs: torch.Tensor, inputs: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    """Return the clipped loss of each token's own ratio."""
    return _clipped(_ratio(logprobs, inputs), inputs["advantages"], config)


def _cispo(logprobs: torch.Tensor, inputs: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    """Return - Σ stop(clip(r)) A l: clipped ratios weigh the gradient, and no token loses its own."""
    weights = _ratio(logprobs.detach(), inputs).clamp(config[_LOW], config[_HIGH])
    return -(weights * inputs["advantages"] * logprobs).sum()


def _gspo(logprobs: torch.Tensor, inputs: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    """Return the clipped loss of the sequence's ratio."""
    mask = inputs["sequence_ratio_mask"]
    log_ratio = (logprobs - inputs["logprobs"]).detach()
    sequence = torch.exp((log_ratio * mask).sum() / mask.sum().clamp(min=1.0))
    return _clipped(sequence * torch.exp(logprobs - logprobs.detach()), inputs["advantages"] * mask, config)


def _dro(logprobs: torch.Tensor, inputs: Inputs, config: Mapping[str, float]) -> torch.Tensor:
    """Return - Σ (A l - ½ β (l - q)²)."""
    apart = logprobs - inputs["logprobs"]
    return -(inputs["advantages"] * logprobs - 0.5 * config["beta"] * apart.square()).sum()


_SAMPLED = ("logprobs", "advantages")
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(inputs=("weights",), defaults={}, compute=_cross_entropy),
    "importance_sampling": Loss(inputs=_SAMPLED, defaults={}, compute=_importance_sampling),
    "ppo": Loss(inputs=_SAMPLED, defaults=_CLIP, compute=_ppo),
    "cispo": Loss(inputs=_SAMPLED, defaults=_CLIP, compute=_cispo),
    "gspo": Loss(inputs=(*_SAMPLED, "sequence_ratio_mask"), defaults=_CLIP, compute=_gspo),
    "dro": Loss(inputs=_SAMPLED, defaults={"beta": 0.05}, compute=_dro),
}
"""Every loss by its name in the SDK."""
