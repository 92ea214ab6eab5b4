"""Continues from the newest checkpoint that is whole; one that is damaged is left aside, and said.

One that is whole but not of this trainer (other conditions, another base, other shapes) is no damage: resuming stops
and says what differs. But all checkpoints of a run are alike in that, so that one which differs while an older one fits
was changed, hashes and all: it is left aside, too.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from millrace.errors import CorruptObjectError, InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import load_step
from millrace.storage.base import ObjectStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Point
from millrace.trainer.checkpoint.manifest import Author, CheckpointManifest, require_same_base, require_same_conditions
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import restore_random_state, state_tensors
from millrace.trainer.learning.optimizer import PolicyOptimizer

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
        """What training goes on from, in words."""
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
    """Fill model and optimizer, and `more` tensors by name, from the newest checkpoint that is whole.

    If there is none they stay as they are. A strict `author` takes none that it would not have written itself.
    Collective in a gang.
    """

    def restore_one(manifest: CheckpointManifest) -> None:
        with agreed(gang):
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
    """The newest checkpoint (not above step `at_most`) that `use` takes; those behind it are damaged.

    `use` raises at every rank of a gang: CorruptObjectError for one that is damaged, InvalidStateError for one that is
    not of this trainer. Where none fits, the newest InvalidStateError is raised.
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
    else:
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
    """Fill model and optimizer, and `more`, from a checkpoint on the same base. Collective in a gang."""
    with agreed(gang):
        require_same_base(manifest, base_digest=base_digest)
    state = {**state_tensors(model, optimizer, gang=gang), **more}
    checkpoints.load(manifest, state)
    faults.reach(Point.TRAINER_MID_RESUME, step=manifest.step)
    restore_random_state(state, gang=gang)


def require_batches(store: ObjectStore, names: Names, found: Resumed, *, first: int, gang: Gang) -> None:
    """CorruptObjectError unless the batches that lead from step `first` to the damaged checkpoints are kept.

    Without damaged checkpoints nothing is looked at. Collective in a gang.
    """
    with agreed(gang):
        newest = found.damaged[0].step if found.damaged and gang.is_leader else first
        for step in range(first, newest):
            committed = load_step(store, names, step)
            if committed is None:
                break  # the log's end: a checkpoint behind it is not of this run
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
    """The damaged checkpoints, in words."""
    return "; ".join(f"checkpoint {each.step}: {each.why}" for each in found.damaged)


def _steps(checkpoints: CheckpointStore, *, gang: Gang, at_most: int | None) -> list[int]:
    """Steps with a checkpoint, the newest first, as rank 0 sees them."""
    steps = gang.from_leader(lambda: list(checkpoints.steps()))
    return sorted((step for step in steps if at_most is None or step <= at_most), reverse=True)


def _read(checkpoints: CheckpointStore, step: int, *, gang: Gang) -> CheckpointManifest:
    """A manifest as rank 0 reads it, at every rank."""
    data = gang.from_leader(lambda: checkpoints.read(step).to_bytes())
    return CheckpointManifest.from_bytes(data, source=f"of step {step}")


def _lost_chunk(store: ObjectStore, header: batch_pb2.BatchHeader) -> str | None:
    """Where a chunk of a batch should lie that is not there."""
    return next((store.uri(chunk.key) for chunk in header.chunks if store.head(chunk.key) is None), None)
