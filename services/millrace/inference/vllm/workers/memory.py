"""A worker's memory and the host copy's file as flat bits, and what a version writes where."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.device_digest import device_digest
from millrace.inference.torch_dtypes import BITS, DTYPES
from millrace.inference.vllm.ranks import OrderFiles
from millrace.inference.vllm.workers.layout import Region
from millrace.policies.change import TensorChange
from millrace.policies.proof import NextDigests, mismatch

Bits = NDArray[np.unsignedinteger]

SLICE_ELEMENTS = 1 << 20
"""Changed elements that are looked up at a time: some ten milliseconds."""


class ModelMemory:
    """Reads boxes that lie in one piece out of a model's parameters."""

    def __init__(self, model: Callable[[], torch.nn.Module]) -> None:
        self._model = model

    def read(self, part: Region, begin: int, end: int) -> Bits:
        """A copy of the box's elements [begin, end)."""
        found = self._flat(part)[begin:end]
        return _as_numpy(found.clone() if found.device.type == "cpu" else found.cpu())

    def gather(self, part: Region, index: NDArray[np.int64]) -> Bits:
        """A copy of the box's elements `index` [N]."""
        return gather(self._flat(part), index)

    def digest(self, part: Region, begin: int, end: int) -> int:
        """The digest of the box's elements [begin, end), computed where they lie."""
        flat = self._flat(part)[begin:end]
        if part.is_contiguous:
            return device_digest(flat, start=part.source_offset + begin)
        return device_digest(flat, positions=part.positions(begin, end, device=flat.device))

    def _flat(self, part: Region) -> torch.Tensor:
        return box_of(parameter_of(self._model(), part), part).reshape(-1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """What a version puts into one box: `bits` [N] at the elements `index` [N] of the parameter's storage.

    `positions` [N] are the same elements in the tensor. `index` None: the whole box is copied from the file.
    `staged` are index and bits on the parameter's device.
    """

    region: Region
    index: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    bits: Bits | None = None
    staged: tuple[torch.Tensor, torch.Tensor] | None = None

    def on(self, device: torch.device) -> "Write":
        """The same with what it scatters on that device, so that the pause copies nothing; on a CPU it is there."""
        if device.type == "cpu" or self.index is None or self.bits is None:
            return self
        bits = self.bits.view(f"i{self.bits.itemsize}") if self.bits.itemsize > 1 else self.bits
        return replace(self, staged=(torch.from_numpy(self.index).to(device), torch.from_numpy(bits).to(device)))

    def put(self, files: OrderFiles, parameter: torch.Tensor) -> None:
        """Write it, and read it back from the memory at once; InternalError if other bits are there."""
        if self.index is None or self.bits is None:
            source = source_of(files, self.region).to(parameter.device)
            box = box_of(parameter, self.region)
            box.copy_(source)
            wrong = 0 if torch.equal(box, source) else int((box != source).sum())
        else:
            flat = flat_bits(parameter)
            index, bits = self.staged or (self.index, self.bits)
            scatter(flat, index, bits)
            wrong = count_other(flat, index, bits)
        if wrong:
            raise mismatch(f"the engine holds other bits than were written at {wrong} elements of {self.region.tensor}")

    def add_to(self, digests: NextDigests[Region], files: OrderFiles) -> None:
        """Have the digests of the next version know of it; the memory still has the old bits."""
        if self.positions is not None and self.bits is not None:
            digests.add_change(self.region, TensorChange(bits=self.bits, positions=self.positions))
        elif self.region.is_in_runs:
            source = source_of(files, self.region).reshape(-1).numpy()
            digests.add_whole(self.region, source.view(f"u{source.itemsize}"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeSlice:
    """Elements [first, last) of one part of a tensor's changes; `part` None is a tensor that is copied whole."""

    tensor: str
    part: int | None = None
    first: int = 0
    last: int = 0

    def num_bytes(self, width: int) -> int:
        """Bytes of the positions and bits that are computed with. A whole copy has none: a thread reads the file for
        it."""
        return (self.last - self.first) * (8 + width)


def slices_of(files: OrderFiles, name: str) -> Iterator[ChangeSlice]:
    """What the order says of a tensor, in slices of at most `SLICE_ELEMENTS`."""
    counts = files.counts(name)
    if counts is None:
        yield ChangeSlice(tensor=name)
        return
    for part, count in enumerate(counts):
        for first in range(0, count, SLICE_ELEMENTS):
            yield ChangeSlice(tensor=name, part=part, first=first, last=min(first + SLICE_ELEMENTS, count))


def writes_of(files: OrderFiles, region: Region, width: int, of: ChangeSlice | None = None) -> Iterator[Write]:
    """What the order, or a slice of it, puts into a box; computed before the pause."""
    parts = files.sparse(region.tensor, width)
    if parts is not None and of is not None:
        assert of.part is not None
        positions, raw = parts[of.part]
        first, last = of.first, of.last
        parts = [(positions[first:last], raw[first * width : last * width])]
    if parts is None:
        yield Write(region=region)
        return
    for all_positions, raw in parts:
        near = region.span_of(all_positions)
        positions = np.array(all_positions[near])
        inside, index = region.targets(torch.from_numpy(positions))
        chosen = inside.numpy()
        bits = np.array(raw[near.start * width : near.stop * width]).view(f"u{width}")
        yield Write(region=region, index=index.numpy(), positions=positions[chosen], bits=bits[chosen])


def tensor_of(files: OrderFiles, name: str) -> torch.Tensor:
    """A tensor over the mapped file, which nobody writes to. (torch wants a writable mapping; pages stay shared.)"""
    place = files.places[name]
    return torch.from_numpy(files.raw(name)).view(DTYPES[place.dtype]).reshape(place.shape)


def source_of(files: OrderFiles, region: Region) -> torch.Tensor:
    """The region's part of the tensor in the file, as bits."""
    tensor = tensor_of(files, region.tensor)
    flat = tensor.reshape(-1).view(BITS[tensor.element_size()])
    return flat.as_strided(region.shape, region.source_strides, flat.storage_offset() + region.source_offset)


def parameter_of(model: torch.nn.Module, region: Region) -> torch.Tensor:
    """The parameter in which the region lies."""
    parameter = model.get_submodule(region.slot.module)._parameters[region.slot.name]
    assert parameter is not None
    return parameter


def flat_bits(parameter: torch.Tensor) -> torch.Tensor:
    """The storage of a parameter from its first element on, as integers."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
    return parameter.data.as_strided((size,), (1,)).view(BITS[parameter.element_size()])


def box_of(parameter: torch.Tensor, region: Region) -> torch.Tensor:
    """The region's part of a parameter, as bits."""
    return flat_bits(parameter).as_strided(
        region.shape, region.target_strides, parameter.storage_offset() + region.target_offset
    )


def gather(flat: torch.Tensor, index: NDArray[np.int64]) -> Bits:
    """A copy of the bits at some elements, in this process's own memory."""
    if flat.device.type == "cpu":
        return _as_numpy(flat)[index]  # a fifth of the time that torch's indexing takes
    return _as_numpy(flat[torch.from_numpy(index).to(flat.device)].cpu())


def scatter(flat: torch.Tensor, index: Any, bits: Any) -> None:
    """Write bits at places of a tensor: both arrays for one on a CPU, and both tensors on its device for any other."""
    if isinstance(bits, torch.Tensor):
        flat[index] = bits
    else:  # numpy takes a fifth of the time that torch's indexing takes
        _as_numpy(flat)[index] = bits


def count_other(flat: torch.Tensor, index: Any, bits: Any) -> int:
    """How many of these places of a tensor hold other bits."""
    if isinstance(bits, torch.Tensor):
        return int(torch.count_nonzero(flat[index] != bits))
    return int(np.count_nonzero(_as_numpy(flat)[index] != bits))


def _as_numpy(flat: torch.Tensor) -> Bits:
    return flat.numpy().view(f"u{flat.element_size()}")
