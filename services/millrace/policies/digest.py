"""Digests of tensors that do not depend on how the tensors are sharded.

The digest of a tensor is a 128-bit sum, two lanes modulo 2**64, over its elements. With an element's odd place
`p = (2 * index + 1) * G` and `x = mix(p + bits * K)`, where the mix is the finaliser of SplitMix64 (Steele, Lea, Flood
2014) and G and K are odd constants, the lanes add up `x` and `x * p`. A sum commutes, so ranks digest their own shards,
at the shards' element offsets, and add up. For each place `x` is a bijection of the bits: a changed element changes
both lanes, and so do moved and swapped ones but for a chance of 2**-64. It detects corruption and mix-ups; it is not a
defence against an adversary, the sha256 of the objects is.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from millrace.policies.tensors import TensorBytes, TensorChange

_MASK = (1 << 64) - 1
# Five scratch arrays of 8 bytes per element: they stay in a core's second-level cache.
BLOCK_ELEMENTS = 1 << 14
_SHARE_ELEMENTS = 1 << 22  # what one thread digests at a time: some 25 ms
_MAX_THREADS = 8
PLACE_KEY, BITS_KEY = 0x9E3779B97F4A7C15, 0xD1B54A32D192ED03
"""G and K of the formula."""
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""SplitMix64's finaliser: shifts, each with the factor after it. `LAST_SHIFT` ends it."""
LAST_SHIFT = 31


def tensor_digest(tensor: TensorBytes, *, start: int = 0) -> int:
    """Return the digest of a tensor, a 128-bit number.

    `start` is the row-major index of the first element if it is only a contiguous shard of a tensor: its digest is a
    summand of the whole one (`add_digests`).
    """
    return bits_digest(tensor.bits(), start=start)


def bits_digest(bits: NDArray[np.unsignedinteger], *, start: int = 0) -> int:
    """Return the digest (128 bits) of flat element bits; the first has row-major index `start` in its tensor."""
    lanes = _Lanes(min(bits.size, BLOCK_ELEMENTS))
    for begin in range(0, bits.size, BLOCK_ELEMENTS):
        block = bits[begin : begin + BLOCK_ELEMENTS]
        lanes.place_range(start + begin, block.size)
        lanes.add(block)
    return lanes.digest()


def placed_digest(bits: NDArray[np.unsignedinteger], positions: NDArray[np.int64]) -> int:
    """Return what the element bits [N] at the row-major indices `positions` [N] add to their tensor's digest."""
    lanes = _Lanes(min(bits.size, BLOCK_ELEMENTS))
    for begin in range(0, bits.size, BLOCK_ELEMENTS):
        lanes.place_at(positions[begin : begin + BLOCK_ELEMENTS])
        lanes.add(bits[begin : begin + BLOCK_ELEMENTS])
    return lanes.digest()


def tensor_digests(tensors: Mapping[str, NDArray[np.unsignedinteger]]) -> dict[str, int]:
    """Return the digests of whole tensors by name, from their flat bits, computed by several threads."""
    # Large tensors are cut, so that one of them does not keep a single thread busy while the others have ended.
    shares = [(name, first) for name, bits in tensors.items() for first in range(0, bits.size, _SHARE_ELEMENTS)]

    def digest(share: tuple[str, int]) -> int:
        name, first = share
        return bits_digest(tensors[name][first : first + _SHARE_ELEMENTS], start=first)

    found = dict.fromkeys(tensors, 0)
    with ThreadPoolExecutor(decode_threads(), thread_name_prefix="policy-digest") as pool:
        for (name, _), part in zip(shares, pool.map(digest, shares), strict=True):
            found[name] = add_digests((found[name], part))
    return found


def decode_threads() -> int:
    """Return how many threads decode and digest: one for each processor of this process, at most eight.

    numpy and zstd release the interpreter's lock.
    """
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def change_digest(digest: int, change: TensorChange, old: NDArray[np.unsignedinteger]) -> int:
    """Return the digest of a tensor after a change, from `digest`, the one before, in O(changed).

    `old` [N] are the bits before the change of the elements that it sets (`change.old_bits`).
    """
    lanes = _Lanes(min(change.num_elements, BLOCK_ELEMENTS), digest)
    for begin in range(0, change.num_elements, BLOCK_ELEMENTS):
        end = begin + BLOCK_ELEMENTS
        if change.positions is None:
            lanes.place_range(change.start + begin, change.bits[begin:end].size)
        else:
            lanes.place_at(change.positions[begin:end])
        lanes.add(change.bits[begin:end], instead_of=old[begin:end])
    return lanes.digest()


