"""Uploads one rank's share of a policy version: its pieces, packed into objects."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from millrace.policies.manifest import CODEC_DELTA, CODEC_FULL, Encoding, ObjectEntry, Piece, sha256_hex
from millrace.policies.publishing.parts import TensorPart
from millrace.policies.tensors import plan_safetensors
from millrace.storage.base import ObjectStore

T = TypeVar("T")

DEFAULT_SHARD_BYTES = 1 << 30  # one data object; also what the publisher holds in memory besides the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The encoded change of one part."""

    tensor: str
    start: int
    count: int
    data: bytes


def upload_full(
    store: ObjectStore, base: str, parts: Iterable[TensorPart], *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Encoding:
    """Upload parts as safetensors files `{base}model-00001.safetensors`, …; a tensor is never cut in two by this."""
    objects: list[ObjectEntry] = []
    pieces: list[Piece] = []
    held = [(part, part.bits.nbytes) for part in parts if part.count]
    for number, group in enumerate(group_by_bytes(held, shard_bytes), start=1):
        head, places, _ = plan_safetensors((part.name, part.dtype, part.held_shape) for part in group)
        data = b"".join([head, *(part.data() for part in group)])
        entry = _put(store, f"{base}model-{number:05d}.safetensors", data)
        objects.append(entry)
        pieces += [
            Piece(
                tensor=part.name,
                start=part.start,
                count=part.count,
                object=entry.key,
                offset=place.offset,
                length_bytes=place.length_bytes,
            )
            for part, place in zip(group, places, strict=True)
        ]
    return Encoding(codec=CODEC_FULL, objects=tuple(objects), pieces=tuple(pieces))


def upload_delta(
    store: ObjectStore,
    base: str,
    frames: Sequence[Frame],
    *,
    against: int,
    against_digest: str,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Encoding:
    """Upload frames against version `against`, one behind the other, as `{base}delta-{against}-00001.bin`, …."""
    objects: list[ObjectEntry] = []
    pieces: list[Piece] = []
    sized = [(frame, len(frame.data)) for frame in frames]
    for number, group in enumerate(group_by_bytes(sized, shard_bytes), start=1):
        entry = _put(store, f"{base}delta-{against:08d}-{number:05d}.bin", b"".join(frame.data for frame in group))
        objects.append(entry)
        offset = 0
        for frame in group:
            pieces.append(
                Piece(
                    tensor=frame.tensor,
                    start=frame.start,
                    count=frame.count,
                    object=entry.key,
                    offset=offset,
                    length_bytes=len(frame.data),
                )
            )
            offset += len(frame.data)
    return Encoding(
        codec=CODEC_DELTA, base=against, base_digest=against_digest, objects=tuple(objects), pieces=tuple(pieces)
    )


def _put(store: ObjectStore, key: str, data: bytes) -> ObjectEntry:
    store.put(key, data)
    return ObjectEntry(key=key, sha256=sha256_hex(data), size_bytes=len(data))


def group_by_bytes(items: Iterable[tuple[T, int]], most_bytes: int) -> Iterator[list[T]]:
    """Cut (item, bytes), in order, into groups of at most `most_bytes`; a larger item is a group of its own."""
    group: list[T] = []
    size = 0
    for item, item_bytes in items:
        if group and size + item_bytes > most_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += item_bytes
    if group:
        yield group
