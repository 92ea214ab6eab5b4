"""Publishes a policy version: data objects under a fresh name first, the create-only manifest last."""

import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import ConflictError, InvalidStateError
from millrace.policies.digest import digest_hex
from millrace.policies.manifest import (
    AdapterEntry,
    FileEntry,
    PolicyManifest,
    PolicyPlace,
    Probe,
    TensorEntry,
    sha256_hex,
    whole_digest,
)
from millrace.policies.publishing.upload import DEFAULT_SHARD_BYTES, upload_full, whole_parts
from millrace.policies.tensors import TensorBytes
from millrace.storage.base import ObjectStore

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


def publish_policy(
    store: ObjectStore,
    place: PolicyPlace,
    contents: PolicyContents,
    *,
    epoch: int,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    successor: str = "",
) -> PublishedPolicy:
    """Write a version in full and commit it, or prove that the committed one has equal weights.

    For one writer that holds every tensor. `successor` is the key to commit a damaged version under
    (`commit_points.next_revision`).

    A replayed step publishes again (recovery is checkpoint plus replay): nothing is uploaded then, the digests are
    compared, and a difference raises ConflictError naming both, because it means that the replay was not exact.
    """
    key = successor or place.manifest_key
    parts = whole_parts(contents.tensors)
    if not parts:
        raise InvalidStateError(f"policy {place.lineage}-{place.version} has no tensors", reason="POLICY_EMPTY")
    entries = tuple(
        TensorEntry(name=part.name, shape=part.shape, dtype=part.dtype, digest=digest_hex(part.digest()))
        for part in parts
    )
    digest = whole_digest(entries)
    if store.head(key) is not None:
        return existing_policy(store, key, digest)
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
    """A fresh prefix for the data objects of a version: no name is used twice, whatever died before."""
    return f"{place.objects_prefix}e{epoch}-{secrets.token_hex(6)}/"


def commit_policy(store: ObjectStore, key: str, manifest: PolicyManifest) -> PublishedPolicy:
    """Write the manifest, unless another writer was faster; then what it committed must have our weights."""
    data = manifest.to_bytes()
    if not store.create(key, data):
        return existing_policy(store, key, manifest.digest)  # our data objects are unreferenced and collected later
    return PublishedPolicy(
        manifest_key=key,
        manifest_sha256=hashlib.sha256(data).digest(),
        manifest=manifest,
        size_bytes=manifest.size_bytes,
        already_existed=False,
    )


def existing_policy(store: ObjectStore, key: str, digest: str) -> PublishedPolicy:
    """The committed version, if its weights are ours; ConflictError naming both digests if they are not."""
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
    """The error of a replay that came to other weights."""
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
    """Upload the small files that all versions of a writer share, such as the tokenizer; pass the result on."""
    return _put_files(store, f"{prefix}/runs/{uid}/policy-files/e{epoch}-{secrets.token_hex(6)}/", files)


def _put_files(store: ObjectStore, base: str, files: Mapping[str, bytes]) -> tuple[FileEntry, ...]:
    """Upload files under `base`."""
    entries: list[FileEntry] = []
    for name in sorted(files):
        data = files[name]
        store.put(base + name, data)
        entries.append(FileEntry(name=name, key=base + name, sha256=sha256_hex(data), size_bytes=len(data)))
    return tuple(entries)
