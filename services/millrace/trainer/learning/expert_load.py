"""How evenly a router spreads tokens over the experts of each layer.

Counted is what goes through the experts in a step's forward passes, padding included. Where activations are computed
again, a layer counts twice, which changes no share.
"""

from typing import Any, Self

import torch
from torch import nn

from millrace.trainer.model.expert_parallel import experts_of


class ExpertLoad:
    """Counts the tokens of each expert at this rank while gradients are computed."""

    def __init__(self, layers: list[Any]) -> None:
        self._counts = [torch.zeros(layer.num_experts, dtype=torch.int64) for layer in layers]
        for place, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._counting(place))

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """That of a model; None if it has no experts."""
        layers = list(experts_of(model))
        return cls(layers) if layers else None

    def take(self) -> torch.Tensor:
        """Tokens by layer and expert since the last call, float64."""
        counts = torch.stack([each.to("cpu", torch.float64) for each in self._counts])
        self._counts = [torch.zeros_like(each) for each in self._counts]
        return counts

    def _counting(self, place: int) -> Any:
        def count(module: Any, arguments: tuple[torch.Tensor, ...]) -> None:
            if torch.is_grad_enabled():
                counts = torch.bincount(arguments[1].reshape(-1), minlength=len(self._counts[place]))
                self._counts[place] = counts + self._counts[place].to(counts.device)

        return count


def load_metrics(counts: torch.Tensor) -> dict[str, float]:
    """Metrics of tokens by layer and expert.

    `max_vio` is how much more than its fair share the fullest expert of a layer has (0 is even, 1 is twice as much),
    `idle_experts` the share of experts that no token went to.
    """
    excess = counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1) - 1
    return {
        "max_vio/mean": float(excess.mean()),
        "max_vio/max": float(excess.max()),
        "idle_experts/mean": float((counts == 0).double().mean()),
    }
