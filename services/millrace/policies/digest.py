"""Digests of tensors that do not depend on how the tensors are sharded.

The digest of a tensor is a 128-bit sum, two lanes modulo 2**64, of a keyed mix of (element index, element bits). A sum
commutes, so ranks digest their own shards, at the shards' element offsets, and add up. The mix is the finaliser of
SplitMix64 (Steele, Lea, Flood 2014), applied to the index and again to index and bits together: a changed, moved or
swapped element changes both lanes. It detects corruption and mix-ups; it is not a defence against an adversary, the
sha256 of the objects is.
"""

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np

from millrace.policies.tensors import TensorBytes

_MASK = (1 << 64) - 1
_BLOCK_ELEMENTS = 1 << 20  # bounds the scratch memory to a few tens of MiB
_INDEX_KEY = np.uint64(0x9E3779B97F4A7C15)
_LANE_KEYS = (np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7))


def tensor_digest(tensor: TensorBytes, *, start: int = 0) -> int:
    """The digest of a tensor, or of the contiguous shard whose first element has row-major index `start`, as an int."""
    bits = tensor.bits()
    lanes = [0, 0]
    for begin in range(0, bits.size, _BLOCK_ELEMENTS):
        block = bits[begin : begin + _BLOCK_ELEMENTS].astype(np.uint64)
        index = np.arange(start + begin, start + begin + block.size, dtype=np.uint64)
        index *= _INDEX_KEY
        place = _mix(index)
        for lane, key in enumerate(_LANE_KEYS):
            mixed = _mix((block ^ place) + key * (place | np.uint64(1)))
            lanes[lane] = (lanes[lane] + int(mixed.sum(dtype=np.uint64))) & _MASK
    return (lanes[0] << 64) | lanes[1]


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


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on a uint64 array, in place where it can be; arithmetic wraps modulo 2**64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
