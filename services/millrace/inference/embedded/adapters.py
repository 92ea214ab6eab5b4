"""LoRA adapters in a torch model: many on one base, added beside its weights, replaced, removed, read back.

An adapter is applied unmerged, `y = W x + b + scaling · B (A x)`, as the trainer computes it. Merging it into W would
be faster by two small products per layer, but would round: in bfloat16 most of a small B·A vanishes in W's last bits.
Unmerged, the base weights stay the published bits, the adapter's bits can be read back, and taking it away leaves the
base exactly as it was.

Rows of one pass may have different adapters. W x is one product for all rows; A and B multiply the rows of each adapter
together. What an adapter adds to a row depends on no row of another adapter.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from millrace.errors import InvalidStateError
from millrace.inference.embedded.loader import as_tensor_bytes
from millrace.inference.engine import PolicyIdentity, require_fitting
from millrace.models.torch_support import DTYPES, tag_of
from millrace.policies.manifest import AdapterEntry, StagedPolicy
from millrace.policies.peft.config import HIGH, LOW, model_name
from millrace.policies.tensors import TensorBytes

Key: TypeAlias = PolicyIdentity | None
"""An adapter that is shared by its policy; None is the adapter of requests that name none."""

_LEAST_ROWS = 4
"""Fewer rows than this are repeated: products of one to three rows are computed by other kernels, which round
otherwise, so that what an adapter adds would depend on how many of its requests run."""


@dataclass(frozen=True, slots=True)
class _Order:
    """The rows of a pass ordered by adapter.

    `index` int64 [P] are the rows, in which those of an adapter with few are repeated; `back` int64 [N] is the place of
    each row there. `sizes` are the numbers of the P that the adapters have.
    """

    index: torch.Tensor
    back: torch.Tensor
    sizes: list[int]


class PassRows:
    """The adapters of the rows of a pass."""

    def __init__(self, keys: Sequence[Key]) -> None:
        """Take the adapter of each row."""
        self.keys = list(keys)
        self._places: dict[Key, list[int]] = {}
        for row, key in enumerate(self.keys):
            self._places.setdefault(key, []).append(row)
        self.adapters = list(self._places)
        """The adapters of the pass, each once."""

    @property
    def is_uniform(self) -> bool:
        """Return whether all rows have the same adapter."""
        return len(self.adapters) == 1

    @cached_property
    def repeated(self) -> _Order:
        """Return the order in which each adapter has at least `_LEAST_ROWS` rows."""
        return self._order(_LEAST_ROWS)

    @cached_property
    def plain(self) -> _Order:
        """Return the order in which each adapter has its rows once."""
        return self._order(1)

    def _order(self, least: int) -> _Order:
        """Return the rows ordered by adapter, the last row of an adapter repeated until it has `least` rows."""
        index: list[int] = []
        sizes: list[int] = []
        back = [0] * len(self.keys)
        for rows in self._places.values():
            for place, row in enumerate(rows, len(index)):
                back[row] = place
            sizes.append(max(least, len(rows)))
            index += rows + [rows[-1]] * (sizes[-1] - len(rows))
        return _Order(torch.tensor(index), torch.tensor(back), sizes)


@dataclass(slots=True)
class _Now:
    """The rows of the pass that is computed next, which all adapted layers of a model share."""

    rows: PassRows


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """What one adapter has of a layer: `low` (A) [rank, in], `high` (B) [out, rank], and their product's factor."""

    low: torch.Tensor
    high: torch.Tensor
    scaling: float

    def added(self, input: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to the layer's output [..., out] for `input` [..., in]."""
        return functional.linear(functional.linear(input, self.low), self.high) * self.scaling


class AdaptedLinear(nn.Linear):
    """A linear layer with the weight and bias of another one, and adapters that are no part of the model's state.

    Its input has the rows of the pass in order, as [N, T, in] or flat, [N · T, in].
    """

    def __init__(self, base: nn.Linear, now: _Now) -> None:
        """Take over weight and bias of the layer `base`; `now` has the rows of the pass."""
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.base = (base,)  # in a tuple, so that it is no sub-module
        self.parts: dict[Key, LowRank] = {}
        """What each adapter has of this layer; adapters of other layers are not here."""
        self._now = now

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the layer's output [..., out] for `input` [..., in], with what the adapter of each row adds."""
        result = functional.linear(input, self.weight, self.bias)
        rows, parts = self._now.rows, self.parts
        if not any(key in parts for key in rows.adapters):
            return result
        input = input.reshape(len(rows.keys), -1, self.in_features)
        num_tokens = input.shape[1]
        if rows.is_uniform and len(rows.keys) * num_tokens >= _LEAST_ROWS:
            return result + parts[rows.adapters[0]].added(input).view(result.shape)
        order = rows.plain if num_tokens >= _LEAST_ROWS else rows.repeated
        added = result.new_empty(len(order.index), num_tokens, self.out_features)
        pieces = zip(
            rows.adapters, input.index_select(0, order.index).split(order.sizes), added.split(order.sizes), strict=True
        )
        for key, piece, target in pieces:
            part = parts.get(key)
            target.copy_(part.added(piece)) if part is not None else target.zero_()
        return result + added.index_select(0, order.back).view(result.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The tensors of an adapter by published name, on this engine's device."""

    entry: AdapterEntry
    tensors: Mapping[str, torch.Tensor]

    @classmethod
    def of(cls, staged: StagedPolicy) -> "Adapter":
        """Copy a staged adapter, whose bytes are read-only and change with the next version."""
        entry = staged.manifest.adapter
        assert entry is not None, "only adapters come here"
        return cls(entry=entry, tensors={name: _tensor(tensor) for name, tensor in staged.tensors.items()})


class Adapters:
    """The adapters of one model. Its methods, but `check`, must be called while nothing computes with the model."""

    def __init__(self, model: nn.Module, *, max_at_once: int) -> None:
        """Take the model, which has no adapter yet; at most `max_at_once` generate at once."""
        self.max_at_once = max_at_once
        """How many adapters that requests name a pass may have."""
        self._model = model
        self._now = _Now(PassRows([None]))
        self._held: dict[Key, Adapter] = {}
        self._layers: dict[str, AdaptedLinear] = {}
        """The adapted layers that replace the base's."""
        self._replaced: dict[str, torch.Tensor] = {}
        """The base's values of parameters that the adapter of None replaces whole."""

    @property
    def keys(self) -> tuple[Key, ...]:
        """Return the adapters that the model has."""
        return tuple(self._held)

    def check(self, staged: StagedPolicy, *, is_shared: bool = False) -> None:
        """Raise InvalidStateError, naming tensors, unless the staged adapter fits the model; changes nothing.

        With `is_shared` an adapter that replaces whole weights is refused, because other adapters compute with them.
        """
        # A layer that is adapted already keeps its weight's name.
        layers = {name.removesuffix(LOW) for name in map(_own_name, staged.tensors) if name.endswith(LOW)}
        require_fitting(
            staged,
            {
                name: (tag_of(parameter), tuple(parameter.shape))
                for name, parameter in self._model.named_parameters(remove_duplicate=False)
                if (layer := name.removesuffix(".weight")) not in layers
                or isinstance(self._model.get_submodule(layer), nn.Linear)
            },
        )
        whole = [name for name in staged.tensors if not name.endswith((LOW, HIGH))]
        if is_shared and whole:
            raise InvalidStateError(
                f"the adapter replaces whole weights of the base ({', '.join(whole[:5])}), with which other adapters "
                "compute",
                reason="ADAPTER_NOT_SHARED",
                remedy="train it without modules_to_save, or serve it on a replica of its own",
            )

    def select(self, keys: Sequence[Key]) -> None:
        """Set the adapter of each row of the next passes; one that the model does not have adds nothing."""
        if self._now.rows.keys != keys:
            self._now.rows = PassRows(keys)

    @torch.no_grad()
    def put(self, key: Key, adapter: Adapter) -> None:
        """Put a checked adapter into the model, in place of the one with this key.

        Layers with low-rank weights are replaced by adapted ones. Other tensors, which only the adapter of None has,
        replace the base's values.
        """
        self.remove(key)
        self._held[key] = adapter
        own = {_own_name(name): tensor for name, tensor in adapter.tensors.items()}
        for name in sorted(own):
            if name.endswith(LOW):
                layer = name.removesuffix(LOW)
                part = LowRank(low=own[name], high=own[layer + HIGH], scaling=adapter.entry.alpha / adapter.entry.rank)
                self._adapted(layer).parts[key] = part
            elif not name.endswith(HIGH):
                parameter = self._model.get_parameter(name)
                self._replaced[name] = parameter.detach().clone()
                parameter.copy_(own[name])

    @torch.no_grad()
    def remove(self, key: Key) -> None:
        """Remove an adapter from the model, if it has it; without any the base is bit for bit what it was."""
        if self._held.pop(key, None) is None:
            return
        for layer, adapted in list(self._layers.items()):
            if adapted.parts.pop(key, None) is not None and not adapted.parts:
                self._put(layer, adapted.base[0])
                del self._layers[layer]
        if key is None:
            for name, value in self._replaced.items():
                self._model.get_parameter(name).copy_(value)
            self._replaced = {}

    def held(self, key: Key) -> dict[str, TensorBytes]:
        """Return the weights of an adapter with which the model computes, by published name, read from the model."""
        return {name: as_tensor_bytes(self._live(key, _own_name(name))) for name in self._held[key].tensors}

    def _live(self, key: Key, name: str) -> torch.Tensor:
        """Return the tensor of an adapter with which the model computes, by its name in the model."""
        for end in (LOW, HIGH):
            if name.endswith(end):
                adapted = self._model.get_submodule(name.removesuffix(end))
                assert isinstance(adapted, AdaptedLinear), f"{name} is held"
                part = adapted.parts[key]
                return part.low if end == LOW else part.high
        return self._model.get_parameter(name)

    def _adapted(self, layer: str) -> AdaptedLinear:
        """Return the model's adapted layer of that name, which replaces the base's if there is none yet."""
        if (adapted := self._layers.get(layer)) is None:
            base = self._model.get_submodule(layer)
            assert isinstance(base, nn.Linear), f"{layer} was checked"
            adapted = self._layers[layer] = AdaptedLinear(base, self._now)
            self._put(layer, adapted)
        return adapted

    def _put(self, layer: str, module: nn.Module) -> None:
        """Replace the model's layer of that name by `module`."""
        parent, _, attribute = layer.rpartition(".")
        setattr(self._model.get_submodule(parent), attribute, module.eval())


def _own_name(name: str) -> str:
    """Return the model's name for a tensor of an adapter, of which `name` is the published one."""
    return model_name(name, source="the adapter")


def _tensor(tensor: TensorBytes) -> torch.Tensor:
    """Return a torch copy of a staged tensor, whose bytes are read-only and change with the next version."""
    raw = torch.from_numpy(tensor.bits().view(np.uint8).copy())
    return raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape)
