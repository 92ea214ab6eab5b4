"""A run that trains adapters publishes version 0 in full, and every later one as an adapter on that."""

from collections.abc import Callable
from dataclasses import asdict

from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.policies.adapter import AdapterSpec
from millrace.policies.fetch import read_manifest
from millrace.policies.manifest import AdapterEntry, FileEntry, PolicyManifest, PolicyPlace
from millrace.policies.publishing.publish import PolicyContents, publish_policy
from millrace.policies.verify import damage_of
from millrace.storage.commit_points import find_newest, next_revision
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.learning.learner import Learner, digest_of
from millrace.trainer.model.published import policy_tensors
from millrace.trainer.publish.target import PublishTarget


class AdapterBase:
    """What the adapters of a run are on: version 0. Every rank of a gang has one.

    `upload_files` uploads the small files and `tell_mended` is told, at rank 0,
    what was damaged and where the base is published anew.
    """

    def __init__(
        self,
        learner: Learner,
        adapter: AdapterSpec,
        target: PublishTarget,
        *,
        upload_files: Callable[[], tuple[FileEntry, ...]],
        tell_mended: Callable[[str, str], None],
    ) -> None:
        self._model = learner.model
        self._dtype = learner.publish_dtype
        self._base_digest = learner.base_digest
        self._adapter = adapter
        self._store = target.store
        self._names = target.names
        self._gang = target.gang
        self._epoch = target.epoch
        self._upload_files = upload_files
        self._tell_mended = tell_mended
        self._entry: AdapterEntry | None = None

    def entry(self) -> AdapterEntry:
        """What an adapter's manifest says of it. Collective, and behind version 0, at the first call."""
        if self._entry is None:
            self.require_whole(is_thorough=False)
        assert self._entry is not None
        return self._entry

    def require_whole(self, *, is_thorough: bool) -> None:
        """Publish the base, in full, if it is damaged or, in a fork, not there yet. Collective in a gang.

        Only if `is_thorough` are its data objects read; its manifest always is. CorruptObjectError if other weights are
        published, InvalidStateError if what is damaged cannot be made again.
        """
        published: list[PolicyManifest | None] = []

        def look() -> list[str] | None:
            manifest, key, damage = self._look(is_thorough=is_thorough)
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
        """The base as it is published; None with the key to publish it under, and what is damaged, if that has to be.

        A fork has no version 0: its copy has a place of its own, because what lies under policies/ is announced.
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
        """Write the base under a key; None at ranks other than 0."""
        held = []
        for tensor in policy_tensors(self._model, dtype=self._dtype, version=0):  # collective where it is consumed
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
                    self._tell_mended(damage, self._store.uri(manifest.key))
        return manifest

    @property
    def _copy(self) -> str:
        """In place of the run's uid: where the copy of a fork's base lies."""
        return f"{self._names.uid}/base"

    def _require_same(self, manifest: PolicyManifest) -> None:
        if manifest.digest != self._base_digest:
            raise CorruptObjectError(
                f"the base of run {self._names.uid} has digest {manifest.digest} as published, and this trainer's "
                f"base has {self._base_digest}",
                reason="POLICY_BASE_DIFFERS",
                remedy="give the trainer the model that the run began with, under trainer.model.name",
            )
