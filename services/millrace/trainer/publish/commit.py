"""One version, from a snapshot to its manifest: compared, encoded, uploaded by every rank, committed by rank 0.

    head? ── exists ──▶ digests ──▶ equal, or the replay was not exact
      └───── new ─────▶ digests, deltas ──▶ sizes of all ranks ──▶ upload the smaller ──▶ manifest, last

Every rank runs it on a background thread, at the same versions in the same order. This module has the agreement of
ranks and the work of rank 0; the long work is a `ShareWriter`'s, on this thread or in a process of its own. If that
process dies during a version, all ranks do the version again, from its first look at the store: nothing is committed
except by the manifest. The next version is always compared with the committed one: the copy to compare with is replaced
after the manifest, never before.

The file is in the order of the calls: what a method calls is below it. First the three collective operations, then the
steps that they share, then what one rank does by itself.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from millrace.config.sections.trainer import PolicyConfig
from millrace.errors import ConflictError, CorruptObjectError, InvalidStateError, UnavailableError
from millrace.policies.fetch import damage_of, read_manifest
from millrace.policies.manifest import (
    AdapterEntry,
    Encoding,
    FileEntry,
    PolicyManifest,
    PolicyPlace,
    Probe,
    TensorEntry,
    whole_digest,
)
from millrace.policies.publish import (
    DIGEST_MISMATCH,
    PublishedPolicy,
    TensorPart,
    commit_policy,
    existing_policy,
    merge_digests,
    merge_encodings,
    pack_digests,
    unpack_digests,
    upload_prefix,
)
from millrace.policies.share import Digests, EncodedDelta, ShareWriter
from millrace.runlog.names import Names
from millrace.runlog.records.numbered import latest_epoch
from millrace.storage.base import ObjectStore, find_newest, next_revision
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.log.hold import ROLE, require_newest
from millrace.trainer.publish.plan import PublishTarget
from millrace.trainer.publish.share_process import PUBLISHER_DIED

logger = logging.getLogger(__name__)

_MOST_DEATHS = 3  # of publishing processes during one version; then the run is released, and tried again as a whole
_DELTA_BELOW = 0.9  # of a full copy; a full copy that costs hardly more is an anchor as well
_SKIP_BELOW = 0.5  # of a full copy; if it is larger, a replica that lacks versions may as well read the anchor


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInput:
    """A version to commit: this rank's parts, which must not be written to until it is committed, and its entries."""

    version: int
    parts: list[TensorPart]
    probe: Probe | None
    adapter: AdapterEntry | None = None


