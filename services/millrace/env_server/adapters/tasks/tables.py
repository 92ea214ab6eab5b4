"""Task sets: ids of tasks and a digest of the whole set, by content.

The env-server owns the data. The orchestrator sees a count and a digest, so two env-servers that disagree about the
tasks (another version of the package, another seed) are noticed instead of mixed.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.rollouts.requests import TaskSet

# Hex digits of a task id: 64 bits, so a collision within a million tasks has a chance of about 3e-8.
TASK_ID_DIGITS = 16


def canonical_json(value: Any) -> bytes:
    """Canonical JSON: sorted keys, no spaces, UTF-8. What JSON cannot say is written as its type and repr."""
    text = json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        default=lambda thing: f"{type(thing).__name__}:{thing!r}",
    )
    return text.encode("utf-8", "surrogatepass")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTable(TaskSet):
    """The tasks of one set. `row` gives task i in the environment's own form."""

    row: Callable[[int], Any]


def build_task_table(num_tasks: int, *, row: Callable[[int], Any], content: Callable[[int], Any]) -> TaskTable:
    """Hash every task once. `content(i)` is what the task is, as plain data."""
    whole = hashlib.sha256()
    ids: list[str] = []
    for index in range(num_tasks):
        data = canonical_json(content(index))
        whole.update(data + b"\n")
        ids.append(hashlib.sha256(data).hexdigest()[:TASK_ID_DIGITS])
    return TaskTable(ids=ids, digest=whole.hexdigest(), row=row)


def no_tasks() -> TaskTable:
    """The empty set, of an environment without held-out tasks."""
    return build_task_table(0, row=lambda index: index, content=lambda index: index)
