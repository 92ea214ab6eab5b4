"""LoRA adapters in a torch model: put beside the base weights, replaced, taken away, read back.

The adapter is applied unmerged, `y = W x + b + scaling · B (A x)`, as the trainer computes it. Merging it into W would
be faster by two small products per layer, but would round: in bfloat16 most of a small B·A vanishes in W's last bits.
Unmerged, the base weights stay the published bits, the adapter's bits can be read back, and taking it away leaves the
base exactly as it was.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from millrace.inference.adapters import require_fitting
from millrace.inference.embedded.weights import as_tensor_bytes
from millrace.policies.adapter import HIGH, LOW, model_name
from millrace.policies.staged import StagedPolicy
from millrace.policies.tensors import TensorBytes


class AdaptedLinear(nn.Linear):
    """A linear layer with another's own weight and bias, and an adapter that is no part of the model's state."""

    def __init__(self, base: nn.Linear, *, low: torch.Tensor, high: torch.Tensor, scaling: float) -> None:
        nn.Module.__init__(self)  # not nn.Linear's, which would make a weight
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.low, self.high, self.scaling = low, high, scaling  # A [rank, in], B [out, rank]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """`input` [..., in] → [..., out]."""
        result = functional.linear(input, self.weight, self.bias)
        return result + functional.linear(functional.linear(input, self.low), self.high) * self.scaling


class Adapters:
    """The adapter of one model; there is at most one. Call it where nothing computes with the model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._held: dict[str, torch.Tensor] = {}
        """What is held by published name."""
        self._layers: dict[str, nn.Linear] = {}
        """The base's layers that an adapted one stands in for."""
        self._replaced: dict[str, torch.Tensor] = {}
        """The base's values of layers that the adapter replaces whole."""

    @property
    def is_loaded(self) -> bool:
        """Whether the model computes with an adapter."""
        return bool(self._held)

    def check(self, staged: StagedPolicy) -> None:
        """Raise InvalidStateError, naming tensors, unless the adapter fits the model; changes nothing."""
        # A layer that is adapted already keeps its weight's name.
        layers = {name.removesuffix(LOW) for name in map(_own_name, staged.tensors) if name.endswith(LOW)}
        require_fitting(
            staged,
            {
                name: (_name(parameter.dtype), tuple(parameter.shape))
                for name, parameter in self._model.named_parameters(remove_duplicate=False)
                if (layer := name.removesuffix(".weight")) not in layers
                or isinstance(self._model.get_submodule(layer), nn.Linear)
            },
        )

    @torch.no_grad()
    def load(self, staged: StagedPolicy) -> None:
        """Put a checked adapter in the place of the one that is held."""
        self.unload()
        adapter = staged.manifest.adapter
        assert adapter is not None, "only adapters come here"
        self._held = {name: _tensor(tensor) for name, tensor in staged.tensors.items()}
        own = {_own_name(name): tensor for name, tensor in self._held.items()}
        for name in sorted(own):
            if name.endswith(LOW):
                layer = name.removesuffix(LOW)
                base, scaling = self._linear(layer), adapter.alpha / adapter.rank
                self._put(layer, AdaptedLinear(base, low=own[name], high=own[layer + HIGH], scaling=scaling))
                self._layers[layer] = base
            elif not name.endswith(HIGH):
                parameter = self._model.get_parameter(name)
                self._replaced[name] = parameter.detach().clone()
                parameter.copy_(own[name])

    @torch.no_grad()
    def unload(self) -> None:
        """Leave the base alone, bit for bit what it was."""
        for layer, base in self._layers.items():
            self._put(layer, base)
        for name, value in self._replaced.items():
            self._model.get_parameter(name).copy_(value)
        self._held, self._layers, self._replaced = {}, {}, {}

    def held(self) -> dict[str, TensorBytes]:
        """What the layers compute with, by published name."""
        return {name: as_tensor_bytes(self._live(_own_name(name))) for name in self._held}

    def _live(self, name: str) -> torch.Tensor:
        """The tensor that the model computes with, by its name in the model."""
        for end in (LOW, HIGH):
            if name.endswith(end):
                adapted = self._linear(name.removesuffix(end))
                assert isinstance(adapted, AdaptedLinear), f"{name} is held"
                return adapted.low if end == LOW else adapted.high
        return self._model.get_parameter(name)

    def _linear(self, layer: str) -> nn.Linear:
        found = self._model.get_submodule(layer)
        assert isinstance(found, nn.Linear), f"{layer} was checked"
        return found

    def _put(self, layer: str, module: nn.Module) -> None:
        parent, _, attribute = layer.rpartition(".")
        setattr(self._model.get_submodule(parent), attribute, module.eval())


def _own_name(name: str) -> str:
    """The model's name of one of the adapter's tensors."""
    return model_name(name, source="the adapter")


def _tensor(tensor: TensorBytes) -> torch.Tensor:
    """A copy: the staged bytes are read-only and change with the next version."""
    raw = torch.from_numpy(tensor.bits().view(np.uint8).copy())
    return raw.view(getattr(torch, tensor.dtype)).reshape(tensor.shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
