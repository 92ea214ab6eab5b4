"""Saves checkpoints while training goes on, and continues from the newest one that is whole.

A checkpoint that is whole but not of this trainer (other conditions, another base, other shapes) is not damaged:
resuming stops and says what differs. All checkpoints of a run are alike in that, though: one that differs while an
older one fits was changed together with its hashes, and is passed over like a damaged one.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from millrace.config.sections.shared import CheckpointConfig
from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import load_step
from millrace.storage.base import ObjectStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.background import BackgroundWork, BackgroundWriter
from millrace.trainer.checkpoint.manifest import (
    Author,
    CheckpointManifest,
    require_same_base,
    require_same_conditions,
    require_same_dataset,
)
from millrace.trainer.checkpoint.store import CheckpointStore, WrittenCheckpoint
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import restore_random_state, state_tensors
from millrace.trainer.learning.optimizer import PolicyOptimizer

# Saves checkpoints while the training goes on.
#
#     main thread    step n ─▶ publish version n + 1 ─▶ (waits for the checkpoint before) write to scratch ─▶ step n + 1
#     beside it                                                           upload, manifest, prune, report ─▶
#
# A checkpoint is the state at its step: what is uploaded later was written then. At most one is under way. With
# `save_async = false` the training waits for it.


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What was saved, where, and how long it took until it was durable."""

    step: int
    uri: str
    size_bytes: int
    seconds: float
    manifest_sha256: str


class Checkpointer(BackgroundWriter):
    """Saves at the interval, at the end and on request, and prunes.

    Used as a context manager around the training: leaving it waits for what is under way, or abandons it if the
    training failed. `on_saved` is called for every durable checkpoint, on the thread that uploaded it, and `on_left`
    with a message about each object that cannot be deleted.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        config: CheckpointConfig | None,
        *,
        gang: Gang,
        author: Author,
        on_saved: Callable[[SavedCheckpoint], None] = lambda _: None,
        on_left: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Save checkpoints as `config` says; None: the run has none. `author` goes into their manifests.

        `on_saved` is called for every durable checkpoint, on the thread that uploaded it, and `on_left` with a message
        about each object that cannot be deleted.
        """
        self._checkpoints = checkpoints
        self._config = config
        self._author = author
        self._on_saved = on_saved
        self._on_left = on_left
        self._reported: set[str] = set()
        self._work = BackgroundWork(gang=gang)
        self._is_async = config is not None and config.save_async
        self._uploading = gang.beside("checkpoints") if self._is_async else gang

    @property
    def is_enabled(self) -> bool:
        """Return whether the run has checkpoints at all."""
        return self._config is not None

    def is_due(self, step: int) -> bool:
        """Return whether the configured interval asks for a checkpoint of version `step`; False without an interval."""
        return self._config is not None and self._config.interval is not None and step % self._config.interval == 0

    def raise_failure(self) -> None:
        """Raise what saving in the background raised, if it has ended at every rank, without waiting.

        Collective in a gang.
        """
        self._work.finish_if_done()

    def save(
        self, state: dict[str, torch.Tensor], *, step: int, lineage: int, chain_hash: bytes, num_skipped: int = 0
    ) -> None:
        """Write `state` (tensors by name) to local scratch, then upload it in the background as checkpoint `step`.

        `step` is the policy version in `lineage`, `chain_hash` that of the last batch trained, and `num_skipped` the
        steps in a row that changed nothing. Waits first for the previous checkpoint, and raises what that raised.
        Without `save_async` the upload is waited for, too. Collective in a gang.
        """
        began = time.monotonic()
        self._work.finish()
        written = self._checkpoints.write(
            state, step=step, lineage=lineage, chain_hash=chain_hash, num_skipped=num_skipped, author=self._author
        )
        self._work.begin(f"checkpoint {step} to be saved", lambda: self._commit(written, began=began))
        if not self._is_async:
            self._work.finish()

    def _commit(self, written: WrittenCheckpoint, *, began: float) -> None:
        """Upload and commit a written checkpoint, report it, and delete those that retention does not keep.

        `began` is when saving began, in seconds of the monotonic clock.
        """
        manifest = self._checkpoints.commit(written, gang=self._uploading)
        saved = SavedCheckpoint(
            step=manifest.step,
            uri=self._checkpoints.uri(manifest.step),
            size_bytes=manifest.size_bytes,
            seconds=time.monotonic() - began,
            manifest_sha256=hashlib.sha256(manifest.to_bytes()).hexdigest(),  # canonical: the stored bytes
        )
        logger.info(
            "checkpoint saved", extra={"step": saved.step, "seconds": round(saved.seconds, 3), "uri": saved.uri}
        )
        self._on_saved(saved)
        if self._uploading.is_leader and self._config is not None:
            self._prune(self._config)

    def _prune(self, config: CheckpointConfig) -> None:
        """Delete checkpoints that retention does not keep; log a failure and pass it to `on_left`, raise nothing."""
        try:
            dropped, left = self._checkpoints.prune(config)
        except MillraceError as error:
            message = f"checkpoints that are no longer kept are looked for later: {error.message}"
            logger.warning(message)
            self._on_left(message)
            return
        for step in dropped:
            logger.info("checkpoint deleted", extra={"step": step})
        for leftover in left:
            if leftover.is_reportable and leftover.name not in self._reported:
                self._reported.add(leftover.name)
                self._on_left(str(leftover))


