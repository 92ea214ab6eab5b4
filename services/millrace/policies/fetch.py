"""Reads manifests, small files and data objects of policies, and verifies each by its sha256."""

import contextvars
import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import ConflictError, CorruptObjectError, MillraceError, NotFoundError
from millrace.policies.delta_codec import decode_piece
from millrace.policies.digest import bits_digest, digest_hex
from millrace.policies.manifest import (
    CODEC_DELTA,
    CODEC_FULL,
    Encoding,
    FileEntry,
    ObjectEntry,
    PolicyManifest,
    sha256_hex,
)
from millrace.policies.tensors import bits_type
from millrace.storage.base import ObjectStore, newest_revision, revision_key
from millrace.telemetry import progress

RANGE_BYTES = 16 << 20
NUM_CONNECTIONS = 8

TakeBytes = Callable[[ObjectEntry, int, bytes], None]
"""Takes an object's bytes from an offset on. They are not verified until `read_objects` returns."""


def read_manifest(
    store: ObjectStore, key: str, sha256: bytes | None = None, *, is_newest: bool = True
) -> PolicyManifest:
    """Read and check the manifest under `key`, or its newest revision if the version was published again.

    `sha256`, announced by the policy stream's entry, must match the bytes of a first revision, unless it is None or
    empty. A later revision has another sha256: callers that know the announced digest of the weights compare that.
    Without `is_newest` exactly `key` is read, which saves a request. Raises NotFoundError if it does not exist, and
    CorruptObjectError if it is damaged or is stored under another manifest's key.
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
    """Return the contents of the version's small files (`config.json`, tokenizer, …) by name, verified by their sha256.

    Raises NotFoundError or CorruptObjectError.
    """
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
    """Read objects in ranges over parallel connections; call `take` with each range, in order (object, offset, bytes).

    Call `require_sizes` before. Raises CorruptObjectError, after all `take` calls, if the sha256 of an object is not
    the entry's, and NotFoundError if one is missing. Holds at most `2 * connections` ranges of `range_bytes` in memory.
    Bytes are added to the caller's registered work, if any (`telemetry/progress.py`).
    """
    pending: deque[tuple[ObjectEntry, int, Future[bytes]]] = deque()
    ranges = _ranges(objects, range_bytes)
    digests = {entry.key: hashlib.sha256() for entry in objects}
    progress.expect(sum(entry.size_bytes for entry in objects))
    pool = ThreadPoolExecutor(connections, thread_name_prefix="policy-fetch")
    try:
        while True:
            # Twice as many ranges as connections: results are taken in order, and while a slow first one is waited for
            # the other connections go on.
            while len(pending) < 2 * connections and (item := next(ranges, None)) is not None:
                entry, offset, length = item
                # With the context of the caller, so that the registered wait of a slow store is that of its run.
                context = contextvars.copy_context()
                future = pool.submit(context.run, store.get_range, entry.key, offset, length)
                pending.append((entry, offset, future))
            if not pending:
                break
            entry, offset, future = pending.popleft()
            try:
                data = future.result()  # bounded by the store's own deadlines
            except (CorruptObjectError, NotFoundError):
                # Its error says that a manifest names the object.
                _require_size(store, entry)
                raise
            # In order, because sha256 goes over an object's bytes from the first to the last.
            digests[entry.key].update(data)
            take(entry, offset, data)
            progress.add(len(data))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    for entry in objects:
        if (found := digests[entry.key].hexdigest()) != entry.sha256:
            raise hash_mismatch(store, entry.key, found, entry.sha256)


def require_sizes(store: ObjectStore, objects: Sequence[ObjectEntry]) -> None:
    """Raise CorruptObjectError or NotFoundError unless the stored objects have the sizes of their entries.

    Objects of at most one range (`RANGE_BYTES`) are not checked, because reading them does that, and takes little
    memory.
    """
    for entry in objects:
        if entry.size_bytes > RANGE_BYTES:
            _require_size(store, entry)


def _require_size(store: ObjectStore, entry: ObjectEntry | FileEntry) -> None:
    """Raise NotFoundError or CorruptObjectError unless the stored object has the size of its entry."""
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
    """Make the error of an object whose sha256 is `found` instead of `expected`, the manifest's."""
    return CorruptObjectError(
        f"object {store.uri(key)} has sha256 {found}, its manifest says {expected}",
        reason="POLICY_OBJECT_HASH_MISMATCH",
        remedy="the object is damaged; the next version replaces it, or publish this one again",
    )


