"""What differs between two versions of one tensor."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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