class Committer:
    """Commits the versions of one lineage, in order. Each call is collective in a gang, and not thread-safe."""

    def __init__(
        self,
        target: PublishTarget,
        *,
        config: PolicyConfig,
        files: tuple[FileEntry, ...],
        should_stop: Callable[[], bool] = lambda: False,
        is_strict: bool = True,
        upload_files: Callable[[], tuple[FileEntry, ...]] | None = None,
        share: ShareWriter | None = None,
    ) -> None:
        """Take the run, rank and epoch of `target`. Collective calls of a gang must be made by all its ranks.

        `share` compares, encodes and uploads this rank's tensors; None: the calling thread does it. `files` are the
        entries of the small files, and `upload_files` uploads them again for `republish`. `should_stop` prevents
        commits once it is True. `is_strict` says whether equal steps give equal bits.
        """
        self._store = target.store
        self._names = target.names
        self._gang = target.gang
        self._epoch = target.epoch or 0
        self._config = config
        self._lineage = target.lineage
        self._files = files
        self._should_stop = should_stop
        self._is_strict = is_strict
        self._upload_files = upload_files
        self._share = share or target.share_writer(config, is_process=False)
        self._anchor = 0
        self.on_death: Callable[[UnavailableError], None] = lambda death: None
        """Called at every rank each time that a publishing process has died, before the version is tried again."""

    def holds(self, parts: list[TensorPart]) -> bool:
        """Return whether the next version will be compared with these parts, whose buffers are in use then."""
        return self._share.holds(parts)

    def commit(self, version: VersionInput) -> PublishedPolicy | None:
        """Upload and commit a version, or prove that the committed one has equal weights.

        Return it at rank 0, else None. Raises ConflictError naming both if the committed version has other weights.
        Without strictness that can only be of a trainer that had the run before and woke up: then raises
        UnavailableError, and the next try begins a lineage after it. Collective in a gang.
        """
        deaths = _Deaths(version.version, on_death=self.on_death, should_stop=self._should_stop)
        try:
            while True:
                with deaths:
                    return self._commit(version)
        except ConflictError as error:
            if self._is_strict or error.reason != DIGEST_MISMATCH:
                raise
            raise UnavailableError(
                f"another trainer of the run was faster: {error.message}",
                reason="POLICY_TAKEN",
                remedy="the run goes on from its last checkpoint in a new lineage",
            ) from error

    def adopt(self, version: int, parts: list[TensorPart]) -> None:
        """Take `parts`, this rank's tensors of a committed version, as what the next version is compared with.

        If their weights differ from the committed ones, the next version is published in full. Collective in a gang.
        """
        deaths = _Deaths(version, on_death=self.on_death, should_stop=self._should_stop)
        while True:
            with deaths:
                return self._adopt(VersionInput(version=version, parts=parts, probe=None))

    def republish(self, version: VersionInput, *, lineage: int, digest: str, sha256: bytes) -> PublishedPolicy | None:
        """Publish a committed version of `lineage` again, in full, as its manifest's next revision, if it is damaged.

        `digest` and `sha256` are those that were announced, of the weights and of the manifest; `digest` is empty if
        only a damaged manifest was left. Returns None if nothing is damaged, and at ranks other than 0. Raises
        InvalidStateError if `version` does not have the announced weights. Collective in a gang.
        """
        deaths = _Deaths(version.version, on_death=self.on_death, should_stop=self._should_stop)
        while True:
            with deaths:
                return self._republish(version, lineage=lineage, digest=digest, sha256=sha256)

    def _commit(self, version: VersionInput) -> PublishedPolicy | None:
        """Try once to commit a version, or to prove the committed one equal; return it at rank 0. Collective."""
        key, committed = self._find(version.version)
        if committed is None:
            return self.publish(version, key)
        digests, entries = self._digest(version)
        with agreed(self._gang):  # rank 0 raises the conflict for all
            published = existing_policy(self._store, key, whole_digest(entries)) if self._gang.is_leader else None
        self._advance(version, committed, digests)
        return published

    def publish(self, version: VersionInput, key: str) -> PublishedPolicy | None:
        """Encode and upload a version, in full or as deltas, and write its manifest under `key`.

        Return it at rank 0, else None. Collective in a gang.
        """
        digests, entries, deltas = self._encode(version)
        previous = version.version - 1
        is_delta = bool(deltas) and deltas[0].base == previous
        num_elements = sum(entry.num_elements for entry in entries)
        changed = deltas[0].num_changed / max(1, num_elements) if is_delta else 1.0
        faults.reach(Point.TRAINER_BEFORE_UPLOAD, version=version.version)
        bases = worthwhile_bases(deltas, previous=previous, full_bytes=sum(entry.size_bytes for entry in entries))
        # A full copy begins a new chain of deltas: when there is no delta to the previous version, and at least every
        # `anchor_interval` versions, so that a new replica never reads a long chain.
        is_anchor = previous not in bases or version.version - self._anchor >= self._config.anchor_interval
        anchor = version.version if is_anchor else self._anchor
        encodings = self._upload(version, is_anchor=is_anchor, bases=bases)
        manifest = self._manifest(
            version, key, tensors=entries, encodings=encodings, anchor=anchor, lineage=self._lineage
        )
        published = self._write_manifest(manifest)
        self._advance(version, _Committed(digest=manifest.digest, anchor=anchor), digests)
        return published and replace(published, changed_fraction=changed)

    def _adopt(self, version: VersionInput) -> None:
        """Try once to take a committed version's parts as what the next version is compared with. Collective."""
        _, committed = self._find(version.version)
        digests, entries = self._digest(version)
        if committed is None or whole_digest(entries) != committed.digest:
            logger.info("the next policy is published in full", extra={"version": version.version + 1})
            return
        self._advance(version, committed, digests)

    def _republish(self, version: VersionInput, *, lineage: int, digest: str, sha256: bytes) -> PublishedPolicy | None:
        """Try once to publish a damaged version again; return it at rank 0, or None. Collective.

        Parameters and errors are those of `republish`.
        """
        first_key = self._names.policy_manifest(lineage, version.version)
        found = self._gang.from_leader(lambda: find_damage(self._store, first_key, digest=digest, sha256=sha256))
        if found is None:
            return None
        key, damage = found
        _, entries = self._digest(version)
        if digest and whole_digest(entries) != digest:
            raise self._lost(f"{lineage}-{version.version}", digest=digest, held=whole_digest(entries))
        with agreed(self._gang):  # the small files may be what is damaged; only rank 0's manifests name them
            if self._gang.is_leader and self._upload_files is not None:
                self._files = self._upload_files()
        # In full: a delta would need its base, which may be what is damaged.
        encodings = self._upload(version, is_anchor=True, bases=[])
        manifest = self._manifest(
            version, key, tensors=entries, encodings=encodings, anchor=version.version, lineage=lineage
        )
        published = self._write_manifest(manifest)
        if lineage == self._lineage:
            self._anchor = version.version
        return published and replace(published, damage=damage)

    def _lost(self, name: str, *, digest: str, held: str) -> InvalidStateError:
        """Make the error of a damaged version whose weights this trainer does not have.

        `name` is its lineage and version ("0-7"), `digest` that of its weights, and `held` that of the live ones.
        """
        # Cannot happen under trainer.determinism = "strict", where each version is verified to be the published one.
        why = "" if self._is_strict else " (it computed the step again, which best_effort does not make bit-exact)"
        return InvalidStateError(
            f"policy {name} of run {self._names.uid} is damaged, and this trainer cannot make it again: its digest is "
            f"{digest}, these weights have {held}{why}",
            reason="POLICY_LOST",
            remedy="restore its objects from a replica of the bucket (`millrace run repair RUN --from URL "
            "--apply`), then `millrace run resume` the run",
        )

    def _find(self, version: int) -> "tuple[str, _Committed | None]":
        """Return the key of a version's committed manifest, with its digest and anchor.

        If there is none, or a damaged one: the key to commit the version under, and None. Collective in a gang.
        """
        key, facts = self._gang.from_leader(
            lambda: find_committed(self._store, self._names, lineage=self._lineage, version=version)
        )
        return key, None if facts is None else _Committed(**facts)

    def _digest(self, version: VersionInput) -> tuple[Digests, tuple[TensorEntry, ...]]:
        """Return the digests of this rank's parts of a version, and the entries of its tensors over all ranks.

        Collective.
        """
        shares = self._gang.agree(
            lambda: pack_digests(version.parts, self._share.digests(version.parts, version.version))
        )
        return unpack_digests(shares[self._gang.rank]), merge_digests(shares)

    def _encode(self, version: VersionInput) -> tuple[Digests, tuple[TensorEntry, ...], list[EncodedDelta]]:
        """Return digests and tensor entries as `_digest` does, and the deltas that all ranks have encoded. Collective.

        The delta to the version before comes first.
        """
        shares = self._gang.agree(lambda: encode_share(self._share, version))
        digests = unpack_digests(shares[self._gang.rank]["parts"])
        return digests, merge_digests(each["parts"] for each in shares), merge_deltas(each["deltas"] for each in shares)

    def _upload(self, version: VersionInput, *, is_anchor: bool, bases: list[int]) -> tuple[Encoding, ...]:
        """Upload every rank's share of a version: in full if `is_anchor`, and the deltas against the versions `bases`.

        Returns the encodings for the manifest. Collective in a gang.
        """
        uid, prefix = self._names.uid, self._names.prefix
        place = PolicyPlace(prefix=prefix, uid=uid, lineage=self._lineage, version=version.version)
        # Rank 0 chooses the prefix, below which every rank's objects have names of their own.
        base = self._gang.from_leader(lambda: upload_prefix(place, epoch=self._epoch))
        if not self._gang.is_alone:
            base += f"r{self._gang.rank:05d}-"
        return merge_encodings(
            self._gang.agree(
                lambda: self._share.upload(base, version.parts, version.version, is_anchor=is_anchor, bases=bases)
            )
        )

    def _manifest(
        self,
        version: VersionInput,
        key: str,
        *,
        tensors: tuple[TensorEntry, ...],
        encodings: tuple[Encoding, ...],
        anchor: int,
        lineage: int,
    ) -> PolicyManifest:
        """Return the manifest of an uploaded version, to be committed under `key`.

        `tensors` and `encodings` are those of all ranks, and `anchor` is the newest version that is stored in full.
        """
        return PolicyManifest(
            key=key,
            lineage=lineage,
            version=version.version,
            anchor=anchor,
            tensors=tensors,
            encodings=encodings,
            files=self._files,
            probe=version.probe,
            adapter=version.adapter,
            is_delta_base=self._config.delta,
            run_uid=self._names.uid,
            digest=whole_digest(tensors),
        )

    def _write_manifest(self, manifest: PolicyManifest) -> PublishedPolicy | None:
        """Write the manifest at rank 0, and return what was published there, or None at other ranks.

        Raises at every rank: InvalidStateError if asked to stop, FencedError if another trainer has a newer epoch.
        """
        with agreed(self._gang):
            if not self._gang.is_leader:
                return None
            if self._should_stop():
                raise InvalidStateError(
                    f"policy {manifest.lineage}-{manifest.version} is not committed: the trainer lets go",
                    reason="POLICY_ABANDONED",
                    remedy="the trainer that continues the run publishes it",
                )
            faults.reach(Point.TRAINER_BEFORE_MANIFEST, version=manifest.version)
            # A trainer that was frozen while it lost the run must not commit. Epochs are created in the store first, so
            # the store is asked, and Redis may be away. An epoch taken after this check leads to POLICY_TAKEN.
            newest = latest_epoch(self._store, self._names, ROLE)
            require_newest(newest, held=self._epoch, uid=self._names.uid)
            return commit_policy(self._store, manifest.key, manifest)

    def _advance(self, version: VersionInput, committed: "_Committed", digests: Digests) -> None:
        """Record a committed version, and compare the next one with it if deltas are published.

        `committed` has the digest and the anchor of its manifest; `digests` are those of this rank's parts.
        """
        self._anchor = committed.anchor
        # Adapters are published whole: they are small, and a base for comparison would cost a copy of them.
        if self._config.delta and version.adapter is None:
            self._share.advance(version.parts, version.version, digest=committed.digest, digests=digests)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Committed:
    """The facts of a committed manifest that the next version needs."""

    digest: str
    anchor: int