def _ranges(objects: Sequence[ObjectEntry], range_bytes: int) -> Iterator[tuple[ObjectEntry, int, int]]:
    """Yield all bytes of the objects, in order, as ranges: entry, offset and length, at most `range_bytes`."""
    for entry in objects:
        for offset in range(0, entry.size_bytes, range_bytes):
            yield entry, offset, min(range_bytes, entry.size_bytes - offset)


# The cheapest chain of full and delta encodings from a copy of one version to another version.
#
# Deltas lead from a version to one, four or sixteen later; a full encoding needs no base. From the target the search
# goes down the longest deltas that do not pass the held version, so it reads O(log n) manifests; it compares that chain
# with one from the anchor by bytes.

MAX_LINKS = 300  # more than the largest anchor interval has versions
MAX_HELD = 64
"""Manifests that are held: more than a search reads, so that the memory does not grow with the versions of a run."""
MAX_HELD_ENTRIES = 200_000  # pieces and tensors of the manifests that are held: some 60 MB
_MAX_PROBLEMS = 3  # named in an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One encoding to read: it gives the version of `manifest`, from its base or from nothing."""

    manifest: PolicyManifest
    encoding: Encoding

    @property
    def name(self) -> tuple[str, int | None]:
        """Return what identifies the link: its manifest's key, and the base version (None for a full encoding)."""
        return self.manifest.key, self.encoding.base


Chain = tuple[Link, ...]


class Manifests:
    """A cache of manifests by key, which only change if a damaged version is published again.

    While `rereads` is set, newer revisions are looked for, with one more request for each manifest: at the start and
    after `forget`, until `trust_cache`.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.rereads = True
        self._held: OrderedDict[str, PolicyManifest] = OrderedDict()
        self._num_entries = 0

    def forget(self) -> None:
        """Clear the cache, and look for newer revisions again from now on.

        A damaged version may have been published again.
        """
        self._held.clear()
        self._num_entries = 0
        self.rereads = True

    def trust_cache(self) -> None:
        """Stop looking for newer revisions of manifests, which saves a request for each."""
        self.rereads = False

    def read(self, key: str, sha256: bytes | None = None) -> PolicyManifest:
        """Return the manifest under `key` from the cache, or read, check and cache it.

        While `rereads` is set, its newest revision is read. With `sha256`, which the bytes of a first revision must
        match, it is always read. Raises NotFoundError if there is none, CorruptObjectError if it is damaged.
        """
        manifest = None if sha256 else self._held.get(key)
        if manifest is None:
            manifest = read_manifest(self._store, key, sha256, is_newest=self.rereads)
            # Read with a sha256, it may replace the one in the cache, whose entries must not be counted twice.
            if key in self._held:
                self._num_entries -= _num_entries(self._held[key])
            self._held[key] = manifest
            self._num_entries += _num_entries(manifest)
        self._held.move_to_end(key)
        while len(self._held) > MAX_HELD or (self._num_entries > MAX_HELD_ENTRIES and len(self._held) > 1):
            self._num_entries -= _num_entries(self._held.popitem(last=False)[1])
        return manifest


def find_chain(
    manifests: Manifests,
    target: PolicyManifest,
    *,
    held: PolicyManifest | None,
    avoid: Set[tuple[str, int | None]] = frozenset(),
) -> Chain:
    """Return the cheapest chain, by bytes, of encodings to read, in order, from `held` (None: nothing) to `target`.

    Empty if `target` is held. `avoid` names links that were found to be damaged. Raises CorruptObjectError with the
    reasons if there is no chain.
    """
    if held is not None and _identity(held) == _identity(target):
        return ()
    search = _Search(manifests=manifests, avoid=avoid)
    direct = None
    if held is not None and held.lineage == target.lineage and held.version < target.version:
        direct = search.down(target, goal=held)
        if direct is not None and _cost(direct) <= target.full_bytes:
            return direct
    # A chain of large deltas may cost more than starting from an anchor.
    anchored = search.down(target, goal=None)
    found = [chain for chain in (direct, anchored) if chain is not None]
    if not found:
        raise search.error(target)
    return min(found, key=_cost)


def _num_entries(manifest: PolicyManifest) -> int:
    """Return the number of a manifest's tensors and pieces, which determine its memory."""
    return len(manifest.tensors) + sum(len(encoding.pieces) for encoding in manifest.encodings)


def _identity(manifest: PolicyManifest) -> tuple[str, str]:
    """Return the identity of a manifest's weights, which is the same for all revisions of a version."""
    return revision_key(manifest.key, 0), manifest.digest


