"""Publishes the model's weights or its adapters as policy versions, beside the training.

    main thread      step n ─▶ snapshot, probe ─▶ step n + 1 ─▶ (waits for version n + 1) snapshot, probe ─▶ …
    beside it                  compare, encode, upload, manifest, announce version n + 1

Comparing, encoding and uploading are done by a process of its own if versions are large (`executor.py`). At most one
version is under way. The next one, a checkpoint and the end of the training wait for it, so that versions are published
in order and a checkpoint never precedes its version; errors of the background work are raised there.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any, Protocol

from millrace.errors import CorruptObjectError, InvalidStateError, UnavailableError
from millrace.internal.v1 import policy_pb2
from millrace.policies.fetch import damage_of, read_manifest
from millrace.policies.manifest import AdapterEntry, FileEntry, PolicyManifest, PolicyPlace
from millrace.policies.peft.config import AdapterSpec
from millrace.policies.publish import PolicyContents, PublishedPolicy, TensorPart, publish_policy
from millrace.storage.base import find_newest, next_revision
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer import meters
from millrace.trainer.background import BackgroundWork, BackgroundWriter
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.learning.learner import Learner, digest_of
from millrace.trainer.model.pretrained import probe
from millrace.trainer.model.published import Snapshots, policy_tensors, share_bytes
from millrace.trainer.publish.commit import Committer, VersionInput
from millrace.trainer.publish.plan import PublishPlan, PublishTarget, published_anew
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)


class PolicyLog(Protocol):
    """The part of the run's log that announces versions, at rank 0."""

    @property
    def epoch(self) -> int:
        """Return the fencing epoch that this trainer holds."""
        ...

    def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        """Announce a published version; `is_replay`: the store had it already, with equal weights."""
        ...

    def write_event(self, event: event_pb2.Event) -> None:
        """Append an event to the run's events."""
        ...


# A run that trains adapters publishes version 0 in full, and every later one as an adapter on that.


