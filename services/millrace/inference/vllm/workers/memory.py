"""A worker's memory and the host copy's file as flat bits, and what a version writes where."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.inference.torch_dtypes import BITS, DTYPES
from millrace.inference.vllm.orders import OrderFiles
from millrace.inference.vllm.workers.layout import Region

Bits = NDArray[np.unsignedinteger]

PIECE_ELEMENTS = 1 << 20
"""Changed elements that are looked up at a time: some ten milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Write:
    """What a version puts into one box: `bits` [N] at the elements `index` [N] of the parameter's storage.

    `positions` [N] are the same elements in the tensor. `index` None: the whole box is copied from the file.
    """

    region: Region
    index: NDArray[np.int64] | None = None
    positions: NDArray[np.int64] | None = None
    bits: Bits | None = None

    def put(self, files: OrderFiles, parameter: torch.Tensor) -> None:
        """Write it, and read it back from the memory at once; InternalError if other bits are there."""
        if self.index is None or self.bits is None:
            source = source_of(files, self.region).to(parameter.device)
            box = box_of(parameter, self.region)
            box.copy_(source)
            wrong = 0 if torch.equal(box, source) else int((box != source).sum())
        else:
            flat = flat_bits(parameter)
            _scatter(flat, self.index, self.bits)
            wrong = int(np.count_nonzero(gather(flat, self.index) != self.bits))
        if wrong:
            raise InternalError(
                f"the engine holds other bits than were written at {wrong} elements of {self.region.tensor}",
                reason="POLICY_READBACK_MISMATCH",
                remedy="the policy is loaded anew",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Elements [first, last) of one part of a tensor's changes; `part` None is a tensor that is copied whole."""

    tensor: str
    part: int | None = None
    first: int = 0
    last: int = 0

    def num_bytes(self, width: int) -> int:
        """Of its positions and bits, which are computed with; a copy of the whole is one of the file, in a thread."""
        return (self.last - self.first) * (8 + width)


def pieces_of(files: OrderFiles, name: str) -> Iterator[Piece]:
    """What the order says of a tensor, in pieces of at most `PIECE_ELEMENTS`."""
    counts = files.counts(name)
    if counts is None:
        yield Piece(tensor=name)
        return
    for part, count in enumerate(counts):
        for first in range(0, count, PIECE_ELEMENTS):
            yield Piece(tensor=name, part=part, first=first, last=min(first + PIECE_ELEMENTS, count))


def writes_of(files: OrderFiles, region: Region, width: int, piece: Piece | None = None) -> Iterator[Write]:
    """What the order, or a piece of it, puts into a box; computed before the pause."""
    parts = files.sparse(region.tensor, width)
    if parts is not None and piece is not None:
        assert piece.part is not None
        positions, raw = parts[piece.part]
        first, last = piece.first, piece.last
        parts = [(positions[first:last], raw[first * width : last * width])]
    if parts is None:
        yield Write(region=region)
        return
    for positions, raw in parts:
        inside, index = region.targets(torch.from_numpy(np.array(positions)))
        chosen = inside.numpy()
        bits = np.array(raw).view(f"u{width}")
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


def copy_of(flat: torch.Tensor, first: int, last: int) -> Bits:
    """A copy of the elements [first, last), in this process's own memory."""
    part = flat[first:last]
    return _as_numpy(part.clone() if part.device.type == "cpu" else part.cpu())


def _scatter(flat: torch.Tensor, index: NDArray[np.int64], bits: Bits) -> None:
    if flat.device.type == "cpu":
        _as_numpy(flat)[index] = bits
        return
    given = torch.from_numpy(bits.view(f"i{bits.itemsize}") if bits.itemsize > 1 else bits)
    flat[torch.from_numpy(index).to(flat.device)] = given.to(flat.device)


def _as_numpy(flat: torch.Tensor) -> Bits:
    return flat.numpy().view(f"u{flat.element_size()}")
