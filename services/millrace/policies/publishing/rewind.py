"""The bits of an earlier version, kept as what was overwritten since."""

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
_POSITION = np.dtype("<u4")  # parts of up to 2**32 elements; larger ones keep wider positions


class Rewind:
    """One part as it was when this was made, from what it is now and what was noted between.

    Memory: 4 bytes and one element for every change noted, 6 bytes at bf16: at 1 % of changes per step and 16 steps
    about 1 byte per parameter. It is never more than one copy of the part: from there on it is that copy.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[NDArray[np.unsignedinteger], Bits]] = []
        self._whole: Bits | None = None
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Memory that is held."""
        return self._size_bytes

    def note(self, old: Bits, positions: NDArray[np.int64]) -> None:
        """Take note that the elements at `positions` of the part, which is `old` now, are about to change."""
        if self._whole is not None or not positions.size:
            return
        held = positions.astype(_POSITION) if old.size <= np.iinfo(_POSITION).max else positions.astype("<u8")
        size_bytes = held.nbytes + positions.size * old.itemsize
        if self._size_bytes + size_bytes > old.nbytes:
            self._whole = self.bits(old).copy()
            self._steps, self._size_bytes = [], old.nbytes
            return
        self._steps.append((held, old[positions]))
        self._size_bytes += size_bytes

    def bits(self, now: Bits) -> Bits:
        """The part as it was; `now` itself if nothing was noted. Not to be written to."""
        if self._whole is not None:
            return self._whole
        if not self._steps:
            return now
        then = now.copy()
        for positions, bits in reversed(self._steps):
            then[positions] = bits
        return then