class _Deaths:
    """Leaves a block that a process that publishes died under, at any rank, so that the version is done again.

    Entered once for each try. Every other error passes, and so does the third death in a row.
    """

    def __init__(
        self, version: int, *, on_death: Callable[[UnavailableError], None], should_stop: Callable[[], bool]
    ) -> None:
        """Count deaths of the publishing process while `version` is published, and call `on_death` for each.

        Once `should_stop` is True no further try is made.
        """
        self._version = version
        self._on_death = on_death
        self._should_stop = should_stop
        self._count = 0

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, death: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Return True, which suppresses the error, if the publishing process died at any rank; log and report it.

        The caller tries again then. Every other error passes, as does the third death, and any death once asked to
        stop.
        """
        if not isinstance(death, UnavailableError):
            return False
        self._count += 1
        if death.reason != PUBLISHER_DIED or self._should_stop():
            return False
        # A lost process costs only its memory of bases: everything that it committed is found again in the store.
        logger.warning(death.message, extra={"version": self._version, "deaths": self._count})
        if self._count == _MOST_DEATHS:
            raise UnavailableError(
                f"{death.message} ({self._count} deaths in a row)", reason=PUBLISHER_DIED, remedy=death.remedy
            ) from death
        self._on_death(death)
        return True


def find_committed(
    store: ObjectStore, names: Names, *, lineage: int, version: int
) -> tuple[str, dict[str, Any] | None]:
    """Return the key of a version's newest manifest, with its digest and anchor as plain data.

    If there is none, or a damaged one: the key to commit the version under, and None.
    """
    key = first_key = names.policy_manifest(lineage, version)
    try:
        if (newest := find_newest(store, first_key)) is None:
            return first_key, None
        key = newest
        manifest = read_manifest(store, newest)
    except CorruptObjectError as error:
        logger.warning("a damaged policy is published anew", extra={"version": version, "error": error.message})
        return next_revision(store, key), None
    return key, {"digest": manifest.digest, "anchor": manifest.anchor}


def find_damage(store: ObjectStore, first_key: str, *, digest: str, sha256: bytes) -> tuple[str, str] | None:
    """Return the key under which to publish a damaged version again, and the damage in words; None if it is intact.

    `first_key` is its first manifest's. `digest` and `sha256` are those announced, of weights and manifest.
    """
    if (damage := damage_of(store, first_key, digest=digest, sha256=sha256)) is None:
        logger.info("a policy that was reported damaged is whole", extra={"manifest": first_key})
        return None
    return next_revision(store, first_key), damage


def encode_share(share: ShareWriter, version: VersionInput) -> dict[str, Any]:
    """Encode this rank's share of a version.

    Return its digests and its deltas' sizes as plain data for the other ranks.
    """
    encoded = share.encode(version.parts, version.version)
    return {
        "parts": pack_digests(version.parts, encoded.digests),
        "deltas": [asdict(delta) for delta in encoded.deltas],
    }


def merge_deltas(shares: Iterable[list[dict[str, Any]]]) -> list[EncodedDelta]:
    """Return the deltas that every rank has encoded, with sizes summed over the ranks.

    `shares` has the deltas of each rank. A delta that a rank lacks is left out.
    """
    found: list[dict[int, EncodedDelta]] = [{each["base"]: EncodedDelta(**each) for each in share} for share in shares]
    return [
        EncodedDelta(
            base=base,
            num_changed=sum(share[base].num_changed for share in found),
            size_bytes=sum(share[base].size_bytes for share in found),
        )
        # A base counts only if every rank encoded against it, because a version is decoded from all shares together.
        for base in found[0]
        if all(base in share for share in found)
    ]


def worthwhile_bases(deltas: Sequence[EncodedDelta], *, previous: int, full_bytes: int) -> list[int]:
    """Return the base versions of those deltas that are worth an upload; `full_bytes` is the size of a full copy.

    A delta against the `previous` version that saves too little is not worth its decoding. A skip over several versions
    must save more, since it only helps replicas that lack versions.
    """
    return [
        delta.base
        for delta in deltas
        if delta.size_bytes < full_bytes * (_DELTA_BELOW if delta.base == previous else _SKIP_BELOW)
    ]
