"""Uploads shares of a policy version and publishes it: data under a fresh name first, the manifest last."""

import hashlib
import json
import math
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import ConflictError, InternalError, InvalidStateError
from millrace.policies.digest import add_digests, bits_digest, digest_hex
from millrace.policies.manifest import (
    CODEC_DELTA,
    CODEC_FULL,
    AdapterEntry,
    Encoding,
    FileEntry,
    ObjectEntry,
    Piece,
    PolicyManifest,
    PolicyPlace,
    Probe,
    TensorEntry,
    sha256_hex,
    whole_digest,
)
from millrace.policies.tensors import TensorBytes, pack_safetensors, plan_safetensors
from millrace.processes.shared_memory import SharedPlace
from millrace.storage.base import ObjectStore
from millrace.storage.scratch import io_errors, make_parent

DIGEST_MISMATCH = "POLICY_DIGEST_MISMATCH"
"""Reason of an error that says that a version is committed with other weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A committed policy version. `already_existed` says that an earlier writer had committed the same weights."""

    manifest_key: str
    manifest_sha256: bytes
    manifest: PolicyManifest
    size_bytes: int
    already_existed: bool
    changed_fraction: float = 1.0
    """Share of the elements that differ from the version before; 1 where nobody compared them."""
    damage: str = ""
    """Why a version was published anew; empty for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContents:
    """What a version is made of.

    `files` are uploaded with the version, or name what `upload_files` uploaded once for many versions.
    """

    tensors: Iterable[tuple[str, TensorBytes]]
    files: Mapping[str, bytes] | Sequence[FileEntry]
    probe: Probe | None = None
    adapter: AdapterEntry | None = None
    is_delta_base: bool = True


# Uploads one rank's share of a policy version: its pieces, packed into objects.

T = TypeVar("T")

# One data object; also what the publisher holds in memory besides the tensors.
DEFAULT_SHARD_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """The encoded change of one part."""

    tensor: str
    start: int
    count: int
    data: bytes


# What one rank of a trainer publishes, contiguous row-major ranges of tensors, and what the ranks tell each other of
# it: plain data, never weights.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorPart:
    """Elements `start` to `start + count` of a tensor of dtype tag `dtype` and shape `shape` (that of the whole).

    `bits` [count] are unsigned integers of the dtype's width; a rank that holds nothing of the tensor has none.
    `place` is where they are, if another process can see them.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    bits: NDArray[np.unsignedinteger]
    place: SharedPlace | None = None

    @property
    def count(self) -> int:
        """Return the number of elements of the part."""
        return int(self.bits.size)

    @property
    def is_whole(self) -> bool:
        """Return whether the part has all elements of its tensor."""
        return self.start == 0 and self.count == math.prod(self.shape)

    @property
    def held_shape(self) -> tuple[int, ...]:
        """Return the shape that the part has in a file: the tensor's own if it is whole, else flat."""
        return self.shape if self.is_whole else (self.count,)

    def data(self) -> memoryview:
        """Return the part's little-endian bytes, a view of the same memory."""
        return self.bits.view(np.uint8).data

    def digest(self) -> int:
        """Return what the part's elements add to the tensor's digest."""
        return bits_digest(self.bits, start=self.start)


def whole_parts(tensors: Iterable[tuple[str, TensorBytes]]) -> list[TensorPart]:
    """Return tensors, given by name, as parts that are whole, over the same memory."""
    return [
        TensorPart(name=name, dtype=tensor.dtype, shape=tensor.shape, start=0, bits=tensor.bits())
        for name, tensor in tensors
    ]


def pack_digests(parts: Sequence[TensorPart], digests: Mapping[str, int]) -> list[Any]:
    """Return a rank's parts as plain data for the other ranks: [tensor, dtype, shape, number of elements, digest (hex)]
    each.

    `digests` has the digest of each part by its tensor's name.
    """
    return [[part.name, part.dtype, part.shape, part.count, digest_hex(digests[part.name])] for part in parts]


