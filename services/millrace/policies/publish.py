"""Publishes a policy version: data objects under a fresh name first, the create-only manifest last."""

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from millrace.errors import ConflictError, InvalidStateError
from millrace.policies.digest import digest_hex, policy_digest, tensor_digest
from millrace.policies.manifest import (
    CODEC_FULL,
    FORMAT,
    FileEntry,
    ObjectEntry,
    PolicyManifest,
    Probe,
    TensorEntry,
    manifest_key,
    policy_prefix,
    sha256_hex,
)
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.storage.base import ObjectStore

DEFAULT_SHARD_BYTES = 1 << 30  # one data object; also what the publisher holds in memory besides the tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPolicy:
    """A committed policy version. `already_existed` says that an earlier writer had committed the same weights."""

    manifest_key: str
    manifest_sha256: bytes
    manifest: PolicyManifest
    size_bytes: int
    already_existed: bool


def publish_policy(
    store: ObjectStore,
    *,
    prefix: str,
    uid: str,
    lineage: int,
    version: int,
    epoch: int,
    tensors: Iterable[tuple[str, TensorBytes]],
    files: Mapping[str, bytes] | Sequence[FileEntry],
    probe: Probe | None = None,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> PublishedPolicy:
    """Writes version `version` and commits it, or proves that the committed one has equal weights.

    `files` are uploaded with the version, or name what `upload_files` uploaded once for many versions.

    A replayed step publishes again (recovery is checkpoint plus replay): nothing is uploaded then, the digests are
    compared, and a difference raises ConflictError naming both, because it means that the replay was not exact.
    """
    key = manifest_key(prefix, uid, lineage=lineage, version=version)
    items = list(tensors)
    if not items:
        raise InvalidStateError(f"policy {lineage}-{version} has no tensors", reason="POLICY_EMPTY")
    digests = {name: (t.dtype, t.shape, digest_hex(tensor_digest(t))) for name, t in items}
    digest = policy_digest(digests)
    if store.head(key) is not None:
        return _existing(store, key, digest)

    base = f"{policy_prefix(prefix, uid, lineage=lineage, version=version)}e{epoch}-{secrets.token_hex(6)}/"
    entries, objects = _put_tensors(store, base, items, digests, shard_bytes=shard_bytes)
    file_entries = _put_files(store, base, files) if isinstance(files, Mapping) else tuple(files)
    return _commit(
        store,
        key,
        PolicyManifest(
            format=FORMAT,
            run_uid=uid,
            lineage=lineage,
            version=version,
            base=None,
            codec=CODEC_FULL,
            tensors=tuple(entries),
            objects=tuple(objects),
            files=file_entries,
            digest=digest,
            probe=probe,
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
        ),
    )


def _commit(store: ObjectStore, key: str, manifest: PolicyManifest) -> PublishedPolicy:
    """Writes the manifest, unless another writer was faster; then what it committed must have our weights."""
    data = manifest.to_bytes()
    if not store.create(key, data):
        return _existing(store, key, manifest.digest)  # our data objects are unreferenced and collected later
    return PublishedPolicy(
        manifest_key=key,
        manifest_sha256=hashlib.sha256(data).digest(),
        manifest=manifest,
        size_bytes=manifest.size_bytes,
        already_existed=False,
    )


def _existing(store: ObjectStore, key: str, digest: str) -> PublishedPolicy:
    """The committed version, if its weights are ours; ConflictError naming both digests if they are not."""
    data = store.get(key)
    manifest = PolicyManifest.from_bytes(data, source=store.uri(key))
    if manifest.digest != digest:
        raise ConflictError(
            f"policy {manifest.lineage}-{manifest.version} of run {manifest.run_uid} is already published with digest "
            f"{manifest.digest}, and this trainer computed {digest}",
            reason="POLICY_DIGEST_MISMATCH",
            remedy="the replay was not bit-exact: use the software, topology and thread count of the first trainer",
            metadata={"published_digest": manifest.digest, "computed_digest": digest},
        )
    return PublishedPolicy(
        manifest_key=key,
        manifest_sha256=hashlib.sha256(data).digest(),
        manifest=manifest,
        size_bytes=manifest.size_bytes,
        already_existed=True,
    )


def _put_tensors(
    store: ObjectStore,
    base: str,
    items: list[tuple[str, TensorBytes]],
    digests: Mapping[str, tuple[str, tuple[int, ...], str]],
    *,
    shard_bytes: int,
) -> tuple[list[TensorEntry], list[ObjectEntry]]:
    """Uploads the tensors as safetensors files under `base`."""
    entries: list[TensorEntry] = []
    objects: list[ObjectEntry] = []
    for number, shard in enumerate(_shards(items, shard_bytes), start=1):
        data, places = pack_safetensors(shard)
        key = f"{base}model-{number:05d}.safetensors"
        store.put(key, data)
        objects.append(ObjectEntry(key=key, sha256=sha256_hex(data), size_bytes=len(data)))
        entries += [
            TensorEntry(
                name=place.name,
                shape=place.shape,
                dtype=place.dtype,
                object=key,
                offset=place.offset,
                length_bytes=place.length_bytes,
                digest=digests[place.name][2],
            )
            for place in places
        ]
    return entries, objects


def upload_files(
    store: ObjectStore, *, prefix: str, uid: str, epoch: int, files: Mapping[str, bytes]
) -> tuple[FileEntry, ...]:
    """Uploads the small files that all versions of a writer share, such as the tokenizer; pass the result on."""
    return _put_files(store, f"{prefix}/runs/{uid}/policy-files/e{epoch}-{secrets.token_hex(6)}/", files)


def _put_files(store: ObjectStore, base: str, files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Uploads files under `base`."""
    entries: list[FileEntry] = []
    for name in sorted(files):
        data = files[name]
        store.put(base + name, data)
        entries.append(FileEntry(name=name, key=base + name, sha256=sha256_hex(data), size_bytes=len(data)))
    return tuple(entries)


def _shards(items: list[tuple[str, TensorBytes]], shard_bytes: int) -> Iterator[list[tuple[str, TensorBytes]]]:
    """Cuts the tensors, in order, into shards of at most `shard_bytes`; a larger tensor is a shard of its own."""
    shard: list[tuple[str, TensorBytes]] = []
    size = 0
    for name, tensor in items:
        if shard and size + tensor.size_bytes > shard_bytes:
            yield shard
            shard, size = [], 0
        shard.append((name, tensor))
        size += tensor.size_bytes
    yield shard
