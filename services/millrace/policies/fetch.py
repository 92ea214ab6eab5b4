"""Reads manifests, small files and data objects of policies; what is read is proved by its sha256."""

import contextvars
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.policies.manifest import FileEntry, ObjectEntry, PolicyManifest, sha256_hex
from millrace.storage.base import ObjectStore
from millrace.storage.commit_points import newest_revision, revision_key
from millrace.telemetry import progress

RANGE_BYTES = 16 << 20
NUM_CONNECTIONS = 8

TakeBytes = Callable[[ObjectEntry, int, bytes], None]
"""Takes an object's bytes from an offset on. They are not proved until `read_objects` returns."""


def read_manifest(
    store: ObjectStore, key: str, sha256: bytes | None = None, *, is_newest: bool = True
) -> PolicyManifest:
    """Read a manifest, or its newest successor: a version that was damaged is published anew under `manifest.r1.json`.

    `sha256` (of the policy stream's entry) must match the bytes unless it is None or empty. A successor has another:
    the digest proves it, which who knows the announced one compares. Without `is_newest` no successor is looked for,
    which saves a request.

    Raises NotFoundError if it does not exist and CorruptObjectError if it is damaged or lies under another's name.
    """
    first_key = revision_key(key, 0)
    key = newest_revision(store, key) if is_newest else key
    data = store.get(key, max_bytes=MAX_JSON_BYTES)
    if sha256 and key == first_key and hashlib.sha256(data).digest() != sha256:
        raise CorruptObjectError(
            f"policy manifest {store.uri(key)} has sha256 {sha256_hex(data)}, announced was {sha256.hex()}",
            reason="POLICY_MANIFEST_HASH_MISMATCH",
            remedy="the object was damaged or replaced; publish the policy again",
        )
    manifest = PolicyManifest.from_bytes(data, source=store.uri(key))
    if manifest.key != key:
        raise CorruptObjectError(
            f"policy manifest {store.uri(key)} is that of {manifest.key}",
            reason="POLICY_MANIFEST_MISNAMED",
            remedy="it was copied to where it does not belong; publish the policy again",
        )
    return manifest


def pull_files(store: ObjectStore, manifest: PolicyManifest) -> dict[str, bytes]:
    """The small files of the version (`config.json`, tokenizer, …) by name, verified."""
    files: dict[str, bytes] = {}
    for entry in manifest.files:
        _require_size(store, entry)
        data = store.get(entry.key, max_bytes=entry.size_bytes)
        if (found := sha256_hex(data)) != entry.sha256:
            raise hash_mismatch(store, entry.key, found, entry.sha256)
        files[entry.name] = data
    return files


def read_objects(
    store: ObjectStore,
    objects: Sequence[ObjectEntry],
    take: TakeBytes,
    *,
    connections: int = NUM_CONNECTIONS,
    range_bytes: int = RANGE_BYTES,
) -> None:
    """Read objects whole, in ranges and over parallel connections, and hand the ranges on in order.

    What is read is as long as the entries say, so `require_sizes` must have looked at them. Raises CorruptObjectError
    if the sha256 of an object is not the entry's, NotFoundError if it is gone. Holds at most `2 * connections` ranges.
    What is read counts for the long work of the caller, if it has named any (`telemetry/progress.py`).
    """
    pending: deque[tuple[ObjectEntry, int, Future[bytes]]] = deque()
    ranges = _ranges(objects, range_bytes)
    digests = {entry.key: hashlib.sha256() for entry in objects}
    progress.expect(sum(entry.size_bytes for entry in objects))
    pool = ThreadPoolExecutor(connections, thread_name_prefix="policy-fetch")
    try:
        while True:
            while len(pending) < 2 * connections and (item := next(ranges, None)) is not None:
                entry, offset, length = item
                context = contextvars.copy_context()  # the wait that a slow store shows is the run's
                future = pool.submit(context.run, store.get_range, entry.key, offset, length)
                pending.append((entry, offset, future))
            if not pending:
                break
            entry, offset, future = pending.popleft()
            try:
                data = future.result()  # bounded by the store's own deadlines
            except (CorruptObjectError, NotFoundError):
                _require_size(store, entry)  # which says what a manifest has to do with it
                raise
            digests[entry.key].update(data)
            take(entry, offset, data)
            progress.add(len(data))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for entry in objects:
        if (found := digests[entry.key].hexdigest()) != entry.sha256:
            raise hash_mismatch(store, entry.key, found, entry.sha256)


def require_sizes(store: ObjectStore, objects: Sequence[ObjectEntry]) -> None:
    """Raise CorruptObjectError or NotFoundError unless the objects have the sizes that memory is taken for.

    Those of one range are not asked for: reading them finds out, and takes no more than that.
    """
    for entry in objects:
        if entry.size_bytes > RANGE_BYTES:
            _require_size(store, entry)


def _require_size(store: ObjectStore, entry: ObjectEntry | FileEntry) -> None:
    where = store.uri(entry.key)
    found = store.head(entry.key)
    if found is None:
        raise NotFoundError(
            f"object {where} does not exist, and a policy's manifest names it",
            reason="POLICY_OBJECT_MISSING",
            remedy="the run's trainer publishes the policy anew when a replica reports it",
        )
    if found.size_bytes != entry.size_bytes:
        raise CorruptObjectError(
            f"object {where} has {found.size_bytes} bytes, its manifest says {entry.size_bytes}",
            reason="POLICY_OBJECT_SIZE_MISMATCH",
            remedy="the object is damaged; the run's trainer publishes the policy anew when a replica reports it",
        )


def hash_mismatch(store: ObjectStore, key: str, found: str, expected: str) -> CorruptObjectError:
    """The error of an object whose bytes are not those that its manifest names."""
    return CorruptObjectError(
        f"object {store.uri(key)} has sha256 {found}, its manifest says {expected}",
        reason="POLICY_OBJECT_HASH_MISMATCH",
        remedy="the object is damaged; the next version replaces it, or publish this one again",
    )


def _ranges(objects: Sequence[ObjectEntry], range_bytes: int) -> Iterator[tuple[ObjectEntry, int, int]]:
    for entry in objects:
        for offset in range(0, entry.size_bytes, range_bytes):
            yield entry, offset, min(range_bytes, entry.size_bytes - offset)
