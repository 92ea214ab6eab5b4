"""Checkpoints: checkpoint k is the state that is version k; the next batch is k.

    checkpoints/{step:08d}/e{epoch}-{nonce}/…    the files of every rank, and the index (`index.py`)
    checkpoints/{step:08d}/manifest.json         written last and create-only: its existence is the commit

A checkpoint that turned out to be damaged is written again when training comes past its step: under fresh names, with
`manifest.r1.json` as the commit (`base.py`). The damaged objects stay.
"""

import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from millrace.config.sections.shared import CheckpointConfig
from millrace.decoding import Fields
from millrace.errors import ConflictError, CorruptObjectError, NotFoundError
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired
from millrace.runlog.records.run_record import checkpoint_at, list_checkpoints
from millrace.runlog.retention import record_retirement, remove_place
from millrace.storage.base import ObjectStore, find_newest, newest_revision, next_revision
from millrace.storage.scratch import owned_directory
from millrace.telemetry import faults, progress
from millrace.telemetry.faults import Point
from millrace.telemetry.leftovers import Leftover
from millrace.telemetry.progress import Activity
from millrace.trainer.checkpoint.files import load_shards, needed_files, save_shards
from millrace.trainer.checkpoint.index import INDEX_FILE, MAX_INDEX_BYTES, ShardTensor, decode_index
from millrace.trainer.checkpoint.manifest import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    Author,
    CheckpointManifest,
    CheckpointObject,
    conditions,
    decode_checkpoint_object,
)
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang

logger = logging.getLogger(__name__)

_MAX_LEFT = 3  # objects that cannot be deleted, until a clean-up gives up for this time
_REMEDY = "the run resumes from the checkpoint before; `millrace run audit` says what else is damaged"


@dataclass(slots=True)
class WrittenCheckpoint:
    """A checkpoint that this rank has written to local scratch; with `shards` None it is committed already.

    `key` is that of the manifest, below `base` come the objects, and `owned` deletes the files.
    """

    manifest: CheckpointManifest
    key: str = ""
    base: str = ""
    shards: Path | None = None
    owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


