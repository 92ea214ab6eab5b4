"""The experts that a model's routers choose: recorded in a forward pass, or given to it.

A router of transformers chooses the experts of a token with one `topk` over scores of all experts, and takes their
weights from its own scores. Here that `topk` is watched, or its result is replaced, while the rest of the router runs
as it is: so the weights of given experts come from the router's own scores, with their gradient, whatever the family
makes of them (softmax, sigmoid, groups, a correction bias, scales).

Replaying what the engine chose keeps two kernels from sending a token to different experts ("Rollout Routing Replay",
arXiv:2510.11370).

Shape suffixes: T tokens in the order in which routers see them, X layers with experts, K experts of a token, E experts.
"""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.overrides import TorchFunctionMode

from millrace.errors import InternalError, InvalidSpecError, Violation
from millrace.rollouts.routed_experts import RoutedForm
from millrace.rollouts.types import RoutedArray

FREE = -1
"""In place of an expert: the router chooses by itself."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingShape:
    """What a model's choices of experts look like. `layers` are the indices of the layers that have experts."""

    layers: tuple[int, ...]
    num_hidden_layers: int
    num_experts: int
    top_k: int

    @property
    def form(self) -> RoutedForm:
        """Return what the experts of the layers that have experts look like."""
        return RoutedForm(num_layers=len(self.layers), num_experts=self.num_experts, top_k=self.top_k)

    def choices(self, experts_TXK: RoutedArray) -> NDArray[np.int16] | None:
        """Return recorded experts as int16, [T, X, K], of the layers that have experts; None for those of another
        model.

        `experts_TXK` has these layers, or all.
        """
        if experts_TXK.shape[1] == self.num_hidden_layers != len(self.layers):
            experts_TXK = experts_TXK[:, list(self.layers)]
        return None if self.form.problem_of(experts_TXK) else experts_TXK.astype(np.int16)


class Routers:
    """The routers of one model, whose choices can be recorded and replaced."""

    def __init__(self, model: nn.Module, routers: Mapping[str, Any]) -> None:
        """Wrap the forward of each of the routers, which are by name, in the order of their layers."""
        first = next(iter(routers.values()))
        config: Any = model.config  # pyright: ignore[reportAttributeAccessIssue] - as every model of transformers
        self.shape = RoutingShape(
            layers=tuple(int(match[1]) for name in routers if (match := _LAYER.search(name))),
            num_hidden_layers=int(config.get_text_config().num_hidden_layers),
            num_experts=int(first.weight.shape[0]),
            top_k=int(first.top_k),
        )
        self._recorded: dict[int, torch.Tensor] | None = None
        self._given: tuple[torch.Tensor, ...] | None = None
        for place, router in enumerate(routers.values()):
            router.__dict__["forward"] = self._forward(place, router.forward)

    @classmethod
    def of(cls, model: nn.Module) -> Self | None:
        """Return the routers of a model; None if it has none, or some that do not choose by one `topk` of one size."""
        found = {
            name: module
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("router") and _LAYER.search(name)
        }
        sizes = {(getattr(router, "top_k", None), _num_experts(router)) for router in found.values()}
        if len(sizes) != 1 or None in next(iter(sizes)) or not all(map(_chooses_by_topk, found.values())):
            return None
        return cls(model, found)

    @contextmanager
    def recording(self) -> Iterator[Callable[[], NDArray[np.int64]]]:
        """Record the choices of the forward pass in the block, of which there may be one.

        Yields a function that returns them afterwards, int64 [T, X, K].
        """
        recorded: dict[int, torch.Tensor] = {}
        self._recorded = recorded
        try:
            yield lambda: torch.stack([recorded[place] for place in range(len(self.shape.layers))], dim=1).numpy()
        finally:
            self._recorded = None

    def give(self, experts_TXK: torch.Tensor | None) -> None:
        """Have the routers choose these experts from the next forward pass on, int16 [T, X, K].

        Where an expert is FREE the router chooses all of that token's in that layer. None gives nothing, so that
        routers are free. They stay given for the backward as well, which may compute blocks again.
        """
        self._given = None if experts_TXK is None else experts_TXK.unbind(1)

    def _forward(self, place: int, own: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of router number `place`, which calls its `own` one."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._recorded is None and self._given is None:
                return own(*args, **kwargs)
            choice = _Choice(self.shape, None if self._given is None else self._given[place])
            with choice:
                result = own(*args, **kwargs)
            if choice.made_TK is None:
                raise InternalError(
                    f"router {place} chose its experts in a way that is not known here",
                    reason="ROUTER_UNKNOWN",
                    remedy="leave trainer.model.moe.replay and inference.return_routed_experts out",
                )
            if self._recorded is not None:
                self._recorded[place] = choice.made_TK
            return result

        return forward


_REPLAYING = WeakKeyDictionary[nn.Module, Routers]()


def replay_routing(model: nn.Module, *, key: str) -> RoutingShape:
    """Prepare a model for choices that are given to its routers (`routers_of`), and return what these look like.

    Raises InvalidSpecError (REPLAY_UNSUPPORTED), naming the config's `key`, for a model without such routers.
    """
    routers = Routers.of(model)
    if routers is None:
        name = type(model).__name__
        message = f"{name} has no routers that choose experts by one topk: there is nothing to replay"
        raise InvalidSpecError(
            [Violation(field=key, value="true", message=message)],
            reason="REPLAY_UNSUPPORTED",
            remedy=f"leave {key} out",
        )
    _REPLAYING[model] = routers
    return routers.shape


def routers_of(model: nn.Module) -> Routers | None:
    """Return the routers of a model that `replay_routing` has prepared; None for any other."""
    return _REPLAYING.get(model)


class _Choice(TorchFunctionMode):
    """Watches the call of `topk` in a router that chooses experts, and replaces its result by given experts."""

    def __init__(self, shape: RoutingShape, given_TK: torch.Tensor | None) -> None:
        """Watch for the choice of experts among all; `given_TK` replaces it, except where it is FREE. None: nowhere."""
        super().__init__()
        self._shape = shape
        self._given_TK = given_TK
        self.made_TK: torch.Tensor | None = None
        """The experts that were chosen, int64 [T, K]."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk):
            return found
        scores_TE, chosen_TK = args[0], found[1]
        # The choice of groups of experts is a `topk` as well, over other axes.
        if scores_TE.ndim != 2 or (scores_TE.shape[1], chosen_TK.shape[1]) != (
            self._shape.num_experts,
            self._shape.top_k,
        ):
            return found
        if self._given_TK is not None:
            if self._given_TK.shape != chosen_TK.shape:
                raise InternalError(
                    f"experts of {len(self._given_TK)} tokens are given, and a router sees {len(chosen_TK)}",
                    reason="ROUTER_UNKNOWN",
                )
            given_TK = self._given_TK.to(chosen_TK)
            chosen_TK = torch.where(given_TK >= 0, given_TK, chosen_TK)
            found = torch.return_types.topk((scores_TE.gather(1, chosen_TK), chosen_TK))
        self.made_TK = chosen_TK.detach()
        return found


def _chooses_by_topk(router: nn.Module) -> bool:
    """Return whether the forward of a router calls `topk`; that of Phi-MoE, for one, calls `max` twice."""
    # The class's: that of the instance is ours once it is wrapped.
    return "topk" in inspect.unwrap(type(router).forward).__code__.co_names


def _num_experts(router: nn.Module) -> int | None:
    """Return the number of experts among which a router chooses; None if its weight does not say."""
    weight = getattr(router, "weight", None)
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) and weight.ndim == 2 else None