logger = logging.getLogger(__name__)

_NOTHING: Mapping[str, torch.Tensor] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A checkpoint that cannot be used, and why."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """What training goes on from: a checkpoint, or None, and the newer ones that are damaged, the newest first."""

    manifest: CheckpointManifest | None
    damaged: tuple[DamagedCheckpoint, ...] = ()

    @property
    def start(self) -> str:
        """Describe in words what training continues from."""
        return "the start of the run" if self.manifest is None else f"checkpoint {self.manifest.step}"


def resume(
    checkpoints: CheckpointStore,
    model: nn.Module,
    optimizer: PolicyOptimizer,
    *,
    gang: Gang,
    author: Author,
    more: Mapping[str, torch.Tensor] = _NOTHING,
) -> Resumed:
    """Fill model, optimizer and the tensors `more` from the newest whole checkpoint; return which one.

    The random generators are set as well. If there is no whole one all stays as it is, and the result has no manifest.
    `author` describes this trainer: a checkpoint needs its dataset and base, and, if it is strict, its conditions.
    Newer checkpoints that cannot be used are in the result, and noted as damaged in `checkpoints`. Raises
    InvalidStateError if checkpoints are whole, but none fits this trainer. Collective in a gang.
    """

    def restore_one(manifest: CheckpointManifest) -> None:
        """Fill the state from a checkpoint; raise InvalidStateError if it is not of this trainer."""
        with agreed(gang):
            require_same_dataset(manifest, dataset_digest=author.dataset_digest)
            if author.determinism == "strict":
                require_same_conditions(manifest, run_hash=author.run_hash, device=gang.device, rows=author.rows)
        restore(checkpoints, manifest, model, optimizer, gang=gang, base_digest=author.base_digest, more=more)

    found = first_whole(checkpoints, restore_one, gang=gang)
    if found.manifest is not None:
        logger.info("resumed", extra={"step": found.manifest.step, "bytes": found.manifest.size_bytes})
    return found


def first_whole(
    checkpoints: CheckpointStore,
    use: Callable[[CheckpointManifest], None],
    *,
    gang: Gang,
    at_most: int | None = None,
) -> Resumed:
    """Call `use` with the manifests of checkpoints, newest first, until it raises nothing; return that one.

    `use` raises CorruptObjectError for a damaged checkpoint and InvalidStateError for one that is not of this trainer,
    at every rank alike. Those are in the result, newest first, and are noted as damaged in `checkpoints`. If none is
    accepted, the newest InvalidStateError is raised; without any, `manifest` of the result is None. Steps after
    `at_most` are not tried. Collective in a gang.
    """
    damaged: list[DamagedCheckpoint] = []
    differing: list[InvalidStateError] = []
    for step in _steps(checkpoints, gang=gang, at_most=at_most):
        try:
            manifest = _read(checkpoints, step, gang=gang)
            use(manifest)
        except (CorruptObjectError, InvalidStateError) as error:
            logger.warning(
                "a checkpoint is not used; trying the one before", extra={"step": step, "error": error.message}
            )
            differing += [error] if isinstance(error, InvalidStateError) else []
            damaged.append(DamagedCheckpoint(step, error.message))
        else:
            break
    else:  # no checkpoint was accepted
        if differing:
            raise differing[0]
        manifest = None
    for each in damaged:
        checkpoints.note_damaged(each.step)
    return Resumed(manifest, tuple(damaged))


def restore(
    checkpoints: CheckpointStore,
    manifest: CheckpointManifest,
    model: nn.Module,
    optimizer: PolicyOptimizer,
    *,
    gang: Gang,
    base_digest: str = "",
    more: Mapping[str, torch.Tensor] = _NOTHING,
) -> None:
    """Fill model, optimizer and `more` in place from a checkpoint, and set the random generators. Collective in a gang.

    `base_digest` is that of the base model of adapters, or ""; raises InvalidStateError if it is not the checkpoint's.
    """
    with agreed(gang):
        require_same_base(manifest, base_digest=base_digest)
    state = {**state_tensors(model, optimizer, gang=gang), **more}
    checkpoints.load(manifest, state)
    faults.reach(Point.TRAINER_MID_RESUME, step=manifest.step)
    # The random states in `state` are copies that `load` has filled.
    restore_random_state(state, gang=gang)


def require_batches(store: ObjectStore, names: Names, found: Resumed, *, first: int, gang: Gang) -> None:
    """Raise CorruptObjectError if a chunk of a batch is missing that has to be trained again.

    Those are the batches from number `first` up to the newest damaged checkpoint: without damaged ones nothing is
    checked. Rank 0 reads the log. Collective in a gang.
    """
    with agreed(gang):
        newest = found.damaged[0].step if found.damaged and gang.is_leader else first
        for step in range(first, newest):
            committed = load_step(store, names, step)
            if committed is None:
                break  # the log's end: a checkpoint after it is not of this run
            header = decode_header(committed.revisions[-1])
            if (lost := _lost_chunk(store, header)) is not None:
                raise CorruptObjectError(
                    f"run {names.uid} cannot be continued from {found.start}: {lost} is missing. Newer checkpoints are "
                    f"damaged: {describe(found)}",
                    reason="CHECKPOINTS_DAMAGED",
                    remedy=f"restore one of the damaged checkpoints, or {lost}, from a replica of the bucket, then "
                    "`millrace run resume` the run",
                )


def describe(found: Resumed) -> str:
    """Return in words which checkpoints are damaged, and why each is."""
    return "; ".join(f"checkpoint {each.step}: {each.why}" for each in found.damaged)


def _steps(checkpoints: CheckpointStore, *, gang: Gang, at_most: int | None) -> list[int]:
    """Return the steps up to `at_most` (None: all) with a checkpoint, newest first, as rank 0 sees them. Collective."""
    steps = gang.from_leader(lambda: list(checkpoints.steps()))
    return sorted((step for step in steps if at_most is None or step <= at_most), reverse=True)


def _read(checkpoints: CheckpointStore, step: int, *, gang: Gang) -> CheckpointManifest:
    """Read the manifest of a checkpoint at rank 0, and return it at every rank. Collective."""
    data = gang.from_leader(lambda: checkpoints.read(step).to_bytes())
    return CheckpointManifest.from_bytes(data, source=f"of step {step}")


def _lost_chunk(store: ObjectStore, header: batch_pb2.BatchHeader) -> str | None:
    """Return the key of a missing chunk of a batch; None if all exist."""
    return next((store.uri(chunk.key) for chunk in header.chunks if store.head(chunk.key) is None), None)
