"""The delta codec beside three references, all over the same two versions, one core, interleaved.

References: `full`, the new version as one safetensors file (what an engine without deltas reads); `XOR + zstd-1`, base
XOR new compressed tensor by tensor; `int32 + value`, changed positions as int32 and values as bf16, uncompressed.
They carry no digests and prove nothing.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray
from weight_sync_data import Versions

from millrace.policies import delta_codec as delta
from millrace.policies import delta_frame as frame_kinds
from millrace.policies.delta_codec import decode_piece, encode_piece
from millrace.policies.digest import bits_digest
from millrace.policies.tensors import TensorBytes, pack_safetensors, read_places

OURS = "delta"
OURS_BARE = "delta without digests"
FULL, XOR, INDEX = "full safetensors", "XOR + zstd-1", "int32 + value"

Bits = NDArray[np.uint16]


@dataclass(slots=True, kw_only=True)
class Codec:
    """`encode` makes the bytes of all tensors; `apply` brings `held`, copies of the bases, to the new version."""

    name: str
    encode: Callable[[], list[Any]]
    apply: Callable[[list[Any], list[Bits]], None]
    size: Callable[[list[Any]], int] = lambda parts: sum(map(len, parts))
    encode_s: list[float] = field(default_factory=list)
    apply_s: list[float] = field(default_factory=list)
    size_bytes: int = 0


def codecs(versions: Versions) -> list[Codec]:
    """All codecs over these versions. Ours knows the digests of the base, as the publisher and the host copy do."""
    pairs = versions.pairs
    digests = [bits_digest(base) for base, _ in pairs]

    def encode() -> list[Any]:
        return [encode_piece(*pair, base_digest=digest) for pair, digest in zip(pairs, digests, strict=True)]

    def apply(pieces: list[Any], held: list[Bits]) -> None:
        for piece, bits, digest in zip(pieces, held, digests, strict=True):
            if piece is not None:
                decode_piece(piece.data, bits, current_digest=digest).apply(bits)

    def encode_bare() -> list[Any]:
        with no_digests():
            return encode()

    def apply_bare(pieces: list[Any], held: list[Bits]) -> None:
        with no_digests():
            apply(pieces, held)

    def size(pieces: list[Any]) -> int:
        return sum(len(piece.data) for piece in pieces if piece is not None)

    return [
        Codec(name=OURS, encode=encode, apply=apply, size=size),
        Codec(name=OURS_BARE, encode=encode_bare, apply=apply_bare, size=size),
        *references(pairs),
    ]


@contextmanager
def no_digests() -> Iterator[None]:
    """Lets the codec run without the digest of the result: frames have a wrong one, and nothing is proved."""
    kept = delta.bits_digest, delta.change_digest, frame_kinds.change_digest, delta._check_result
    delta.bits_digest = lambda bits, start=0: 0
    delta.change_digest = frame_kinds.change_digest = lambda digest, change, old: 1
    delta._check_result = lambda header, digest: None
    try:
        yield
    finally:
        delta.bits_digest, delta.change_digest, frame_kinds.change_digest, delta._check_result = kept


def references(pairs: Sequence[tuple[Bits, Bits]]) -> list[Codec]:
    names = [f"tensor.{number}" for number in range(len(pairs))]

    def full() -> list[Any]:
        tensors = [TensorBytes.from_numpy(new, dtype="bfloat16") for _, new in pairs]
        return [pack_safetensors(zip(names, tensors, strict=True))[0]]

    def apply_full(parts: list[Any], held: list[Bits]) -> None:
        places = read_places(parts[0], source="benchmark")
        for place, bits in zip(places, held, strict=True):
            bits[:] = np.frombuffer(parts[0], np.uint16, count=bits.size, offset=place.offset)

    def xor() -> list[Any]:
        return [zstandard.ZstdCompressor(level=1).compress((base ^ new).data) for base, new in pairs]

    def apply_xor(parts: list[Any], held: list[Bits]) -> None:
        for part, bits in zip(parts, held, strict=True):
            bits ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(part), np.uint16)

    def index() -> list[Any]:
        parts: list[bytes] = []
        for base, new in pairs:
            positions = np.flatnonzero(base != new)
            parts += [positions.astype(np.int32).tobytes(), new[positions].tobytes()]
        return parts

    def apply_index(parts: list[Any], held: list[Bits]) -> None:
        for positions, values, bits in zip(parts[::2], parts[1::2], held, strict=True):
            bits[np.frombuffer(positions, np.int32)] = np.frombuffer(values, np.uint16)

    return [
        Codec(name=XOR, encode=xor, apply=apply_xor),
        Codec(name=INDEX, encode=index, apply=apply_index),
        Codec(name=FULL, encode=full, apply=apply_full),
    ]


def measure(versions: Versions, *, repeats: int) -> list[Codec]:
    """Times every codec `repeats` times in turn, in processor seconds of this thread, and checks what came out."""
    all_codecs = codecs(versions)
    for repeat in range(repeats + 1):
        for codec in all_codecs:
            held = [base.copy() for base, _ in versions.pairs]
            began = time.thread_time()
            parts = codec.encode()
            encoded = time.thread_time()
            codec.apply(parts, held)
            applied = time.thread_time()
            if not all(np.array_equal(bits, new) for bits, (_, new) in zip(held, versions.pairs, strict=True)):
                raise AssertionError(f"{codec.name} did not bring back {versions.name}")
            codec.size_bytes = codec.size(parts)
            if repeat:  # the first round warms caches and allocators
                codec.encode_s.append(encoded - began)
                codec.apply_s.append(applied - encoded)
    return all_codecs


def speed(versions: Versions, seconds: Sequence[float]) -> float:
    """GB/s of full bf16 bytes."""
    return 2 * versions.num_elements / statistics.median(seconds) / 1e9


def kinds(versions: Versions) -> str:
    """The kinds of frames that the codec chose, by elements, the most common one."""
    counts: dict[str, int] = {}
    for base, new in versions.pairs:
        piece = encode_piece(base, new, base_digest=0)
        kind = "unchanged" if piece is None else piece.kind
        counts[kind] = counts.get(kind, 0) + base.size
    return max(counts, key=lambda kind: counts[kind])
