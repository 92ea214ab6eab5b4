"""Task order: which task of which environment stands behind an ordinal.

A pure function of (seed, task-set digest, weights, ordinal), so that a new orchestrator draws the same tasks as the one
that died, without any stored cursor.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CYCLE_SLOTS = 1000
"""Ordinals after which the interleaving of environments repeats; bounds the error of a weight to 1/1000."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSource:
    """One environment as the task order sees it."""

    env: str
    num_tasks: int
    digest: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRef:
    """The task behind an ordinal."""

    ordinal: int
    env: str
    task_index: int


class TaskOrder:
    """Endless order over the tasks of several environments.

    Environments interleave by weight in a fixed cycle; within an environment every task is drawn once per epoch, in an
    order that is shuffled anew for each epoch.
    """

    def __init__(self, sources: Sequence[TaskSource], *, seed: int) -> None:
        if not sources:
            raise ValueError("a task order needs at least one environment")
        self._sources = tuple(sources)
        self._seed = seed
        self._cycle, self._ranks, self._counts = _interleave([source.weight for source in sources])
        self._permutation = lru_cache(maxsize=2 * len(sources))(self._draw_permutation)

    def task(self, ordinal: int) -> TaskRef:
        """Return the task behind `ordinal` (from 0)."""
        cycle_index, slot = divmod(ordinal, len(self._cycle))
        which = self._cycle[slot]
        draw = cycle_index * self._counts[which] + self._ranks[slot]
        source = self._sources[which]
        epoch, place = divmod(draw, source.num_tasks)
        return TaskRef(ordinal=ordinal, env=source.env, task_index=int(self._permutation(which, epoch)[place]))

    def _draw_permutation(self, which: int, epoch: int) -> np.ndarray:
        source = self._sources[which]
        material = f"{self._seed}/{source.env}/{source.digest}/{epoch}".encode()
        key = int.from_bytes(hashlib.sha256(material).digest()[:8], "little")
        return np.random.default_rng(key).permutation(source.num_tasks)


def _interleave(weights: Sequence[float]) -> tuple[list[int], list[int], list[int]]:
    """Spread sources over a cycle in proportion to their weights (stride scheduling).

    Returns, per slot, the source and how many slots of that source came before it; and, per source, its slots.
    """
    if len(weights) == 1:
        return [0], [0], [1]
    strides = [1.0 / weight for weight in weights]
    passes = [stride / 2 for stride in strides]
    cycle: list[int] = []
    ranks: list[int] = []
    counts = [0] * len(weights)
    for _ in range(CYCLE_SLOTS):
        which = min(range(len(passes)), key=lambda i: (passes[i], i))
        cycle.append(which)
        ranks.append(counts[which])
        counts[which] += 1
        passes[which] += strides[which]
    return cycle, ranks, [max(count, 1) for count in counts]
