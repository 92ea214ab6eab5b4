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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.tensor import DTensor

from millrace.config.sections.shared import CheckpointConfig
from millrace.decoding import Fields
from millrace.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidStateError,
    MillraceError,
    NotFoundError,
    UnavailableError,
)
from millrace.policies.tensors import DTYPE_TAGS
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.names import Names
from millrace.runlog.records.retirement import Retired
from millrace.runlog.records.run_record import checkpoint_at, list_checkpoints
from millrace.runlog.retention import record_retirement, remove_place
from millrace.storage.base import ObjectStore, find_newest, newest_revision, next_revision
from millrace.storage.scratch import owned_directory, scratch_errors
from millrace.telemetry import faults, progress
from millrace.telemetry.faults import Point
from millrace.telemetry.leftovers import Leftover
from millrace.telemetry.progress import Activity
from millrace.trainer.checkpoint.index import (
    INDEX_FILE,
    MAX_INDEX_BYTES,
    ShardIndex,
    ShardPiece,
    ShardTensor,
    decode_index,
    decode_tensors,
    encode_index,
    merge_tensors,
)
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
from millrace.trainer.model.mesh import held

logger = logging.getLogger(__name__)


# The files of a checkpoint in a local directory: one of each rank, raw elements tensor after tensor, and an index.
#
# A state is a flat dict of tensors by name. Of a sharded tensor every rank writes the rows that it holds; any other
# tensor is written by rank 0, except for random states, which every rank writes itself. Loading copies ranges of
# elements: the number of ranks may differ from that of the writers, and a rank reads only files with elements that it
# holds.

RANDOM_STATE = "rng."
"""Begins the names of tensors of which each rank has its own."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The elements of a tensor, from and to, that this rank holds or loads: whole rows."""

    start: int
    end: int


def save_shards(state: Mapping[str, torch.Tensor], directory: Path, *, gang: Gang) -> None:
    """Write this rank's part of `state` (tensors by name) as a file in `directory`, and on rank 0 the index.

    Collective.
    """

    def write() -> bytes:
        return encode_index(_write_all(state, directory, gang))

    rows = gang.agree(write)
    with agreed(gang), scratch_errors(directory):
        if gang.is_leader:
            shares = [decode_tensors(row, source=f"of rank {rank}") for rank, row in enumerate(rows)]
            (directory / INDEX_FILE).write_bytes(encode_index(merge_tensors(shares).values()))


def _write_all(state: Mapping[str, torch.Tensor], directory: Path, gang: Gang) -> list[ShardTensor]:
    """Write this rank's file, also if it has no tensor to write, and return the entries of what it wrote.

    Ranks that share layers gather the columns of each tensor in turn, which is collective: a rank that cannot write
    still takes part for all tensors, and raises at the end.
    """
    file: BinaryIO | None = None
    failure: BaseException | None = None
    written: list[ShardTensor] = []
    with contextlib.ExitStack() as opened:
        for name, tensor in state.items():
            local, start, is_mine = _rows(name, tensor, gang)
            if failure is not None or not is_mine:
                continue
            try:
                with scratch_errors(directory):
                    if file is None:
                        file = opened.enter_context(_open(directory, gang))
                    written.append(_write(name, tensor, local, start, file))
            except MillraceError as error:
                failure = error
        if file is None and failure is None:
            with scratch_errors(directory):
                opened.enter_context(_open(directory, gang))  # every rank has a file
        if failure is None:
            # Closed here, because the last flush may be what finds the disk full.
            with scratch_errors(directory):
                opened.close()
    if failure is not None:
        raise failure
    return written


def _open(directory: Path, gang: Gang) -> BinaryIO:
    """Create this rank's file in the directory, and open it for writing."""
    directory.mkdir(exist_ok=True)
    return (directory / f"rank-{gang.rank:05d}.bin").open("xb")


def _rows(name: str, tensor: torch.Tensor, gang: Gang) -> tuple[torch.Tensor, int, bool]:
    """Return this rank's rows of a tensor, their first element's row-major index, and whether this rank writes them.

    Collective where columns are split.
    """
    if not isinstance(tensor, DTensor):
        return tensor, 0, gang.is_leader or name.startswith(RANDOM_STATE)
    share = held(tensor, is_first_part=gang.layout.is_first_part(gang.rank))
    return share.rows(), share.start, share.writes


