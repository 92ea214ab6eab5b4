"""Lists of messages as columns of plain values: `pandas.DataFrame(columns)` takes them as they are."""

from collections.abc import Sequence
from typing import Any

from millrace.v1 import metric_pb2, rollout_pb2

Columns = dict[str, list[Any]]
"""Lists of equal length by name; None is a value that is not there."""


def metric_columns(steps: Sequence[metric_pb2.StepMetrics]) -> Columns:
    """A row for each step: `step`, then the metrics by name."""
    names = sorted({name for each in steps for name in each.values})
    values = [dict(each.values) for each in steps]
    return {"step": [each.step for each in steps]} | {name: [row.get(name) for row in values] for name in names}


def rollout_columns(rollouts: Sequence[rollout_pb2.Rollout]) -> Columns:
    """A row for each rollout: `id`, then the fields of the message."""
    columns: Columns = {"id": [each.name.rpartition("/")[2] for each in rollouts]}
    for field in rollout_pb2.Rollout.DESCRIPTOR.fields:
        if field.name != "name":
            is_there = (lambda each, name=field.name: each.HasField(name)) if field.has_presence else lambda each: True
            columns[field.name] = [getattr(each, field.name) if is_there(each) else None for each in rollouts]
    return columns