def unpack_digests(packed: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Return the digests by tensor's name from the rows that `pack_digests` made of one rank's parts."""
    return {name: int(digest, 16) for name, _, _, _, digest in packed}


def merge_digests(shares: Iterable[list[Any]]) -> tuple[TensorEntry, ...]:
    """Return the entries of a version's tensors from the rows of all ranks' parts; digests are summed by tensor.

    `shares` has for each rank what `pack_digests` returned there. Raises InternalError if the ranks' parts do not have
    all elements of a tensor.
    """
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for share in shares:
        for name, dtype, shape, count, digest in share:
            _, _, held, so_far = found.get(name, (dtype, tuple(shape), 0, 0))
            found[name] = dtype, tuple(shape), held + count, add_digests([so_far, int(digest, 16)])
    # The counts of all ranks must add up to each tensor: a rank's part that is missing or held twice would give a
    # digest of something else.
    entries: list[TensorEntry] = []
    for name, (dtype, shape, held, digest) in found.items():
        entry = TensorEntry(name=name, shape=shape, dtype=dtype, digest=digest_hex(digest))
        if held != entry.num_elements:
            raise InternalError(
                f"the ranks hold {held} elements of tensor {name}, which has {entry.num_elements}",
                reason="SHARD_LAYOUT_UNKNOWN",
                remedy="this is a defect of Millrace; train with one rank until it is fixed",
            )
        entries.append(entry)
    return tuple(entries)


def pack_encodings(encodings: Sequence[Encoding]) -> dict[str, Any]:
    """Return a rank's share of every encoding of a version as plain data (names and rows), for the other ranks."""
    names = sorted({piece.tensor for encoding in encodings for piece in encoding.pieces})
    places = {name: place for place, name in enumerate(names)}
    return {"names": names, "encodings": [encoding.to_json(places) for encoding in encodings]}


def merge_encodings(shares: Iterable[Mapping[str, Any]]) -> tuple[Encoding, ...]:
    """Return a version's encodings, joined from what `pack_encodings` returned at all ranks.

    All ranks must have the encodings in the same order.
    """
    merged: list[Encoding] = []
    for share in shares:
        names = tuple(share["names"])
        for place, item in enumerate(share["encodings"]):
            encoding = Encoding.from_json(item, names)
            if place == len(merged):
                merged.append(encoding)
                continue
            so_far = merged[place]
            merged[place] = replace(
                so_far, objects=so_far.objects + encoding.objects, pieces=so_far.pieces + encoding.pieces
            )
    return tuple(merged)


def upload_full(
    store: ObjectStore, base: str, parts: Iterable[TensorPart], *, shard_bytes: int = DEFAULT_SHARD_BYTES
) -> Encoding:
    """Upload parts as safetensors files `{base}model-00001.safetensors`, …, and return them as a full encoding.

    A file has at most `shard_bytes`, or one larger part. Empty parts are left out.
    """
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
    """Upload frames as objects `{base}delta-{against}-00001.bin`, …, and return them as a delta encoding.

    `against` is the version that the frames are deltas against, and `against_digest` its policy digest. An object has
    at most `shard_bytes`, or one larger frame.
    """
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
    """Store bytes under a key, and return the object's entry."""
    store.put(key, data)
    return ObjectEntry(key=key, sha256=sha256_hex(data), size_bytes=len(data))


def group_by_bytes(items: Iterable[tuple[T, int]], most_bytes: int) -> Iterator[list[T]]:
    """Yield the items of (item, bytes) in groups of at most `most_bytes`, in order.

    A larger item is a group of its own.
    """
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


def publish_policy(
    store: ObjectStore,
    place: PolicyPlace,
    contents: PolicyContents,
    *,
    epoch: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    successor: str = "",
) -> PublishedPolicy:
    """Write a version in full and commit it, or prove that the committed one has equal weights; return the committed
    one.

    This is for one writer that holds every tensor. `epoch` goes into the objects' names. `successor` is the key to
    commit a damaged version under (`storage.base.next_revision`); empty for the version's own.

    A replayed step publishes its version again (recovery is checkpoint plus replay): then nothing is uploaded, and the
    digests are compared. If they differ, the replay was not exact: ConflictError names both.
    """
    key = successor or place.manifest_key
    parts = whole_parts(contents.tensors)
    if not parts:
        raise InvalidStateError(f"policy {place.lineage}-{place.version} has no tensors", reason="POLICY_EMPTY")
    # The digests come before any upload: of a replayed step they are all that is needed.
    entries = tuple(
        TensorEntry(name=part.name, shape=part.shape, dtype=part.dtype, digest=digest_hex(part.digest()))
        for part in parts
    )
    digest = whole_digest(entries)
    if store.head(key) is not None:
        return existing_policy(store, key, digest)
    # Uploaded under a fresh name: an object of a dead writer is never taken for this one's.
    base, files = upload_prefix(place, epoch=epoch), contents.files
    manifest = PolicyManifest(
        key=key,
        run_uid=place.uid,
        lineage=place.lineage,
        version=place.version,
        anchor=place.version,
        tensors=entries,
        encodings=(upload_full(store, base, parts, shard_bytes=shard_bytes),),
        files=_put_files(store, base, files) if isinstance(files, Mapping) else tuple(files),
        digest=digest,
        probe=contents.probe,
        adapter=contents.adapter,
        is_delta_base=contents.is_delta_base,
    )
    return commit_policy(store, key, manifest)


def upload_prefix(place: PolicyPlace, *, epoch: int) -> str:
    """Return a fresh prefix for the data objects of a version: no name is used twice, whatever process died before."""
    return f"{place.objects_prefix}e{epoch}-{secrets.token_hex(6)}/"


def commit_policy(store: ObjectStore, key: str, manifest: PolicyManifest) -> PublishedPolicy:
    """Commit a version by creating its manifest under `key`, and return it.

    If a manifest exists there already, the committed version is returned if its weights have the same digest;
    ConflictError names both digests if they have not.
    """
    data = manifest.to_bytes()
    if not store.create(key, data):
        # Our data objects are unreferenced and collected later.
        return existing_policy(store, key, manifest.digest)
    return PublishedPolicy(
        manifest_key=key,
        manifest_sha256=hashlib.sha256(data).digest(),
        manifest=manifest,
        size_bytes=manifest.size_bytes,
        already_existed=False,
    )


def existing_policy(store: ObjectStore, key: str, digest: str) -> PublishedPolicy:
    """Return the version that is committed under `key` if its weights have `digest` (hex).

    Raises ConflictError naming both digests if they have another, and NotFoundError if nothing is committed there.
    """
    data = store.get(key, max_bytes=MAX_JSON_BYTES)
    manifest = PolicyManifest.from_bytes(data, source=store.uri(key))
    if manifest.digest != digest:
        raise digest_conflict(
            manifest.run_uid, manifest.lineage, manifest.version, published=manifest.digest, computed=digest
        )
    return PublishedPolicy(
        manifest_key=key,
        manifest_sha256=hashlib.sha256(data).digest(),
        manifest=manifest,
        size_bytes=manifest.size_bytes,
        already_existed=True,
    )


def digest_conflict(uid: str, lineage: int, version: int, *, published: str, computed: str) -> ConflictError:
    """Make the error of a replay that computed other weights than the published ones; both digests are hex."""
    return ConflictError(
        f"policy {lineage}-{version} of run {uid} is already published with digest {published}, and this trainer "
        f"computed {computed}",
        reason=DIGEST_MISMATCH,
        remedy="the replay was not bit-exact: use the software, topology and thread count of the first trainer",
        metadata={"published_digest": published, "computed_digest": computed},
    )


def upload_files(
    store: ObjectStore, *, prefix: str, uid: str, epoch: int, files: Mapping[str, bytes]
) -> tuple[FileEntry, ...]:
    """Upload the small files that all versions of a writer share, such as the tokenizer; return their entries.

    `files` are contents by name. Each call uses new keys.
    """
    return _put_files(store, f"{prefix}/runs/{uid}/policy-files/e{epoch}-{secrets.token_hex(6)}/", files)


def _put_files(store: ObjectStore, base: str, files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Upload files under the prefix `base`, and return their entries."""
    entries: list[FileEntry] = []
    for name in sorted(files):
        data = files[name]
        store.put(base + name, data)
        entries.append(FileEntry(name=name, key=base + name, sha256=sha256_hex(data), size_bytes=len(data)))
    return tuple(entries)


# A directory in Hugging Face format, written from tensors and small files.


def write_hf(
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorBytes],
    directory: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write files and tensors into a directory in Hugging Face format, and return the directory.

    Tensors become `model.safetensors`, or several files of at most `shard_bytes` with an index. `files` are contents by
    name. Raises CapacityError if the disk is full.
    """
    target = Path(directory)
    for name, data in files.items():
        write_file(target / name, data)
    groups = list(group_by_bytes((((name, t), t.size_bytes) for name, t in tensors.items()), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(target / name, pack_safetensors(group)[0])
        weight_map |= {tensor: name for tensor, _ in group}
    if len(groups) > 1:
        total = sum(tensor.size_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(target / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
    return target


def write_file(path: Path, data: bytes) -> None:
    """Write one local file; CapacityError if the disk is full."""
    make_parent(path, setting=None)
    with io_errors(path, "write", needed_bytes=len(data), setting=None):
        path.write_bytes(data)