def needed_files(state: Mapping[str, torch.Tensor], index: ShardIndex) -> set[str]:
    """Return the names of the checkpoint's files that have elements which this rank holds of `state`.

    Raises InvalidStateError unless names, shapes and dtypes of `state` are exactly the saved ones: a missing tensor
    would silently keep its start value. Random states may be missing or left over, because there may be more or fewer
    ranks than wrote the checkpoint.
    """
    saved = {name for name in index if not name.startswith(RANDOM_STATE)}
    live = {name for name in state if not name.startswith(RANDOM_STATE)}
    if saved != live:
        raise _mismatch(f"missing {sorted(live - saved)[:5]}, left over {sorted(saved - live)[:5]}")
    files: set[str] = set()
    for name, tensor in state.items():
        if (entry := index.get(name)) is None:
            continue
        dtype = _tag(tensor)
        if (entry.shape, entry.dtype) != (tuple(tensor.shape), dtype):
            raise _mismatch(f"{name} is {entry.dtype}{list(entry.shape)}, the model's is {dtype}{list(tensor.shape)}")
        share = _range(tensor)
        files |= {piece.file for piece in entry.pieces if _overlap(piece, share) is not None}
    return files


def load_shards(state: Mapping[str, torch.Tensor], directory: Path, index: ShardIndex) -> None:
    """Fill what this rank has of `state` (tensors by name), in place, from a checkpoint's files in a directory.

    These are the `needed_files`, verified before. A tensor that the index lacks stays as it is. Raises UnavailableError
    if a file was cut short meanwhile.
    """
    for name, tensor in state.items():
        share, entry = _range(tensor), index.get(name)
        if entry is None or share.end == share.start:
            continue
        data = bytearray((share.end - share.start) * entry.element_bytes)
        for piece in entry.pieces:
            if (common := _overlap(piece, share)) is not None:
                _read(directory / piece.file, piece, common, share, memoryview(data), width=entry.element_bytes)
        found = torch.frombuffer(data, dtype=tensor.dtype)
        if isinstance(tensor, DTensor):
            mine = held(tensor)
            mine.fill(found.reshape(mine.shape))
        else:
            with torch.no_grad():
                tensor.copy_(found.reshape(tensor.shape))


def _range(tensor: torch.Tensor) -> _Range:
    """Return the range of a tensor's elements that this rank holds, with all columns."""
    if not isinstance(tensor, DTensor):
        return _Range(0, tensor.numel())
    share = held(tensor)
    return _Range(share.start, share.start + share.num_elements)


