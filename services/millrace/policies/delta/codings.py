"""Reversible array transformations of the delta codec: floats in order of size, positions as gaps, values as planes.

All are vectorised, work on flat unsigned arrays of any width, and know nothing of frames or compression.
"""

import numpy as np
from numpy.typing import NDArray

from millrace.errors import CorruptObjectError

Bits = NDArray[np.unsignedinteger]


def ulp_map(bits: Bits) -> Bits:
    """Map float bits to integers, as unsigned bits, in which neighbours in value are neighbours; its own inverse.

    On the signed view it is `s if s >= 0 else -(s & max) - 1`, which is bijective: -0 maps to -1, and NaNs lie beyond
    the infinities. A step of one unit in the last place is a difference of one, modulo 2**bits.
    """
    width = bits.dtype.itemsize
    signed = bits.view(f"i{width}")
    sign_mask = (signed >> (8 * width - 1)).view(bits.dtype)
    sign_mask >>= 1
    sign_mask ^= bits
    return sign_mask


def zigzag(difference: Bits) -> Bits:
    """Map differences, as unsigned bits, so that small ones of either sign are small: 0, -1, 1, -2 to 0, 1, 2, 3."""
    width = difference.dtype.itemsize
    folded = (difference.view(f"i{width}") >> (8 * width - 1)).view(difference.dtype)
    folded ^= difference << 1
    return folded


def unzigzag(folded: Bits) -> Bits:
    """The inverse of `zigzag`."""
    sign_mask = np.negative((folded & 1).view(f"i{folded.dtype.itemsize}")).view(folded.dtype)
    sign_mask ^= folded >> 1
    return sign_mask


def differing(old: Bits, new: Bits) -> NDArray[np.int64]:
    """The indices at which two contiguous arrays differ: first the words of eight bytes, then the elements in those."""
    shift = (8 // new.dtype.itemsize).bit_length() - 1
    whole = new.size >> shift << shift
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    words = np.flatnonzero(old_words != new_words)
    inside = np.flatnonzero(old_words[words].view(new.dtype) != new_words[words].view(new.dtype))
    positions = words[inside >> shift]
    positions <<= shift
    inside &= (1 << shift) - 1
    positions += inside
    if whole == new.size:
        return positions
    return np.concatenate([positions, np.flatnonzero(old[whole:] != new[whole:]) + whole])


def encode_gaps(positions: NDArray[np.int64], *, previous: int, width: int) -> Bits:
    """Gaps between increasing positions as units of `width` bytes; `previous` is the position before the first.

    A unit below the largest says how many elements are skipped before the next position; the largest skips that many
    elements and names none, so that a gap of any length is some of those and one other unit.
    """
    escape = (1 << (8 * width)) - 1
    skipped = np.empty(positions.size, np.int64)
    skipped[:1] = positions[:1] - (previous + 1)
    np.subtract(positions[1:], positions[:-1], out=skipped[1:])
    skipped[1:] -= 1
    units = skipped.astype(f"<u{width}")
    long = np.flatnonzero(skipped >= escape)
    if not long.size:
        return units
    escapes, units[long] = np.divmod(skipped[long], escape)
    return np.insert(units, np.repeat(long, escapes), escape)


def decode_gaps(units: Bits, *, num_positions: int, limit: int, what: str) -> NDArray[np.int64]:
    """The positions, all below `limit`; raises CorruptObjectError unless the units say exactly `num_positions`."""
    named = units != np.iinfo(units.dtype).max
    if np.count_nonzero(named) != num_positions or (units.size and not named[-1]):
        raise corrupt(f"its {what} do not name {num_positions} elements")
    ends = np.cumsum(named, dtype=np.int64)  # a unit names an element or not: one more or none
    ends += np.cumsum(units, dtype=np.int64)
    positions = ends[named]
    positions -= 1
    if num_positions and int(positions[-1]) >= limit:
        raise corrupt(f"its {what} reach element {int(positions[-1])} of {limit}")
    return positions


def to_planes(values: Bits) -> list[NDArray[np.uint8]]:
    """The values' bytes by significance, the lowest first, each plane contiguous."""
    planes = values.view(np.uint8).reshape(values.size, values.dtype.itemsize)
    return [np.ascontiguousarray(planes[:, byte]) for byte in range(values.dtype.itemsize)]


def from_planes(planes: list[NDArray[np.uint8]]) -> Bits:
    """The inverse of `to_planes`."""
    width = len(planes)
    values = np.empty((planes[0].size, width), np.uint8)
    for byte, plane in enumerate(planes):
        values[:, byte] = plane
    return values.reshape(-1).view(f"<u{width}")


def corrupt(what: str) -> CorruptObjectError:
    """The error of a frame that breaks its format."""
    return CorruptObjectError(
        f"a policy delta is damaged: {what}",
        reason="DELTA_CORRUPT",
        remedy="fetch the object again; if it stays so, reload the policy from its anchor",
    )