def _cost(chain: Chain) -> int:
    """Return the number of bytes that reading a chain takes."""
    return sum(link.encoding.size_bytes for link in chain)


@dataclass(slots=True, kw_only=True)
class _Search:
    manifests: Manifests
    avoid: Set[tuple[str, int | None]]
    problems: list[str] = field(default_factory=list)
    first_error: MillraceError | None = None

    def down(self, target: PolicyManifest, *, goal: PolicyManifest | None) -> Chain | None:
        """Return a chain to `target` from `goal`, or, if it is None, from a full encoding; None if there is none."""
        # `links` has one iterator for each version on the path, `path` the deltas between them.
        path: list[Link] = []
        dead: set[int] = set()
        links = [iter(self._links(target, goal))]
        while links:
            link = next(links[-1], None)
            if link is None:  # every way from here was tried
                links.pop()
                if path:
                    dead.add(path.pop().encoding.base or 0)
                continue
            base = link.encoding.base
            if base is None:
                return (link, *reversed(path))
            if goal is not None and base == goal.version:
                if link.encoding.base_digest == goal.digest:
                    return (link, *reversed(path))
                self._note(f"{_name(link)} is against digest {link.encoding.base_digest}, held is {goal.digest}")
            # Depth first; a version from which every way was tried is never entered again, so that the search ends.
            elif base not in dead and len(path) < MAX_LINKS:
                below = self._base_of(link)
                if below is None:
                    dead.add(base)
                    continue
                path.append(link)
                links.append(iter(self._links(below, goal)))
        return None

    def _links(self, manifest: PolicyManifest, goal: PolicyManifest | None) -> list[Link]:
        """Return the encodings of a version that a chain can go through, as links, the best first.

        `goal` is the held version that the chain begins at; None has the chain begin at a full encoding. Damaged
        encodings and unknown codecs are left out, and recorded in `problems`.
        """
        # A delta against a version before the goal leads past it.
        least = manifest.anchor if goal is None else goal.version
        deltas = [encoding for encoding in manifest.deltas if (encoding.base or 0) >= least]
        # If the anchor is damaged, deltas against versions before it may lead to an older full encoding.
        if goal is None:
            deltas += [encoding for encoding in reversed(manifest.deltas) if encoding not in deltas]
            deltas = [encoding for encoding in manifest.encodings if encoding.codec == CODEC_FULL] + deltas
        for encoding in manifest.encodings:
            if encoding.codec not in (CODEC_FULL, CODEC_DELTA):
                self._note(
                    f"an encoding of {_version(manifest)} has the codec {encoding.codec!r}, which is unknown here"
                )
        links = [Link(manifest=manifest, encoding=encoding) for encoding in deltas]
        for link in links:
            if link.name in self.avoid:
                self._note(f"{_name(link)} is damaged")
        return [link for link in links if link.name not in self.avoid]

    def _base_of(self, link: Link) -> PolicyManifest | None:
        """Return the manifest of a delta's base version; None, with the reason in `problems`, if it is unusable."""
        base = link.encoding.base or 0
        try:
            manifest = self.manifests.read(link.manifest.sibling_key(base))
        except (NotFoundError, CorruptObjectError) as error:
            self.first_error = self.first_error or error
            self._note(f"{_name(link)} needs version {base}: {error.message}")
            return None
        if manifest.digest != link.encoding.base_digest:
            self._note(
                f"{_name(link)} is against digest {link.encoding.base_digest}, version {base} has {manifest.digest}"
            )
            return None
        return manifest

    def error(self, target: PolicyManifest) -> MillraceError:
        """Make the error that says why there is no chain to `target`."""
        unknown = {encoding.codec for encoding in target.encodings} - {CODEC_FULL, CODEC_DELTA}
        if unknown and not (target.full or target.deltas):
            return CorruptObjectError(
                f"policy {_version(target)} has only encodings of unknown codecs: {', '.join(sorted(unknown))} "
                f"(known: {CODEC_FULL}, {CODEC_DELTA})",
                reason="POLICY_CODEC_UNKNOWN",
                remedy="upgrade this service to the release that the trainer runs",
            )
        why = "; ".join(dict.fromkeys(self.problems[:_MAX_PROBLEMS])) or "it has no encoding"
        return CorruptObjectError(
            f"policy {_version(target)} cannot be put together: {why}",
            reason="POLICY_CHAIN_BROKEN",
            remedy="restore the missing objects from a replica of the bucket, or wait for the next anchor "
            "(trainer.policy.anchor_interval), which needs no earlier version",
        )

    def _note(self, problem: str) -> None:
        """Record why a link cannot be used, for the error."""
        self.problems.append(problem)