def _write(name: str, tensor: torch.Tensor, local: torch.Tensor, start: int, file: BinaryIO) -> ShardTensor:
    """Append `local`, this rank's part of `tensor` from element `start`, to `file`; return its entry for the index."""
    count, pieces = local.numel(), ()
    if count:
        pieces = (ShardPiece(Path(file.name).name, file.tell(), start, count),)
        file.write(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return ShardTensor(name=name, dtype=_tag(tensor), shape=tuple(tensor.shape), pieces=pieces)


def _overlap(piece: ShardPiece, share: _Range) -> tuple[int, int] | None:
    """Return the range [begin, end) of elements that a piece and this rank's share have in common; None if none."""
    begin, end = max(piece.start, share.start), min(piece.start + piece.count, share.end)
    return (begin, end) if begin < end else None


def _read(
    path: Path, piece: ShardPiece, common: tuple[int, int], share: _Range, data: memoryview, *, width: int
) -> None:
    """Read the elements `common` of a piece from the file `path` into `data`, which has the elements of `share`.

    `width` is the number of bytes of an element. Raises UnavailableError if the file was cut short.
    """
    begin, end = common
    target = data[(begin - share.start) * width : (end - share.start) * width]
    with path.open("rb", buffering=0) as file:
        file.seek(piece.offset + (begin - piece.start) * width)
        # An unbuffered read may return fewer bytes than asked for.
        while len(target):
            if not (count := file.readinto(target)):
                raise UnavailableError(
                    f"{path} was cut short after it had been verified",
                    reason="SCRATCH_UNUSABLE",
                    remedy="see what else writes to MILLRACE_SCRATCH_DIR",
                )
            target = target[count:]


def _tag(tensor: torch.Tensor) -> str:
    """Return torch's name of a tensor's dtype; raise InvalidStateError if checkpoints do not support it."""
    tag = str(tensor.dtype).removeprefix("torch.")
    if tag not in DTYPE_TAGS:
        raise InvalidStateError(
            f"checkpoints do not carry tensors of {tag} (known: {', '.join(DTYPE_TAGS)})",
            reason="TENSOR_DTYPE_UNKNOWN",
            remedy="train in float32 or bfloat16",
        )
    return tag


def _mismatch(what: str) -> InvalidStateError:
    """Make the error that a checkpoint's tensors are not those of the model."""
    return InvalidStateError(
        f"checkpoint tensors do not fit the model: {what}",
        reason="CHECKPOINT_MISMATCH",
        remedy="resume with the model that wrote the checkpoint",
    )


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
        """Take the checkpoints of a run.

        With `is_logged` a removal is recorded in the run's objects before it happens.
        """
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
        """Record that a step's checkpoint cannot be used.

        `prune` does not count it from then on, and `write` writes it again.
        """
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
        """Write what this rank holds of the state to local scratch, and return it for `commit` to upload.

        Collective in a gang. `step` is the version in `lineage`, and `chain_hash` that of the last batch trained.
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
        """Upload what `write` returned, commit it, and return its manifest; the local files are deleted.

        Collective in a gang. `gang` is that of the thread that calls. Every rank uploads its own files; rank 0 collects
        their hashes and writes the manifest when all are there. Raises ConflictError as `write` does.
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
        """Fill `state` (tensors by name) in place from a checkpoint. Collective in a gang.

        Every rank downloads and verifies its files before any rank writes an element: a CorruptObjectError, which every
        rank raises, leaves the state as it was.
        """
        with contextlib.ExitStack() as owned:
            with agreed(self._gang):
                directory = owned.enter_context(owned_directory("checkpoint"))
                index = self._read_index(manifest)
                self._fetch(manifest, needed_files(state, index), directory)
            with agreed(self._gang):
                load_shards(state, directory, index)

    def prune(self, config: CheckpointConfig) -> tuple[list[int], list[Leftover]]:
        """Delete checkpoints that the config does not keep; return their steps, and the objects that cannot be deleted.

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
        """Record which checkpoints the config does not keep any more, before the first of them is deleted.

        `steps` are those of all whole checkpoints, ascending; `keep_last` is how many of the newest are kept.
        """
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
        usable one has another `chain_hash` or `run_hash` than these, which are this trainer's.
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
        """Raise CorruptObjectError unless the object exists in the size that its entry says."""
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
        """Read the index of a checkpoint, and return its tensors by name; raise CorruptObjectError if it is damaged."""
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
        """Read an object whole; raise CorruptObjectError if it is missing."""
        try:
            return self._store.get(item.key, max_bytes=item.size_bytes)
        except NotFoundError as error:
            raise _damaged(
                f"checkpoint object {self._store.uri(item.key)} is missing", "CHECKPOINT_OBJECT_MISSING"
            ) from error

    def _fetch(self, manifest: CheckpointManifest, names: Collection[str], directory: Path) -> None:
        """Download the checkpoint's files with these names into `directory`, and verify size and sha256 of each.

        Raises CorruptObjectError if one is missing or differs.
        """
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
    """Upload this rank's files to keys that begin with `base`; return all ranks' objects, at every rank. Collective."""

    def upload() -> list[dict[str, Any]]:
        """Upload this rank's files, and return their entries as plain data."""
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
    """Raise CorruptObjectError unless `found`, the sha256 of what was read, is the entry's.

    `uri` is for the message.
    """
    if found != item.sha256:
        raise _damaged(
            f"checkpoint object {uri} has sha256 {found}, its manifest says {item.sha256}", "CHECKPOINT_HASH_MISMATCH"
        )


def _damaged(what: str, reason: str) -> CorruptObjectError:
    """Make the error of a checkpoint that cannot be used; `what` says why."""
    return CorruptObjectError(what, reason=reason, remedy=_REMEDY)


def _file_sha256(path: Path) -> str:
    """Return the sha256 (hex) of a file without holding the file in memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