class CheckpointStore:
    """The checkpoints of one run in the object store."""

    def __init__(self, store: ObjectStore, names: Names, *, gang: Gang, is_logged: bool = True) -> None:
        """Create it; `is_logged` says that a run's log has them, so that a record of it comes before a removal."""
        self._is_logged = is_logged
        self._store = store
        self._names = names
        self._gang = gang
        self._damaged: set[int] = set()

    def steps(self) -> Iterator[int]:
        """Yield the steps with a committed checkpoint, ascending; prefixes without a manifest are uncommitted
        uploads.
        """
        return list_checkpoints(self._store, self._names)

    def read(self, step: int) -> CheckpointManifest:
        """Read the manifest of a step; raise CorruptObjectError if it is damaged, missing or another step's."""
        key = newest_revision(self._store, self._key(step))
        try:
            manifest = CheckpointManifest.from_bytes(
                self._store.get(key, max_bytes=MAX_MANIFEST_BYTES), source=self._store.uri(key)
            )
        except NotFoundError as error:
            raise _damaged(f"checkpoint manifest {self._store.uri(key)} is missing", "CHECKPOINT_MISSING") from error
        if (manifest.run_uid, manifest.step) != (self._names.uid, step):
            raise _damaged(
                f"checkpoint manifest {self._store.uri(key)} is that of step {manifest.step} of run {manifest.run_uid}",
                "CHECKPOINT_MANIFEST_INVALID",
            )
        return manifest

    def uri(self, step: int) -> str:
        """Return the URI of a step's manifest."""
        return self._store.uri(newest_revision(self._store, self._key(step)))

    def note_damaged(self, step: int) -> None:
        """Note that a step's checkpoint cannot be used: `prune` does not count it, and `write` writes it again."""
        self._damaged.add(step)

    def write(
        self,
        state: dict[str, torch.Tensor],
        *,
        step: int,
        lineage: int,
        chain_hash: bytes,
        author: Author,
        num_skipped: int = 0,
    ) -> "WrittenCheckpoint":
        """Write what every rank holds of the state to its local scratch; `commit` uploads it. Collective in a gang.

        Writes nothing if the step's checkpoint exists and has the same `chain_hash`. Raises ConflictError if the one
        that exists is of another history or config.
        """

        def look() -> list[str]:
            key, found = self._look(step, chain_hash=chain_hash, run_hash=author.run_hash)
            return [key, "" if found is None else found.to_bytes().decode(), secrets.token_hex(6)]

        key, existing, nonce = self._gang.from_leader(look)
        if existing:
            return WrittenCheckpoint(
                CheckpointManifest.from_bytes(existing.encode(), source=f"of step {step}, from rank 0")
            )
        manifest = CheckpointManifest(
            format=FORMAT,
            run_uid=self._names.uid,
            run_hash=author.run_hash,
            step=step,
            lineage=lineage,
            chain_hash=chain_hash.hex(),
            epoch=author.epoch,
            world_size=self._gang.world_size,
            determinism=author.determinism,
            conditions=conditions(self._gang.device, rows=author.rows),
            objects=(),
            created=datetime.now(UTC).isoformat(timespec="milliseconds"),
            base_digest=author.base_digest,
            num_skipped=num_skipped,
            dataset_digest=author.dataset_digest,
        )
        with contextlib.ExitStack() as owned:
            with agreed(self._gang):
                # Of each rank's own, so that it holds only what this rank wrote, also where ranks share a machine.
                shards = owned.enter_context(owned_directory("checkpoint")) / "shards"
            save_shards(state, shards, gang=self._gang)
            base = f"{self._names.checkpoint(step)}e{author.epoch:08d}-{nonce}/"
            return WrittenCheckpoint(manifest, key=key, base=base, shards=shards, owned=owned.pop_all())

    def commit(self, written: "WrittenCheckpoint", *, gang: Gang) -> CheckpointManifest:
        """Upload what was written and commit it; `gang` is that of the thread that calls. Collective in a gang.

        Every rank uploads its own files; rank 0 collects their hashes and writes the manifest when all are there. The
        local files are deleted. Raises ConflictError as `write` does.
        """
        if written.shards is None:
            return written.manifest
        with written.owned:
            objects = _upload(self._store, written.shards, base=written.base, step=written.manifest.step, gang=gang)
            manifest = replace(written.manifest, objects=objects)
            with agreed(gang):
                if gang.is_leader and not self._store.create(written.key, manifest.to_bytes()):
                    # Another writer committed the same step first; our objects are collected later.
                    manifest = self._require_ours(
                        self.read(manifest.step),
                        chain_hash=bytes.fromhex(manifest.chain_hash),
                        run_hash=manifest.run_hash,
                    )
        self._damaged.discard(manifest.step)
        return manifest

    def load(self, manifest: CheckpointManifest, state: dict[str, torch.Tensor]) -> None:
        """Fill `state` in place from a checkpoint. Collective in a gang.

        Every rank downloads and verifies its files before any rank writes an element: a CorruptObjectError, which
        every rank raises, leaves the state as it was.
        """
        with contextlib.ExitStack() as owned:
            with agreed(self._gang):
                directory = owned.enter_context(owned_directory("checkpoint"))
                index = self._read_index(manifest)
                self._fetch(manifest, needed_files(state, index), directory)
            with agreed(self._gang):
                load_shards(state, directory, index)

    def prune(self, config: CheckpointConfig) -> tuple[list[int], list[Leftover]]:
        """Delete checkpoints that the config does not keep; return the steps deleted, and the objects that stay.

        Does nothing without `keep_last`. Checkpoints known to be damaged are neither counted nor deleted. Remains of
        earlier deletions, and of uploads that were never committed, are deleted up to the newest step. Stops after
        `_MAX_LEFT` objects that cannot be deleted. Raises what listing raises.
        """
        if config.keep_last is None:
            return [], []
        steps = [step for step in self.steps() if step not in self._damaged]
        kept = set(steps[-config.keep_last :]) | self._damaged
        kept |= {step for step in steps if config.keep_interval and step % config.keep_interval == 0}
        if self._is_logged and not kept.issuperset(steps):
            self._retire(steps, config, keep_last=config.keep_last)
        dropped, left = list[int](), list[Leftover]()
        for prefix in list(self._store.list_prefixes(self._names.checkpoints)):
            step = checkpoint_at(self._names, prefix)
            if step is None or step in kept or step > max(steps, default=-1):
                continue
            if config.keep_interval and step % config.keep_interval == 0:  # damaged ones, too
                continue
            stays = remove_place(self._store, self._names, KeptAs.CHECKPOINTS, step=step)
            left += stays
            if not stays:
                dropped.append(step)
            if len(left) >= _MAX_LEFT:
                break
        return dropped, left

    def _retire(self, steps: Sequence[int], config: CheckpointConfig, *, keep_last: int) -> None:
        """Record which of the whole checkpoints the config gives up, before the first of them goes."""
        below = steps[-keep_last:][0]
        at_interval = (step for step in steps if config.keep_interval and step % config.keep_interval == 0)
        keeps = frozenset(step for step in (*at_interval, *self._damaged) if step < below)
        why = f"ckpt.keep_last = {keep_last}"
        wanted = {KeptAs.CHECKPOINTS: Retired(below=below, keeps=keeps, why=why)}
        record_retirement(self._store, self._names, wanted, by="trainer")
        faults.reach(Point.TRAINER_RETIRED, step=below)

    def _key(self, step: int) -> str:
        return self._names.checkpoint_manifest(step)

    def _look(self, step: int, *, chain_hash: bytes, run_hash: str) -> tuple[str, CheckpointManifest | None]:
        """Return the manifest key to commit a step under, and the usable checkpoint that is committed there, or None.

        A damaged checkpoint counts as None, and the key is then that of its next revision. Raises ConflictError if a
        usable one is of another history or config.
        """
        if (key := find_newest(self._store, self._key(step))) is None:
            return self._key(step), None
        try:
            manifest = self.read(step)
            if step not in self._damaged:
                self._require_objects(manifest)
        except CorruptObjectError as error:
            logger.warning("a damaged checkpoint is written again", extra={"step": step, "error": error.message})
            return next_revision(self._store, key), None
        if step in self._damaged:  # whatever it says
            return next_revision(self._store, key), None
        return key, self._require_ours(manifest, chain_hash=chain_hash, run_hash=run_hash)

    def _require_objects(self, manifest: CheckpointManifest) -> None:
        """Raise CorruptObjectError unless every object exists in the size that the manifest gives."""
        for item in manifest.objects:
            self._require_object(item)

    def _require_object(self, item: CheckpointObject) -> None:
        found = self._store.head(item.key)
        where = f"checkpoint object {self._store.uri(item.key)}"
        if found is None:
            raise _damaged(f"{where} is missing", "CHECKPOINT_OBJECT_MISSING")
        if found.size_bytes != item.size_bytes:
            raise _damaged(
                f"{where} has {found.size_bytes} bytes, its manifest says {item.size_bytes}",
                "CHECKPOINT_OBJECT_TRUNCATED",
            )

    def _read_index(self, manifest: CheckpointManifest) -> dict[str, ShardTensor]:
        """Read the index of a checkpoint and check it against the manifest."""
        files = {item.name: item for item in manifest.objects}
        item = files.pop(INDEX_FILE, None)
        source = f"of checkpoint {manifest.step} of run {manifest.run_uid}"
        if item is None or item.size_bytes > MAX_INDEX_BYTES:
            problem = "has no index" if item is None else f"has an index of {item.size_bytes} bytes"
            raise _damaged(f"the manifest {source} {problem}", "CHECKPOINT_MANIFEST_INVALID")
        self._require_object(item)
        data = self._get(item)
        _require_hash(hashlib.sha256(data).hexdigest(), item, uri=self._store.uri(item.key))
        return decode_index(
            data, sizes={name: file.size_bytes for name, file in files.items()}, source=self._store.uri(item.key)
        )

    def _get(self, item: CheckpointObject) -> bytes:
        try:
            return self._store.get(item.key, max_bytes=item.size_bytes)
        except NotFoundError as error:
            raise _damaged(
                f"checkpoint object {self._store.uri(item.key)} is missing", "CHECKPOINT_OBJECT_MISSING"
            ) from error

    def _fetch(self, manifest: CheckpointManifest, names: Collection[str], directory: Path) -> None:
        """Download the files of these names into `directory`, and verify size and sha256 of each."""
        wanted = [item for item in manifest.objects if item.name in names]
        size = sum(item.size_bytes for item in wanted)
        with progress.work(Activity.RESTORE, f"checkpoint {manifest.step}", total=size, waits_on="object store"):
            for item in wanted:
                self._require_object(item)  # before the disk is filled with what is not ours
                path = directory / item.name
                try:
                    self._store.get_file(item.key, path)
                except NotFoundError as error:
                    raise _damaged(
                        f"checkpoint object {self._store.uri(item.key)} is missing", "CHECKPOINT_OBJECT_MISSING"
                    ) from error
                _require_hash(_file_sha256(path), item, uri=self._store.uri(item.key))

    def _require_ours(self, manifest: CheckpointManifest, *, chain_hash: bytes, run_hash: str) -> CheckpointManifest:
        """Return `manifest`; raise ConflictError unless it has this trainer's chain hash and run hash."""
        expected = {"chain_hash": chain_hash.hex(), "run_hash": run_hash}
        wrong = {name: [found, ours] for name, ours in expected.items() if (found := getattr(manifest, name)) != ours}
        if wrong:
            raise ConflictError(
                f"checkpoint {manifest.step} of run {manifest.run_uid} exists with another history (found, expected): "
                f"{json.dumps(wrong)}",
                reason="CHECKPOINT_CONFLICT",
                remedy=f"two trainers disagree: find out which log is the run's, then delete {self.uri(manifest.step)} "
                "if it is not that one's",
            )
        return manifest