class AdapterBase:
    """The base of a run's adapters, which is version 0. Every rank of a gang has one.

    `upload_files` uploads the small files; `on_republished` is called at rank 0 with what was damaged and the URI of
    the new manifest.
    """

    def __init__(
        self,
        learner: Learner,
        adapter: AdapterSpec,
        target: PublishTarget,
        *,
        upload_files: Callable[[], tuple[FileEntry, ...]],
        on_republished: Callable[[str, str], None],
    ) -> None:
        """Prepare to publish the learner's frozen base as version 0 whenever it is missing or damaged.

        `adapter` describes the adapters. `upload_files` uploads the small files; `on_republished` is called at rank 0
        with what was damaged and the URI of the new manifest.
        """
        self._model = learner.model
        self._dtype = learner.publish_dtype
        self._base_digest = learner.base_digest
        self._adapter = adapter
        self._store = target.store
        self._names = target.names
        self._gang = target.gang
        self._epoch = target.epoch
        self._upload_files = upload_files
        self._on_republished = on_republished
        self._entry: AdapterEntry | None = None

    def entry(self) -> AdapterEntry:
        """Return the adapter's entry for manifests, which names the published base at rank 0.

        At other ranks the key and the size of the base are missing. The first call, after version 0 is published, makes
        sure that the base is there (`require_whole`); it is collective.
        """
        if self._entry is None:
            self.require_whole(is_thorough=False)
        assert self._entry is not None
        return self._entry

    def require_whole(self, *, is_thorough: bool) -> None:
        """Publish the base (version 0) of the adapters, in full, if it is damaged or, in a fork, missing.

        Collective in a gang. Its manifest is always read; its data objects are only verified if `is_thorough`. Raises
        CorruptObjectError if the published base has other weights, and InvalidStateError if this trainer lacks the
        weights to publish it.
        """
        published: list[PolicyManifest | None] = []

        def look() -> list[str] | None:
            manifest, key, damage = self._look(is_thorough=is_thorough)
            # The manifest stays at rank 0: only plain data goes to the other ranks.
            published.append(manifest)
            return [key, damage] if manifest is None else None

        missing = self._gang.from_leader(look)
        manifest = self._publish(*missing) if missing else next(iter(published), None)
        self._entry = AdapterEntry(
            **asdict(self._adapter),
            base_key="" if manifest is None else manifest.key,
            base_digest=self._base_digest,
            base_bytes=0 if manifest is None else manifest.full_bytes,
        )

    def _look(self, *, is_thorough: bool) -> tuple[PolicyManifest | None, str, str]:
        """Return (manifest, "", "") of the published base; if it has to be published (None, key, damage).

        `key` is that of the manifest to write, and `damage` says in words what is damaged, empty if the base is
        missing. With `is_thorough` data objects are verified, too. A fork has no version 0: its copy of the base has a
        separate prefix, because versions under policies/ are announced. Raises CorruptObjectError if the published base
        has other weights.
        """
        store, damage = self._store, ""
        keys = [
            PolicyPlace(prefix=self._names.prefix, uid=uid, lineage=0, version=0).manifest_key
            for uid in (self._names.uid, self._copy)
        ]
        first_key = next((key for key in keys if find_newest(store, key) is not None), "")
        if not first_key:
            return None, keys[1], ""
        try:
            manifest = read_manifest(store, first_key)
        except CorruptObjectError as error:
            damage = error.message
        else:
            self._require_same(manifest)
            if is_thorough:
                damage = damage_of(store, first_key, digest=self._base_digest) or ""
            if not damage:
                return manifest, "", ""
        return None, next_revision(store, first_key), damage

    def _publish(self, key: str, damage: str) -> PolicyManifest | None:
        """Publish the base with its manifest under `key`; return the manifest at rank 0, and None at other ranks.

        `damage` says in words what is replaced; empty in a fork. Raises InvalidStateError if the live base has another
        digest. Collective in a gang.
        """
        held = []
        for tensor in policy_tensors(self._model, dtype=self._dtype, version=0):  # collective: every rank iterates
            held += [tensor] if self._gang.is_leader else []
        manifest: PolicyManifest | None = None
        with agreed(self._gang):
            if self._epoch is not None:
                if (found := digest_of(held)) != self._base_digest:
                    raise InvalidStateError(
                        f"{self._store.uri(key)} has to be written, because {damage or 'this is a fork'}, and this "
                        f"trainer cannot make it again: the base has digest {self._base_digest}, what it holds of it "
                        f"{found} (layers in trainer.model.lora.modules_to_save are trained whole)",
                        reason="POLICY_LOST",
                        remedy="restore version 0 of the run from a replica of the bucket, then `millrace run resume` "
                        "the run",
                    )
                manifest = publish_policy(
                    self._store,
                    PolicyPlace(
                        prefix=self._names.prefix,
                        uid=self._names.uid if key.startswith(self._names.policies) else self._copy,
                        lineage=0,
                        version=0,
                    ),
                    PolicyContents(tensors=held, files=self._upload_files()),
                    epoch=self._epoch,
                    successor=key,
                ).manifest
                self._require_same(manifest)
                if damage:
                    self._on_republished(damage, self._store.uri(manifest.key))
        return manifest

    @property
    def _copy(self) -> str:
        """Return the name that replaces the run's uid in the keys of a fork's copy of the base."""
        return f"{self._names.uid}/base"

    def _require_same(self, manifest: PolicyManifest) -> None:
        """Raise CorruptObjectError if a published base has another digest than this trainer's."""
        if manifest.digest != self._base_digest:
            raise CorruptObjectError(
                f"the base of run {self._names.uid} has digest {manifest.digest} as published, and this trainer's "
                f"base has {self._base_digest}",
                reason="POLICY_BASE_DIFFERS",
                remedy="give the model that the run began with (`model.name` of the config)",
            )


