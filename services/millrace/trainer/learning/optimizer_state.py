"""Optimizer state that is held in fewer bits, or in host memory, and comes to its parameter for the step only.

Rounded to the nearest, a second moment in bfloat16 would never decay: a step of `1 - betas2` is smaller than half of
its last bit. So it is rounded up or down by chance, in proportion to what is cut off. The chance is a function of the
step, the parameter and the element: ranks that hold the same round the same, and a step that is made again does too.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.device_digest import mixed
from millrace.trainer.model.layout import held

_BLOCK_ELEMENTS = 1 << 24
_COUNTERS = ("step",)
"""Parts of a state that count, and stay as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateKeeping:
    """How the state is held between steps; `dtype` None is that of the parameter."""

    dtype: torch.dtype | None = None
    offloads: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is held as torch does."""
        return self.dtype is None and not self.offloads

    def zeros(self, parameter: nn.Parameter) -> torch.Tensor:
        """A part of a parameter's state before the first step."""
        device = torch.device("cpu") if self.offloads else parameter.device
        dtype = self.dtype or parameter.dtype
        return torch.zeros_like(parameter, memory_format=torch.preserve_format, dtype=dtype, device=device)


@contextlib.contextmanager
def brought(optimizer: torch.optim.Optimizer, *, salt: int) -> Iterator[None]:
    """In this block the state is on its parameter's device and in its format; behind it, where it was, rounded."""
    kept: dict[torch.Tensor, Mapping[str, torch.Tensor]] = dict(optimizer.state)
    for parameter, parts in kept.items():
        optimizer.state[parameter] = {
            name: part if name in _COUNTERS else part.to(device=parameter.device, dtype=parameter.dtype)
            for name, part in parts.items()
        }
    yield
    for parameter, parts in kept.items():
        for number, (name, part) in enumerate(parts.items()):
            stepped = optimizer.state[parameter][name]
            if stepped is not part:
                _put(stepped, part, salt=salt + number)
        optimizer.state[parameter] = dict(parts)


@torch.no_grad()
def _put(value: torch.Tensor, place: torch.Tensor, *, salt: int) -> None:
    """Write a part of the state where it is held."""
    local = value
    if isinstance(value, DTensor):
        share = held(value)
        column = 0 if share.first_column is None else share.first_column
        local, salt = value.to_local(), salt * 1_000_003 + share.start + column
    target = place.to_local() if isinstance(place, DTensor) else place
    if target.dtype == torch.bfloat16 and local.dtype == torch.float32:
        local = round_by_chance(local, salt=salt)
    target.copy_(local)


def round_by_chance(values: torch.Tensor, *, salt: int) -> torch.Tensor:
    """float32 as bfloat16, up or down in proportion to what is cut off; the chance follows from `salt` and place."""
    flat = values.reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    for begin in range(0, flat.numel(), _BLOCK_ELEMENTS):
        block = flat[begin : begin + _BLOCK_ELEMENTS]
        place = torch.arange(begin, begin + block.numel(), device=flat.device)
        chance = (mixed(place, salt=salt) & 0xFFFF).to(torch.int32)
        cut = (block.view(torch.int32) + chance) & ~0xFFFF
        rounded[begin : begin + block.numel()] = torch.where(block.isfinite(), cut.view(torch.float32), block)
    return rounded.view(values.shape)
