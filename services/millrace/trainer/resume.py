"""Continues from a checkpoint."""

from torch import nn

from millrace.telemetry import faults, logging
from millrace.telemetry.faults import Point
from millrace.trainer.checkpoint import (
    CheckpointManifest,
    CheckpointStore,
    require_same_base,
    require_same_conditions,
)
from millrace.trainer.distributed import Gang
from millrace.trainer.learner import restore_random_state, state_tensors
from millrace.trainer.optimizer import PolicyOptimizer

log = logging.getLogger(__name__)


def resume(
    checkpoints: CheckpointStore,
    model: nn.Module,
    optimizer: PolicyOptimizer,
    *,
    gang: Gang,
    run_hash: str,
    is_strict: bool,
    base_digest: str = "",
) -> CheckpointManifest | None:
    """Fills model and optimizer from the newest checkpoint and returns its manifest, or None if there is none."""
    told = gang.broadcast(_encode(checkpoints.newest()) if gang.is_leader else None)
    if not told:
        return None
    manifest = CheckpointManifest.from_bytes(told, source="newest checkpoint")
    if is_strict:
        require_same_conditions(manifest, world_size=gang.world_size, run_hash=run_hash)
    restore(checkpoints, manifest, model, optimizer, gang=gang, base_digest=base_digest)
    log.info("resumed", extra={"step": manifest.step, "bytes": manifest.size_bytes})
    return manifest


def restore(
    checkpoints: CheckpointStore,
    manifest: CheckpointManifest,
    model: nn.Module,
    optimizer: PolicyOptimizer,
    *,
    gang: Gang,
    base_digest: str = "",
) -> None:
    """Fills model and optimizer from a checkpoint, which must be on the same base. Collective in a gang."""
    require_same_base(manifest, base_digest=base_digest)
    state = state_tensors(model, optimizer, gang=gang)
    checkpoints.load(manifest, state)
    faults.reach(Point.TRAINER_MID_RESUME, step=manifest.step)
    restore_random_state(state, gang=gang)


def _encode(manifest: CheckpointManifest | None) -> bytes:
    return b"" if manifest is None else manifest.to_bytes()
