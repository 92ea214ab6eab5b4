"""What one rank of a trainer publishes, contiguous row-major ranges of tensors, and what the ranks tell each other of
it: plain data, never weights."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.policies.digest import add_digests, bits_digest, digest_hex
from millrace.policies.manifest import Encoding, TensorEntry
from millrace.policies.tensors import TensorBytes
from millrace.processes.shared_memory import SharedPlace


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """Elements `start` to `start + count` of a tensor of dtype tag `dtype` and shape `shape` (that of the whole).

    `bits` [count] are unsigned integers of the dtype's width; a rank that holds nothing of the tensor has none.
    `place` is where they lie, if another process can see them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bits: NDArray[np.unsignedinteger]
    place: SharedPlace | None = None

    @property
    def count(self) -> int:
        """Elements of this part."""
        return int(self.bits.size)

    @property
    def is_whole(self) -> bool:
        """Whether the part is the tensor."""
        return self.start == 0 and self.count == math.prod(self.shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """The shape under which the part lies in a file: the tensor's own, or flat if it is a part only."""
        return self.shape if self.is_whole else (self.count,)

    def data(self) -> memoryview:
        """The part's little-endian bytes, over the same memory."""
        return self.bits.view(np.uint8).data

    def digest(self) -> int:
        """The part's share of the tensor's digest."""
        return bits_digest(self.bits, start=self.start)


def whole_parts(tensors: Iterable[tuple[str, TensorBytes]]) -> list[TensorPart]:
    """The parts of a writer that holds every tensor whole, over the same memory."""
    return [
        TensorPart(name=name, dtype=tensor.dtype, shape=tensor.shape, start=0, bits=tensor.bits())
        for name, tensor in tensors
    ]


def pack_digests(parts: Sequence[TensorPart], digests: Mapping[str, int]) -> list[Any]:
    """A rank's parts and their digests."""
    return [[part.name, part.dtype, part.shape, part.count, digest_hex(digests[part.name])] for part in parts]


def merge_digests(shares: Iterable[list[Any]]) -> tuple[TensorEntry, ...]:
    """The tensors of the version, in the order of the first rank that has each: digests are sums over the ranks'."""
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for share in shares:
        for name, dtype, shape, count, digest in share:
            _, _, held, so_far = found.get(name, (dtype, tuple(shape), 0, 0))
            found[name] = dtype, tuple(shape), held + count, add_digests([so_far, int(digest, 16)])
    entries: list[TensorEntry] = []
    for name, (dtype, shape, held, digest) in found.items():
        entry = TensorEntry(name=name, shape=shape, dtype=dtype, digest=digest_hex(digest))
        if held != entry.num_elements:
            raise InternalError(
                f"the ranks hold {held} elements of tensor {name}, which has {entry.num_elements}",
                reason="SHARD_LAYOUT_UNKNOWN",
                remedy="this is a defect of Millrace; train with one rank until it is mended",
            )
        entries.append(entry)
    return tuple(entries)


def pack_encodings(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """A rank's share of every encoding."""
    names = sorted({piece.tensor for encoding in encodings for piece in encoding.pieces})
    places = {name: place for place, name in enumerate(names)}
    return {"names": names, "encodings": [encoding.to_json(places) for encoding in encodings]}


def merge_encodings(shares: Iterable[Mapping[str, Any]]) -> tuple[Encoding, ...]:
    """The encodings of the version: those of the ranks, which have the same ones in the same order, put together."""
    merged: list[Encoding] = []
    for share in shares:
        names = tuple(share["names"])
        for place, item in enumerate(share["encodings"]):
            encoding = Encoding.from_json(item, names)
            if place == len(merged):
                merged.append(encoding)
                continue
            so_far = merged[place]
            merged[place] = replace(
                so_far, objects=so_far.objects + encoding.objects, pieces=so_far.pieces + encoding.pieces
            )
    return tuple(merged)