class Publisher(BackgroundWriter):
    """Publishes the live model as version n; every rank of a gang calls it, at the same versions.

    Used as a context manager around the training: leaving it waits for what is under way, or abandons it if the
    training failed. Host memory of each rank: the snapshot that is being published and the version committed before it
    (each 2 bytes per bf16 parameter of the rank's shard, 4 per float32; the second only with `trainer.policy.delta`),
    bases of skip deltas (`share.py`), and during the upload the encoded delta. A publishing process maps the snapshots
    and has the rest itself.

    `base` is set if versions after 0 are adapters, which are small, and always published whole.
    """

    def __init__(
        self,
        learner: Learner,
        target: PublishTarget,
        *,
        log_client: PolicyLog | None,
        files: tuple[FileEntry, ...],
        vocabulary: int,
        plan: PublishPlan,
        base: AdapterBase | None = None,
        upload_files: Callable[[], tuple[FileEntry, ...]] | None = None,
    ) -> None:
        """Prepare to publish the learner's model as `plan` says; allocate no buffers yet.

        `log_client` announces versions, at rank 0 (None elsewhere). `files` are the entries of the small files,
        `upload_files` uploads them again. `vocabulary` is the number of token ids. `base` is set if versions after 0
        are adapters.
        """
        gang, config = target.gang, learner.config.policy
        self._model = learner.model
        self._store = target.store
        self._gang = gang
        self._log_client = log_client
        self._vocabulary = vocabulary
        self._plan = plan
        self._base = base
        self._work = BackgroundWork(gang=gang)
        place: dict[str, Any] = {"dtype": learner.publish_dtype, "rank": gang.rank, "layout": gang.layout}
        is_process = target.is_process(share_bytes=share_bytes(learner.model, **place))
        self._snapshots = Snapshots(learner.model, **place, device=gang.device, are_shared=is_process)
        config = config if base is None else config.model_copy(update={"delta": False})
        self._share = target.share_writer(config, is_process=is_process)
        self._committer = Committer(
            replace(target, gang=gang.beside("policies"), lineage=plan.lineage),
            config=config,
            files=files,
            should_stop=self._work.is_abandoned.is_set,
            is_strict=learner.is_strict,
            upload_files=upload_files,
            share=self._share,
        )
        self._committer.on_death = self._report_death
        self._previous: list[TensorPart] = []

    @property
    def lineage(self) -> int:
        """Return the lineage of published versions."""
        return self._plan.lineage

    def publish(self, version: int, *, step: int | None = None) -> float:
        """Wait for the previous version, snapshot the weights, and start to publish them as `version`.

        Collective in a gang. Versions before the plan's first are not published. `step` is the batch that made it, None
        for the version that training starts with. Returns the seconds that this call took. Raises what publishing the
        previous version raised.
        """
        began = time.monotonic()
        # At most one version is under way, so that versions are committed in order.
        self.finish()
        if version < self._plan.first_version:
            if self._plan.is_continued and version == self._plan.first_version - 1:
                parts = self._snapshots.take(version)
                self._begin(version, parts, lambda: self._committer.adopt(version, parts))
            return time.monotonic() - began
        parts = self._snapshots.take(version)  # before the probe, after which FSDP may hold the weights unsharded
        probed = probe(self._model, vocabulary=self._vocabulary, device=self._gang.device)
        adapter = self._base.entry() if self._base is not None and version else None
        made = VersionInput(version=version, parts=parts, probe=probed, adapter=adapter)
        self._begin(version, parts, lambda: self._commit(made, began=began, step=step))
        return time.monotonic() - began

    def republish(self, entry: policy_pb2.PolicyEntry) -> None:
        """Start to publish a damaged version again; the live weights must be those of `entry`. Collective in a gang.

        Waits for the version under way first. A damaged base of adapters is published within this call.
        """
        self.finish()
        version = int(entry.version)
        # The base first, which the version's manifest names.
        if self._base is not None and version:
            self._base.require_whole(is_thorough=True)
        parts = self._snapshots.take(version)
        probed = probe(self._model, vocabulary=self._vocabulary, device=self._gang.device)
        adapter = self._base.entry() if self._base is not None and version else None
        made = VersionInput(version=version, parts=parts, probe=probed, adapter=adapter)
        self._begin(version, parts, lambda: self._republish(entry, made))

    def _republish(self, entry: policy_pb2.PolicyEntry, made: VersionInput) -> None:
        """Publish a damaged version again, on the background thread, and write the event of that at rank 0."""
        republished = self._committer.republish(
            made, lineage=entry.lineage, digest=entry.digest, sha256=entry.manifest_sha256
        )
        if republished is not None and self._log_client is not None:
            name, uri = f"{entry.lineage}-{entry.version}", self._store.uri(republished.manifest_key)
            self._log_client.write_event(published_anew(name, damage=republished.damage, uri=uri))

    def raise_failure(self) -> None:
        """Raise what publishing raised in the background, if it has ended, without waiting."""
        self._work.raise_failure()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Wait for the version under way, or abandon it after an error of the training.

        Then release process and buffers.
        """
        try:
            super().__exit__(kind, error, traceback)
        finally:
            # The process first, because it reads the buffers.
            self._share.close()
            self._snapshots.close()

    def _report_death(self, death: UnavailableError) -> None:
        """Write the event that the publishing process died, and that another one publishes the version; at rank 0."""
        if self._log_client is not None:
            message = f"{death.message}; another one publishes the version"
            self._log_client.write_event(
                event_pb2.Event(warning=event_pb2.Warning(reason="PUBLISHER_DIED", message=message))
            )

    def _begin(self, version: int, parts: list[TensorPart], work: Callable[[], None]) -> None:
        """Run `work` for a version in the background, and release buffers that are not needed afterwards.

        `parts` are the version's, as the snapshot returned them.
        """

        def run() -> None:
            work()
            self._release(parts)

        self._work.begin(f"policy {version} to be published", run)

    def _release(self, parts: list[TensorPart]) -> None:
        """Give back the buffers of `parts`; if the next version is compared with `parts`, those of the parts before."""
        if self._committer.holds(parts):
            self._snapshots.give_back(self._previous)
            self._previous = parts
        else:
            self._snapshots.give_back(parts)

    def _commit(self, made: VersionInput, *, began: float, step: int | None) -> None:
        """Commit a version, on the background thread, and announce it at rank 0.

        `began` is when publishing began (monotonic seconds), and `step` the batch that made the version.
        """
        published = self._committer.commit(made)
        if published is not None and self._log_client is not None:
            faults.reach(Point.TRAINER_AFTER_MANIFEST, version=made.version)
            # The manifest is committed, and the trainer that continues the run announces the version when it takes the
            # log over.
            if self._work.is_abandoned.is_set():
                return
            self._announce(self._log_client, published, time.monotonic() - began)
        if step is not None:
            faults.reach(Point.TRAINER_AFTER_PUBLISH, step=step)

    def _announce(self, log_client: PolicyLog, published: PublishedPolicy, seconds: float) -> None:
        """Append a committed version to the log, write its event, and record its metrics.

        `seconds` is how long it took. A version that existed already is appended without an event.
        """
        manifest = published.manifest
        entry = policy_pb2.PolicyEntry(
            lineage=manifest.lineage,
            version=manifest.version,
            manifest_key=published.manifest_key,
            manifest_sha256=published.manifest_sha256,
            digest=manifest.digest,
        )
        log_client.append_policy(entry, is_replay=published.already_existed)
        size_bytes = 0 if published.already_existed else published.size_bytes
        meters.policy_published(manifest.version, size_bytes=size_bytes, seconds=seconds)
        if published.already_existed:
            logger.info("policy proven equal to the published one", extra={"version": manifest.version})
            return
        body = event_pb2.PolicyPublished(
            lineage=manifest.lineage,
            version=manifest.version,
            size_bytes=published.size_bytes,
            seconds=seconds,
            uri=self._store.uri(published.manifest_key),
            full_bytes=manifest.full_bytes,
            codec=manifest.codecs,
            changed_fraction=published.changed_fraction,
            digest=manifest.digest,
            manifest_sha256=published.manifest_sha256.hex(),
        )
        log_client.write_event(event_pb2.Event(policy_published=body))
        logger.info(
            "policy published",
            extra={
                "lineage": manifest.lineage,
                "version": manifest.version,
                "codec": manifest.codecs,
                "bytes": published.size_bytes,
                "full_bytes": manifest.full_bytes,
                "changed": round(published.changed_fraction, 4),
                "seconds": round(seconds, 3),
            },
        )
