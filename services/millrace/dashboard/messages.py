"""What the reader says, as the messages of the public API."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.v1 import lineage_pb2, metric_pb2, rollout_pb2
from millrace.v1 import run_service_pb2 as rs

Said = Mapping[str, Any]
"""A part of an answer of the reader: JSON."""
_RENAMED = {
    "stop": "stop_condition", "reason": "drop_reason", "tokens": "num_tokens", "sampled": "num_sampled_tokens",
    "turns": "num_turns", "version_min": "min_version", "version_max": "max_version",
}  # fmt: skip
"""Columns of the index that the API calls otherwise."""


def metrics_page(said: Said) -> rs.ListMetricsResponse:
    """A page of metrics; what JSON cannot say is NaN again."""
    rows: Sequence[tuple[int, Mapping[str, float | None]]] = said["steps"]
    steps = [
        metric_pb2.StepMetrics(
            step=step, values={name: math.nan if value is None else value for name, value in values.items()}
        )
        for step, values in rows
    ]
    return rs.ListMetricsResponse(steps=steps)


def rollouts_page(said: Said, *, run: str) -> rs.ListRolloutsResponse:
    """A page of rollouts of the run with this name."""
    return rs.ListRolloutsResponse(
        rollouts=[rollout(row, run=run) for row in said["samples"]],
        total_size=said["total"],
        unreadable=[rollout_pb2.UnreadableBatch(**each) for each in said["index"]["unreadable"]],
    )


def rollout(row: Said, *, run: str) -> rollout_pb2.Rollout:
    """A row of the index."""
    fields = {_RENAMED.get(name, name): value for name, value in row.items() if value is not None and name != "id"}
    return rollout_pb2.Rollout(name=f"runs/{run}/rollouts/{row['id']}", **fields)


def lineage(said: Said, *, run: str) -> rs.GetLineageResponse:
    """The lineage of a rollout, or of a version."""
    if "sample" in said:
        became = said["became"]
        found = lineage_pb2.RolloutLineage(
            rollout=rollout(said["sample"], run=run),
            made_by=[_version(each) for each in said["made_by"]],
            batch=_batch(said["step"]),
            became=None if became is None else _version(became),
        )
        return rs.GetLineageResponse(rollout=found)
    before, after = said["made_from"], said["next"]
    of_version = lineage_pb2.VersionLineage(
        version=_version(said["version"] | ({} if before is None else {"batch": before})),
        made_from=None if before is None else _rollouts(before, run=run),
        made=_rollouts(said["made"], run=run),
        trained_steps=said["made"]["steps"],
        next=_version(after) if after["is_known"] else None,
    )
    return rs.GetLineageResponse(version=of_version)


def _count(said: Said, name: str) -> int:
    """Return a count that may be null, or not be there: 0."""
    value = said.get(name)
    return 0 if value is None else value


def _version(said: Said) -> lineage_pb2.TracedVersion:
    batch, saved = said["batch"], said["checkpoint"]
    found = lineage_pb2.TracedVersion(
        version=said["version"],
        is_known=said["is_known"],
        num_tokens=_count(said, "tokens"),
        digest=said.get("digest", ""),
        uri=said.get("uri", ""),
        codec=said.get("codec", ""),
        size_bytes=said.get("size_bytes", 0),
        replicas=[each["replica"] for each in said["served"]],
        batch=None if batch is None else _batch(batch),
        checkpoint=None if saved is None else lineage_pb2.TracedCheckpoint(**saved),
    )
    if "published" in said:
        found.publish_time.FromNanoseconds(round(said["published"] * 1e9))
    return found


def _batch(said: Said) -> lineage_pb2.TracedBatch:
    return lineage_pb2.TracedBatch(
        step=said["step"],
        is_done=said["is_done"],
        key=said["key"],
        num_rollouts=said["rollouts"],
        num_trained=_count(said, "trained"),
        reward_mean=said.get("reward"),
        dropped=said.get("dropped_groups", {}),
        problem=said.get("problem", ""),
    )


def _rollouts(said: Said, *, run: str) -> lineage_pb2.TracedRollouts:
    return lineage_pb2.TracedRollouts(
        num_rollouts=said["num_samples"], rollouts=[rollout(row, run=run) for row in said["samples"]]
    )
