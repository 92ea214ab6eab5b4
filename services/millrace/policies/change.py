"""What differs between two versions of one tensor."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import CorruptObjectError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorChange:
    """New bits of some elements of one tensor, as absolute values: to apply them twice is to apply them once.

    `positions` int64 [N] are row-major element indices, strictly increasing; None means the contiguous range of `bits`
    that begins at `start`. `bits` [N] are the elements' bits as unsigned integers of the dtype's width.
    """

    bits: NDArray[np.unsignedinteger]
    positions: NDArray[np.int64] | None = None
    start: int = 0

    @property
    def num_elements(self) -> int:
        """Elements that are set."""
        return int(self.bits.size)

    def old_bits(self, held: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """The bits that the whole flat tensor `held` has now where this change sets some (a view for a range)."""
        self._check(held)
        if self.positions is None:
            return held[self.start : self.start + self.bits.size]
        return held[self.positions]

    def apply(self, held: NDArray[np.unsignedinteger]) -> None:
        """Set the elements in `held`, the whole tensor's flat bits, in place; raise before it writes anything."""
        self._check(held)
        if self.positions is None:
            held[self.start : self.start + self.bits.size] = self.bits
        else:
            held[self.positions] = self.bits

    def shares(self, size: int) -> Iterator[tuple[int, "TensorChange"]]:
        """This change cut at the multiples of `size` elements: where each part's share begins, and the part."""
        if self.num_elements == 0:
            return
        last = self.start + self.num_elements - 1 if self.positions is None else int(self.positions[-1])
        first = (self.start if self.positions is None else int(self.positions[0])) // size * size
        for share in range(first, last + 1, size):
            if self.positions is None:
                begin, end = max(share - self.start, 0), min(share + size - self.start, self.num_elements)
                yield share, TensorChange(bits=self.bits[begin:end], start=self.start + begin)
            else:
                begin, end = np.searchsorted(self.positions, (share, share + size))
                if begin < end:
                    yield share, TensorChange(bits=self.bits[begin:end], positions=self.positions[begin:end])

    def _check(self, held: NDArray[np.unsignedinteger]) -> None:
        """The change must lie inside the tensor and have its width (numpy would wrap, cast or broadcast silently)."""
        first, last = self.start, self.start + self.bits.size - 1
        if self.positions is not None:
            if self.positions.size != self.bits.size:
                raise _bad(f"{self.positions.size} positions come with {self.bits.size} values")
            first, last = (int(self.positions[0]), int(self.positions[-1])) if self.positions.size else (0, -1)
        if self.bits.dtype != held.dtype:
            raise _bad(f"it sets {self.bits.dtype} bits in a tensor of {held.dtype} bits")
        if first < 0 or last >= held.size:
            raise _bad(f"it sets elements {first} to {last} of a tensor of {held.size} elements")


def _bad(what: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"a change does not fit its tensor: {what}",
        reason="CHANGE_OUT_OF_BOUNDS",
        remedy="the policy and the held copy disagree about the tensor; reload the policy from its anchor",
    )
