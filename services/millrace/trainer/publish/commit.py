"""One version, from a snapshot to its manifest: compared, encoded, uploaded by every rank, committed by rank 0.

    head? ── exists ──▶ digests ──▶ equal, or the replay was not exact
      └───── new ─────▶ digests, deltas ──▶ sizes of all ranks ──▶ upload the smaller ──▶ manifest, last

Every rank runs it on a thread beside the training, at the same versions in the same order. Here is what ranks agree on
and what rank 0 alone does; the work that takes long is a `ShareWriter`'s, on this thread or in a process of its own.
Where that process dies under a version, all ranks do the version again, from its first look at the store: nothing is
committed but by the manifest. What the next version is compared with is always what was committed: the copy is replaced
after the manifest, never before.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

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
    digest_conflict,
    existing_policy,
    merge_digests,
    merge_encodings,
    pack_digests,
    upload_prefix,
)
from millrace.policies.share import Digests, EncodedDelta, ShareWriter
from millrace.runlog.records.numbered import latest_epoch
from millrace.storage.base import find_newest, next_revision
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.log.hold import ROLE, require_newest
from millrace.trainer.publish.plan import PublishTarget
from millrace.trainer.publish.share_process import PUBLISHER_DIED

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MOST_DEATHS = 3  # of processes that publish under one version; then the run is released, and tried again as a whole
_DELTA_BELOW = 0.9  # of a full copy; a full copy that costs hardly more is an anchor as well
_SKIP_BELOW = 0.5  # of a full copy; a replica that lacks versions may as well read the anchor then


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedVersion:
    """What became of a version. `published` is None at ranks other than 0."""

    published: PublishedPolicy | None
    changed_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RepublishedVersion:
    """A version that was published anew, and what was the matter with it."""

    published: PublishedPolicy
    damage: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionInput:
    """What a version is made of: this rank's parts, which are not written to while they are held."""

    version: int
    parts: list[TensorPart]
    probe: Probe | None
    adapter: AdapterEntry | None = None


