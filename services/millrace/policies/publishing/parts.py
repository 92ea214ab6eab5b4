"""What one rank of a trainer publishes: contiguous row-major ranges of tensors, as bits."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.policies.digest import tensor_digest
from millrace.policies.tensors import TensorBytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """Elements `start` to `start + count` of a tensor of dtype tag `dtype` and shape `shape` (that of the whole).

    `bits` [count] are unsigned integers of the dtype's width; a rank that holds nothing of the tensor has none.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bits: NDArray[np.unsignedinteger]

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
        held = TensorBytes(dtype=self.dtype, shape=(self.count,), data=self.data())
        return tensor_digest(held, start=self.start)


def whole_parts(tensors: Iterable[tuple[str, TensorBytes]]) -> list[TensorPart]:
    """The parts of a writer that holds every tensor whole, over the same memory."""
    return [
        TensorPart(name=name, dtype=tensor.dtype, shape=tensor.shape, start=0, bits=tensor.bits())
        for name, tensor in tensors
    ]