def _version(manifest: PolicyManifest) -> str:
    """Name a manifest's version in messages: lineage and version."""
    return f"{manifest.lineage}-{manifest.version}"


def _name(link: Link) -> str:
    """Name a link in messages."""
    base = link.encoding.base
    what = "the full encoding" if base is None else f"the delta against version {base}"
    return f"{what} of {_version(link.manifest)}"


# Verifies published policies in the store: whether a version can be read by a service that holds nothing, and whether
# every encoding of every version gives the bits that its digests name.
#
# `prove_policies` reads everything. Memory: a copy of the weights for each version that later ones are deltas
# against, which with skips of four and sixteen is three copies beside the one that is decoded.

Weights = dict[str, NDArray[np.unsignedinteger]]
"""The flat bits of every tensor."""


def damage_of(store: ObjectStore, key: str, *, digest: str, sha256: bytes = b"") -> str | None:
    """Return in words what is damaged of the version with the manifest `key`; None if it can be read.

    `digest` and `sha256` (of the manifest's bytes) are those that were announced; empty ones are not compared. Reads
    every object of the cheapest chain that leads to the version (blocking), and holds little of it in memory.
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
    """Decode every encoding of the policies with the manifests `keys`; yield a sentence for each problem (blocking).

    `on_progress` is called with a text before each version. `on_weights` gets lineage, version, and (number format,
    flat bits) by name of each version that is decoded. A version that is stored in full, too, may be a delta against
    one that is not among these: that delta is not decoded.
    """
    manifests: list[PolicyManifest] = []
    for key in keys:
        try:
            manifests.append(read_manifest(store, key))
        except (CorruptObjectError, NotFoundError) as error:
            yield error.message
    manifests.sort(key=lambda manifest: (manifest.lineage, manifest.version))
    # Weights are held no longer than the last delta against them needs, so two versions are in memory, not all.
    last_use = {
        (manifest.lineage, delta.base): place for place, manifest in enumerate(manifests) for delta in manifest.deltas
    }
    named = {(manifest.lineage, manifest.version) for manifest in manifests}
    held: dict[tuple[int, int | None], Weights] = {}
    for place, manifest in enumerate(manifests):
        what = f"policy {manifest.lineage}-{manifest.version}"
        on_progress(f"weights of {what}")
        weights: Weights | None = None
        for encoding in manifest.encodings:
            # Every encoding is decoded, not only the cheapest: readers that hold other versions take others.
            base = held.get((manifest.lineage, encoding.base))
            if manifest.full and encoding.base is not None and (manifest.lineage, encoding.base) not in named:
                continue
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
        # Drop every version against which no later delta is left.
        held = {name: kept for name, kept in held.items() if last_use.get(name, -1) > place}


def _decode(store: ObjectStore, manifest: PolicyManifest, encoding: Encoding, base: Weights | None) -> Weights:
    """Return the flat bits of all tensors of an encoding by name; `base` are those of its base (None for a full one).

    Raises CorruptObjectError unless they have the manifest's digests.
    """
    if encoding.codec not in (CODEC_FULL, CODEC_DELTA):
        raise CorruptObjectError(f"its codec {encoding.codec!r} is unknown", reason="POLICY_CODEC_UNKNOWN")
    # Before memory is allocated for sizes that only the manifest states.
    require_sizes(store, encoding.objects)
    objects = _read(store, encoding.objects)
    entries = {entry.name: entry for entry in manifest.tensors}
    if encoding.codec == CODEC_FULL:
        # Not cleared: the pieces of a full encoding cover every element, which the manifest's check has shown.
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
    """Raise CorruptObjectError unless all tensors have the manifest's digests."""
    for entry in manifest.tensors:
        found = digest_hex(bits_digest(weights[entry.name]))
        if found != entry.digest:
            raise CorruptObjectError(
                f"tensor {entry.name} has digest {found}, its manifest says {entry.digest}",
                reason="POLICY_TENSOR_DIGEST_MISMATCH",
            )


def _read(store: ObjectStore, objects: Sequence[ObjectEntry]) -> dict[str, memoryview]:
    """Return the contents of objects by key, verified by their sha256."""
    buffers = {entry.key: bytearray(entry.size_bytes) for entry in objects}

    def take(entry: ObjectEntry, offset: int, data: bytes) -> None:
        buffers[entry.key][offset : offset + len(data)] = data

    read_objects(store, objects, take)
    return {key: memoryview(data) for key, data in buffers.items()}