class Committer:
    """Commits the versions of one lineage, in order. Each call is collective in a gang, and one thread's at a time."""

    def __init__(
        self,
        target: PublishTarget,
        *,
        config: PolicyConfig,
        lineage: int,
        files: tuple[FileEntry, ...],
        should_stop: Callable[[], bool] = lambda: False,
        is_strict: bool = True,
        upload_files: Callable[[], tuple[FileEntry, ...]] | None = None,
        share: ShareWriter | None = None,
    ) -> None:
        """Take `share`, which does this rank's work; by default the calling thread does it."""
        self._store = target.store
        self._names = target.names
        self._gang = target.gang
        self._epoch = target.epoch or 0
        self._config = config
        self._lineage = lineage
        self._files = files
        self._should_stop = should_stop
        self._is_strict = is_strict
        self._upload_files = upload_files
        self._share = share or target.share_writer(config, is_process=False)
        self.on_death: Callable[[UnavailableError], None] = lambda death: None
        """Called at every rank with each death of a process that publishes a version."""
        self._anchor = 0

    def holds(self, parts: list[TensorPart]) -> bool:
        """Return whether the next version will be compared with exactly these parts."""
        return self._share.holds(parts)

    def adopt(self, version: int, parts: list[TensorPart]) -> None:
        """Take the weights of a committed version as what the next one is compared with, if they are its weights."""
        self._persist(version, lambda: self._adopt(version, parts))

    def _adopt(self, version: int, parts: list[TensorPart]) -> None:
        _, found = self._committed(version)
        digests, entries = self._prove(parts, version)
        if found is None or whole_digest(entries) != found.digest:
            logger.info("the next policy is published in full", extra={"version": version + 1})
            return
        self._advance(VersionInput(version=version, parts=parts, probe=None), found, digests)

    def commit(self, version: VersionInput) -> CommittedVersion:
        """Commit a version, or prove that the committed one has equal weights.

        If it has others: ConflictError naming both. Unless strict that can only be of a trainer that had the run before
        and woke up: UnavailableError then, and the next try begins a lineage after it (`publish_plan`).
        """
        try:
            return self._persist(version.version, lambda: self._commit(version))
        except ConflictError as error:
            if self._is_strict or error.reason != DIGEST_MISMATCH:
                raise
            raise UnavailableError(
                f"another trainer of the run was faster: {error.message}",
                reason="POLICY_TAKEN",
                remedy="the run goes on from its last checkpoint in a new lineage",
            ) from error

    def _persist(self, version: int, work: Callable[[], T]) -> T:
        """Do the work; where the process that publishes dies under it, at any rank, do it again at all of them."""
        deaths = 0
        while True:
            try:
                return work()
            except UnavailableError as death:
                # A lost publisher process costs only its memory of bases: everything that it committed is found again
                # by `_committed`.
                deaths += 1
                if death.reason != PUBLISHER_DIED or self._should_stop():
                    raise
                logger.warning(death.message, extra={"version": version, "deaths": deaths})
                if deaths == _MOST_DEATHS:
                    raise UnavailableError(
                        f"{death.message} ({deaths} deaths in a row)",
                        reason=PUBLISHER_DIED,
                        remedy=death.remedy,
                    ) from death
                self.on_death(death)

    def republish(
        self, version: VersionInput, *, lineage: int, digest: str, sha256: bytes
    ) -> RepublishedVersion | None:
        """Publish a committed version anew and in full, under the next successor of its manifest, if it is damaged.

        None at ranks other than 0, and if every byte is as it was written. InvalidStateError if these weights are not
        the version's, whose `digest` was announced (it is empty if a damaged
        manifest was all that was left): then nobody has them any more.
        """
        return self._persist(
            version.version, lambda: self._republish(version, lineage=lineage, digest=digest, sha256=sha256)
        )

    def _republish(
        self, version: VersionInput, *, lineage: int, digest: str, sha256: bytes
    ) -> RepublishedVersion | None:
        found: list[str] = []

        def look() -> str | None:
            first_key = self._names.policy_manifest(lineage, version.version)
            if (damage := damage_of(self._store, first_key, digest=digest, sha256=sha256)) is None:
                logger.info("a policy that was reported damaged is whole", extra={"version": version.version})
                return None
            found.append(damage)
            return next_revision(self._store, first_key)

        if (key := self._gang.from_leader(look)) is None:
            return None
        _, entries = self._prove(version.parts, version.version)
        if digest and whole_digest(entries) != digest:
            # Not so under trainer.determinism = "strict": there each version is proved to be the published one.
            why = "" if self._is_strict else " (it computed the step again, which best_effort does not make bit-exact)"
            raise InvalidStateError(
                f"policy {lineage}-{version.version} of run {self._names.uid} is damaged, and this trainer cannot make "
                f"it again: its digest is {digest}, these weights have {whole_digest(entries)}{why}",
                reason="POLICY_LOST",
                remedy="restore its objects from a replica of the bucket (`millrace run repair RUN --from URL "
                "--apply`), then `millrace run resume` the run",
            )
        self._renew_files()
        uploaded = self._upload(version, [], full_bytes=0)
        published = self._write_manifest(self._manifest(version, key, entries, *uploaded, lineage=lineage))
        if lineage == self._lineage:
            self._anchor = version.version
        return RepublishedVersion(published=published, damage=found[0]) if published is not None else None

    def _renew_files(self) -> None:
        """Rank 0 uploads the small files again: they may be what is damaged. Only its manifests name them."""

        def renew() -> None:
            if self._upload_files is not None:
                self._files = self._upload_files()

        self._gang.from_leader(renew)

    def _commit(self, version: VersionInput) -> CommittedVersion:
        key, found = self._committed(version.version)
        if found is None:
            return self.publish(version, key)
        digests, entries = self._prove(version.parts, version.version)
        digest = whole_digest(entries)
        # At rank 0 this raises the conflict with both digests; the other ranks compare by themselves below.
        published = existing_policy(self._store, key, digest) if self._gang.is_leader else None
        if found.digest != digest:  # rank 0 has raised above
            raise digest_conflict(
                found.run_uid, self._lineage, version.version, published=found.digest, computed=digest
            )
        self._advance(version, found, digests)
        return CommittedVersion(published=published, changed_fraction=1.0)

    def _committed(self, version: int) -> tuple[str, "_Found | None"]:
        """Return a version's committed manifest with its key, or the key to commit under if it is missing or
        damaged.
        """

        def look() -> list[Any]:
            first_key, found = self._names.policy_manifest(self._lineage, version), None
            key = first_key
            try:
                if (newest := find_newest(self._store, first_key)) is not None:
                    key, found = newest, read_manifest(self._store, newest)
            except CorruptObjectError as error:
                logger.warning("a damaged policy is published anew", extra={"version": version, "error": error.message})
                key = next_revision(self._store, key)
            return [key, None if found is None else [found.run_uid, found.digest, found.anchor]]

        key, facts = self._gang.from_leader(look)
        return key, None if facts is None else _Found(run_uid=facts[0], digest=facts[1], anchor=facts[2])

    def _prove(self, parts: Sequence[TensorPart], version: int) -> tuple[Digests, tuple[TensorEntry, ...]]:
        digests: Digests = {}

        def prove() -> list[Any]:
            digests.update(self._share.digests(parts, version))
            return pack_digests(parts, digests)

        return digests, merge_digests(self._gang.agree(prove))

    def publish(self, version: VersionInput, key: str) -> CommittedVersion:
        """Upload and commit a version."""
        parts, digests = version.parts, Digests()

        def encode() -> dict[str, Any]:
            encoded = self._share.encode(parts, version.version)
            digests.update(encoded.digests)
            return {"parts": pack_digests(parts, digests), "deltas": [asdict(delta) for delta in encoded.deltas]}

        encoded = self._gang.agree(encode)
        entries = merge_digests(each["parts"] for each in encoded)
        deltas = merge_deltas(each["deltas"] for each in encoded)
        num_elements = sum(entry.num_elements for entry in entries)
        is_delta = bool(deltas) and deltas[0].base == version.version - 1
        changed = deltas[0].num_changed / max(1, num_elements) if is_delta else 1.0
        faults.reach(Point.TRAINER_BEFORE_UPLOAD, version=version.version)
        encodings, anchor = self._upload(version, deltas, full_bytes=sum(entry.size_bytes for entry in entries))
        manifest = self._manifest(version, key, entries, encodings, anchor, lineage=self._lineage)
        published = self._write_manifest(manifest)
        self._advance(version, _Found(run_uid=self._names.uid, digest=manifest.digest, anchor=anchor), digests)
        return CommittedVersion(published=published, changed_fraction=changed)

    def _manifest(
        self,
        version: VersionInput,
        key: str,
        entries: tuple[TensorEntry, ...],
        encodings: tuple[Encoding, ...],
        anchor: int,
        *,
        lineage: int,
    ) -> PolicyManifest:
        return PolicyManifest(
            key=key,
            lineage=lineage,
            version=version.version,
            anchor=anchor,
            tensors=entries,
            encodings=encodings,
            files=self._files,
            probe=version.probe,
            adapter=version.adapter,
            is_delta_base=self._config.delta,
            run_uid=self._names.uid,
            digest=whole_digest(entries),
        )

    def _upload(
        self, version: VersionInput, deltas: list[EncodedDelta], *, full_bytes: int
    ) -> tuple[tuple[Encoding, ...], int]:
        """Upload what is worth it; return the encodings of all ranks, and the newest anchor."""
        previous = version.version - 1
        # A delta that saves too little is not worth its decoding; a skip over several versions must save more, since it
        # only helps replicas that lack versions.
        worth = [
            delta.base
            for delta in deltas
            if delta.size_bytes < full_bytes * (_DELTA_BELOW if delta.base == previous else _SKIP_BELOW)
        ]
        # A full copy begins a new chain of deltas: when there is no delta to the previous version, and at least every
        # `anchor_interval` versions, so that a new replica never reads a long chain.
        is_anchor = previous not in worth or version.version - self._anchor >= self._config.anchor_interval
        uid, prefix = self._names.uid, self._names.prefix
        base = self._gang.from_leader(
            lambda: upload_prefix(
                PolicyPlace(prefix=prefix, uid=uid, lineage=self._lineage, version=version.version), epoch=self._epoch
            )
        )
        if not self._gang.is_alone:
            base += f"r{self._gang.rank:05d}-"

        def upload() -> dict[str, Any]:
            return self._share.upload(base, version.parts, version.version, is_anchor=is_anchor, bases=worth)

        encodings = merge_encodings(self._gang.agree(upload))
        return encodings, version.version if is_anchor else self._anchor

    def _write_manifest(self, manifest: PolicyManifest) -> PublishedPolicy | None:
        """Rank 0 commits; the others learn that it did."""
        published: list[PublishedPolicy] = []

        def commit() -> None:
            if self._should_stop():
                raise InvalidStateError(
                    f"policy {manifest.lineage}-{manifest.version} is not committed: the trainer lets go",
                    reason="POLICY_ABANDONED",
                    remedy="the trainer that continues the run publishes it",
                )
            faults.reach(Point.TRAINER_BEFORE_MANIFEST, version=manifest.version)
            # Who slept through the loss of the run creates nothing any more. The store knows epochs first, and is asked
            # although Redis may be away; what is taken between this look and the next line is POLICY_TAKEN's.
            newest = latest_epoch(self._store, self._names, ROLE)
            require_newest(newest, held=self._epoch, uid=self._names.uid)
            published.append(commit_policy(self._store, manifest.key, manifest))

        self._gang.from_leader(commit)
        return published[0] if published else None

    def _advance(self, version: VersionInput, found: "_Found", digests: Digests) -> None:
        self._anchor = found.anchor
        # Adapters are published whole: they are small, and a base for comparison would cost a copy of them.
        if self._config.delta and version.adapter is None:
            self._share.advance(version.parts, version.version, digest=found.digest, digests=digests)


def merge_deltas(shares: Iterable[list[dict[str, Any]]]) -> list[EncodedDelta]:
    """Merge the deltas that all ranks have to upload; a rank may have lost the base of a skipped delta."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """What a committed manifest says."""

    run_uid: str
    digest: str
    anchor: int