def add_digests(digests: Iterable[int]) -> int:
    """Return the digest of a whole tensor from those of its disjoint shards: the sum, lane by lane."""
    high = low = 0
    for digest in digests:
        high = (high + (digest >> 64)) & _MASK
        low = (low + (digest & _MASK)) & _MASK
    return (high << 64) | low


def digest_hex(digest: int) -> str:
    """Return a digest as 32 hex digits, its form in manifests."""
    return f"{digest:032x}"


def policy_digest(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """Return the digest (hex) of a whole policy: a sha256 over its tensors, sorted by name.

    `tensors` has (dtype, shape, digest as hex) by name.
    """
    whole = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        whole.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{digest}\n".encode())
    return whole.hexdigest()


class _Lanes:
    """Both lanes' sums, from `digest` on, and scratch for `size` elements; every array operation is in place."""

    def __init__(self, size: int, digest: int = 0) -> None:
        """Begin with the sums in `digest`, and scratch memory for `size` elements at a time."""
        self._sums = [digest >> 64, digest & _MASK]
        self._ramp = np.arange(1, 2 * size, 2, dtype=np.uint64)
        self._ramp *= np.uint64(PLACE_KEY)
        self._places, self._mixed, self._before, self._scratch = np.empty((4, size), np.uint64)

    def place_range(self, first: int, count: int) -> None:
        """Set the places of the next elements to add: row-major indices `first` to `first + count`."""
        # (2 (first + j) + 1) G is the ramp's (2 j + 1) G and one constant: an addition an element, and no
        # multiplication.
        np.add(self._ramp[:count], np.uint64(2 * first * PLACE_KEY & _MASK), out=self._places[:count])

    def place_at(self, positions: NDArray[np.int64]) -> None:
        """Set the places of the next elements to add: the row-major indices `positions`."""
        places = self._places[: positions.size]
        np.multiply(positions.view(np.uint64), np.uint64(2 * PLACE_KEY & _MASK), out=places)
        places += np.uint64(PLACE_KEY)

    def add(self, bits: NDArray[np.unsignedinteger], *, instead_of: NDArray[np.unsignedinteger] | None = None) -> None:
        """Add the terms of elements at the places that were set last, less those of the bits `instead_of` there."""
        places, mixed = self._places[: bits.size], self._mixed[: bits.size]
        self._mix(bits, out=mixed)
        # The old terms are taken off in the same pass: sums of differences are differences of sums, modulo 2**64.
        if instead_of is not None:
            before = self._before[: bits.size]
            self._mix(instead_of, out=before)
            mixed -= before
        # The sums are Python's integers, which do not wrap; `digest` reduces them.
        self._sums[0] += int(mixed.sum(dtype=np.uint64))
        # `dot` of uint64 wraps modulo 2**64, as the lane does.
        self._sums[1] += int(np.dot(mixed, places))

    def digest(self) -> int:
        """Return both sums as one 128-bit number."""
        return (self._sums[0] & _MASK) << 64 | (self._sums[1] & _MASK)

    def _mix(self, bits: NDArray[np.unsignedinteger], *, out: NDArray[np.uint64]) -> None:
        """Compute the mix of places and bits into `out`, by SplitMix64's finaliser; arithmetic wraps modulo 2**64."""
        shifted = self._scratch[: bits.size]
        # Widened to 64 bits in one pass, which is faster than inside the next operation.
        out[:] = bits
        out *= np.uint64(BITS_KEY)
        out += self._places[: bits.size]
        # Without the mix the digest would be linear in the bits, and would not prove the base below a step of one unit
        # in the last place (docs/decisions/delta_codec.md).
        for shift, factor in MIX:
            out ^= np.right_shift(out, np.uint64(shift), out=shifted)
            out *= np.uint64(factor)
        out ^= np.right_shift(out, np.uint64(LAST_SHIFT), out=shifted)
