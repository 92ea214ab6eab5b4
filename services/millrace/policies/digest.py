"""Digests of tensors that do not depend on how the tensors are sharded.

The digest of a tensor is a 128-bit sum, two lanes modulo 2**64, of a keyed mix of (element index, element bits). A sum
commutes, so ranks digest their own shards, at the shards' element offsets, and add up. The mix is the finaliser of
SplitMix64 (Steele, Lea, Flood 2014), applied to the index and again to index and bits together: a changed, moved or
swapped element changes both lanes. It detects corruption and mix-ups; it is not a defence against an adversary, the
sha256 of the objects is.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from millrace.policies.change import TensorChange
from millrace.policies.tensors import TensorBytes

_MASK = (1 << 64) - 1
BLOCK_ELEMENTS = 1 << 14  # five scratch arrays of 8 bytes per element: they stay in a core's second-level cache
_SHARE_ELEMENTS = 1 << 22  # what one thread digests at a time: some 25 ms
_MAX_THREADS = 8
INDEX_KEY = 0x9E3779B97F4A7C15
LANE_KEYS = (np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7))
MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
"""SplitMix64's finaliser: shifts, each with the factor behind it. `LAST_SHIFT` ends it."""
LAST_SHIFT = 31
_ONE = np.uint64(1)


def tensor_digest(tensor: TensorBytes, *, start: int = 0) -> int:
    """The digest of a tensor, or of the contiguous shard whose first element has row-major index `start`, as an int."""
    return bits_digest(tensor.bits(), start=start)


def bits_digest(bits: NDArray[np.unsignedinteger], *, start: int = 0) -> int:
    """The digest of flat element bits whose first element has row-major index `start`."""
    mixer = _Mixer(min(bits.size, BLOCK_ELEMENTS))
    for begin in range(0, bits.size, BLOCK_ELEMENTS):
        block = bits[begin : begin + BLOCK_ELEMENTS]
        mixer.place_range(start + begin, block.size)
        mixer.add(block)
    return mixer.digest()


def placed_digest(bits: NDArray[np.unsignedinteger], positions: NDArray[np.int64]) -> int:
    """The digest of element bits [N] that lie at the row-major indices `positions` [N] of their tensor."""
    mixer = _Mixer(min(bits.size, BLOCK_ELEMENTS))
    for begin in range(0, bits.size, BLOCK_ELEMENTS):
        mixer.place_at(positions[begin : begin + BLOCK_ELEMENTS])
        mixer.add(bits[begin : begin + BLOCK_ELEMENTS])
    return mixer.digest()


def tensor_digests(tensors: Mapping[str, NDArray[np.unsignedinteger]]) -> dict[str, int]:
    """The digests of whole tensors, from their flat bits, by as many threads as `decode_threads` says."""
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
    """Threads that decode and digest: numpy and zstd work without the interpreter's lock."""
    return max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def change_digest(digest: int, change: TensorChange, old: NDArray[np.unsignedinteger]) -> int:
    """The digest of a tensor after a change, from its digest before, in O(changed).

    `old` [N] are the bits before the change of the elements that it sets (`change.old_bits`).
    """
    mixer = _Mixer(min(change.num_elements, BLOCK_ELEMENTS), digest)
    for begin in range(0, change.num_elements, BLOCK_ELEMENTS):
        end = begin + BLOCK_ELEMENTS
        if change.positions is None:
            mixer.place_range(change.start + begin, change.bits[begin:end].size)
        else:
            mixer.place_at(change.positions[begin:end])
        mixer.add(change.bits[begin:end])
        mixer.add(old[begin:end], sign=-1)
    return mixer.digest()


def add_digests(digests: Iterable[int]) -> int:
    """The digest of a whole tensor from those of its disjoint shards: the sum, lane by lane."""
    high = low = 0
    for digest in digests:
        high = (high + (digest >> 64)) & _MASK
        low = (low + (digest & _MASK)) & _MASK
    return (high << 64) | low


def digest_hex(digest: int) -> str:
    """The digest as 32 hex digits, the form in manifests."""
    return f"{digest:032x}"


def policy_digest(tensors: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The digest of a whole policy as hex: sha256 over (name, dtype, shape, tensor digest), sorted by name."""
    whole = hashlib.sha256()
    for name in sorted(tensors):
        dtype, shape, digest = tensors[name]
        whole.update(f"{name}\0{dtype}\0{','.join(map(str, shape))}\0{digest}\n".encode())
    return whole.hexdigest()


class _Mixer:
    """Both lanes' sums, from `digest` on, and scratch for `size` elements; every array operation is in place."""

    def __init__(self, size: int, digest: int = 0) -> None:
        self._lanes = [digest >> 64, digest & _MASK]
        self._ramp = np.arange(size, dtype=np.uint64)
        self._ramp *= np.uint64(INDEX_KEY)
        self._place, self._odd, self._held, self._mixed, self._scratch = np.empty((5, size), np.uint64)

    def place_range(self, first: int, count: int) -> None:
        """What is added next lies at the elements `first` .. `first + count`."""
        place = self._place[:count]
        np.add(self._ramp[:count], np.uint64(first * INDEX_KEY & _MASK), out=place)
        self._set_place(place)

    def place_at(self, positions: NDArray[np.int64]) -> None:
        """What is added next lies at the elements `positions`."""
        place = self._place[: positions.size]
        np.multiply(positions.view(np.uint64), np.uint64(INDEX_KEY), out=place)
        self._set_place(place)

    def add(self, bits: NDArray[np.unsignedinteger], *, sign: int = 1) -> None:
        """Add (sign 1) or take away (sign -1) the terms of elements at the places that were set last."""
        count = bits.size
        held, mixed = self._held[:count], self._mixed[:count]
        held[:] = bits  # widening in one go is faster than inside an operation
        held ^= self._place[:count]
        for lane, key in enumerate(LANE_KEYS):
            np.multiply(self._odd[:count], key, out=mixed)
            mixed += held
            self._mix(mixed)
            self._lanes[lane] += sign * int(mixed.sum(dtype=np.uint64))

    def digest(self) -> int:
        """The lanes as one integer."""
        return (self._lanes[0] & _MASK) << 64 | (self._lanes[1] & _MASK)

    def _set_place(self, place: NDArray[np.uint64]) -> None:
        self._mix(place)
        np.bitwise_or(place, _ONE, out=self._odd[: place.size])

    def _mix(self, x: NDArray[np.uint64]) -> None:
        """SplitMix64's finaliser in place; arithmetic wraps modulo 2**64."""
        shifted = self._scratch[: x.size]
        for shift, factor in MIX:
            x ^= np.right_shift(x, np.uint64(shift), out=shifted)
            x *= np.uint64(factor)
        x ^= np.right_shift(x, np.uint64(LAST_SHIFT), out=shifted)
