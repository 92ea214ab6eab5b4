"""Verifies published policies in the store: whether a version can be read by a service that holds nothing, and whether
every encoding of every version gives the bits that its digests name.

`prove_policies` reads everything. Memory: a copy of the weights for each version that later ones are deltas against,
which with skips of four and sixteen is three copies beside the one that is decoded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConflictError, CorruptObjectError, NotFoundError
from millrace.policies.delta.codec import decode_piece
from millrace.policies.digest import bits_digest, digest_hex
from millrace.policies.fetch import Manifests, find_chain, pull_files, read_manifest, read_objects, require_sizes
from millrace.policies.manifest import CODEC_DELTA, CODEC_FULL, Encoding, ObjectEntry, PolicyManifest
from millrace.policies.tensors import bits_type
from millrace.storage.base import ObjectStore

Weights = dict[str, NDArray[np.unsignedinteger]]
"""The flat bits of every tensor."""


def damage_of(store: ObjectStore, key: str, *, digest: str, sha256: bytes = b"") -> str | None:
    """What keeps the version whose manifest is `key` from being read; None if every byte is as it was written.

    `digest` and `sha256` (of the manifest's bytes) are those that were announced; empty ones are not compared.
    Reads every object of the cheapest chain that leads to the version (blocking), and holds little of it.
    """
    try:
        manifest = read_manifest(store, key, sha256)
        if digest and manifest.digest != digest:
            return f"policy manifest {store.uri(manifest.key)} has digest {manifest.digest}, announced was {digest}"
        pull_files(store, manifest)
        for link in find_chain(Manifests(store), manifest, held=None):
            require_sizes(store, link.encoding.objects)
            read_objects(store, link.encoding.objects, lambda entry, offset, data: None)
    except (CorruptObjectError, NotFoundError) as error:
        return error.message
    return None


def prove_policies(
    store: ObjectStore,
    keys: Sequence[str],
    on_progress: Callable[[str], None] = lambda text: None,
    on_weights: Callable[[int, int, Mapping[str, tuple[str, NDArray[np.unsignedinteger]]]], None] | None = None,
) -> Iterator[str]:
    """Decode the policies with these manifests and yield, in words, what is wrong (blocking).

    `on_weights` gets lineage, version, and number format and flat bits by name of every tensor of what is right.
    """
    manifests: list[PolicyManifest] = []
    for key in keys:
        try:
            manifests.append(read_manifest(store, key))
        except (CorruptObjectError, NotFoundError) as error:
            yield error.message
    manifests.sort(key=lambda manifest: (manifest.lineage, manifest.version))
    last_use = {
        (manifest.lineage, delta.base): place for place, manifest in enumerate(manifests) for delta in manifest.deltas
    }
    held: dict[tuple[int, int | None], Weights] = {}
    for place, manifest in enumerate(manifests):
        what = f"policy {manifest.lineage}-{manifest.version}"
        on_progress(f"weights of {what}")
        weights: Weights | None = None
        for encoding in manifest.encodings:
            base = held.get((manifest.lineage, encoding.base))
            if encoding.codec == CODEC_DELTA and base is None:
                yield f"{what}: its delta against version {encoding.base} cannot be decoded, because that one could not"
                continue
            try:
                weights = _decode(store, manifest, encoding, base)
            except (CorruptObjectError, ConflictError, NotFoundError) as error:
                yield f"{what}, encoding {encoding.codec} against {encoding.base}: {error.message}"
        try:
            pull_files(store, manifest)
        except (CorruptObjectError, NotFoundError) as error:
            yield f"{what}: {error.message}"
        if weights is not None and on_weights is not None:
            dtypes = {entry.name: entry.dtype for entry in manifest.tensors}
            on_weights(manifest.lineage, manifest.version, {n: (dtypes[n], bits) for n, bits in weights.items()})
        if weights is not None:
            held[manifest.lineage, manifest.version] = weights
        held = {name: kept for name, kept in held.items() if last_use.get(name, -1) > place}


def _decode(store: ObjectStore, manifest: PolicyManifest, encoding: Encoding, base: Weights | None) -> Weights:
    """What an encoding gives; `CorruptObjectError` unless it is what the manifest's digests name."""
    if encoding.codec not in (CODEC_FULL, CODEC_DELTA):
        raise CorruptObjectError(f"its codec {encoding.codec!r} is unknown", reason="POLICY_CODEC_UNKNOWN")
    require_sizes(store, encoding.objects)  # before memory is taken for what a manifest says
    objects = _read(store, encoding.objects)
    entries = {entry.name: entry for entry in manifest.tensors}
    if encoding.codec == CODEC_FULL:
        weights = {name: np.empty(entry.num_elements, bits_type(entry.dtype)) for name, entry in entries.items()}
    else:
        weights = {name: bits.copy() for name, bits in (base or {}).items()}
        if {name: (bits.size, bits.dtype) for name, bits in weights.items()} != {
            name: (entry.num_elements, np.dtype(bits_type(entry.dtype))) for name, entry in entries.items()
        }:
            raise CorruptObjectError("its base has other tensors", reason="POLICY_CHAIN_BROKEN")
    for piece in encoding.pieces:
        bits, data = weights[piece.tensor], objects[piece.object][piece.offset : piece.offset + piece.length_bytes]
        part = bits[piece.start : piece.start + piece.count]
        if encoding.codec == CODEC_FULL:
            part[:] = np.frombuffer(data, bits.dtype)
        else:
            decode_piece(data, part, start=piece.start).apply(bits)
    _require_digests(manifest, weights)
    return weights


def _require_digests(manifest: PolicyManifest, weights: Mapping[str, NDArray[np.unsignedinteger]]) -> None:
    for entry in manifest.tensors:
        found = digest_hex(bits_digest(weights[entry.name]))
        if found != entry.digest:
            raise CorruptObjectError(
                f"tensor {entry.name} has digest {found}, its manifest says {entry.digest}",
                reason="POLICY_TENSOR_DIGEST_MISMATCH",
            )


def _read(store: ObjectStore, objects: Sequence[ObjectEntry]) -> dict[str, memoryview]:
    buffers = {entry.key: bytearray(entry.size_bytes) for entry in objects}

    def take(entry: ObjectEntry, offset: int, data: bytes) -> None:
        buffers[entry.key][offset : offset + len(data)] = data

    read_objects(store, objects, take)
    return {key: memoryview(data) for key, data in buffers.items()}