def _upload(store: ObjectStore, shards: Path, *, base: str, step: int, gang: Gang) -> tuple[CheckpointObject, ...]:
    """Upload this rank's files; return the objects of all ranks, at every rank. Collective in a gang."""

    def upload() -> list[dict[str, Any]]:
        mine: list[dict[str, Any]] = []
        paths = sorted(shards.iterdir())
        size = sum(path.stat().st_size for path in paths)
        with progress.work(Activity.SAVE, f"checkpoint {step}", total=size, waits_on="object store"):
            for path in paths:
                key = base + path.name
                store.put_file(key, path)
                faults.reach(Point.TRAINER_MID_CHECKPOINT, step=step)
                sha256, size_bytes = _file_sha256(path), path.stat().st_size
                mine.append({"name": path.name, "key": key, "sha256": sha256, "size_bytes": size_bytes})
        return mine

    return tuple(decode_checkpoint_object(Fields(row)) for share in gang.agree(upload) for row in share)


def _require_hash(found: str, item: CheckpointObject, *, uri: str) -> None:
    if found != item.sha256:
        raise _damaged(
            f"checkpoint object {uri} has sha256 {found}, its manifest says {item.sha256}", "CHECKPOINT_HASH_MISMATCH"
        )


def _damaged(what: str, reason: str) -> CorruptObjectError:
    return CorruptObjectError(what, reason=reason, remedy=_REMEDY)


def _file_sha256(path: Path) -> str:
    """Return the sha256 (hex) of a file without holding the file in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
