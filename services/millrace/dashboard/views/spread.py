"""Curves that no event has, from the rows of the index: rewards with their spread, staleness, lengths, shares."""

import threading

import numpy as np

from millrace.dashboard.index.columns import Columns
from millrace.dashboard.views.facts import thinned, within

QUANTILES = (0.1, 0.9)


class Spread:
    """The curves of one run. What an index has gained since the last look is added: a batch is whole in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_rows = 0
        self._curves: dict[str, list[list[float]]] = {}

    def curves(
        self, columns: Columns, *, points: int, first: int = 0, last: int | None = None
    ) -> dict[str, list[list[float]]]:
        """Name → [step, value, …] from one step to another; those of rewards have mean, low and high."""
        with self._lock:
            num_rows = columns.num_rows
            for name, curve in _curves(columns, columns.rows()[self._num_rows : num_rows]).items():
                self._curves.setdefault(name, []).extend(curve)
            self._num_rows = num_rows
            return {name: thinned(within(curve, first, last), points) for name, curve in self._curves.items()}


def _curves(columns: Columns, rows: np.ndarray) -> dict[str, list[list[float]]]:
    found: dict[str, list[list[float]]] = {}
    if not len(rows):
        return found
    names = columns.names

    def column(name: str) -> np.ndarray:
        return np.ascontiguousarray(rows[name])

    step = column("step")
    is_train = column("purpose") == names.find("purpose", "train")
    is_ok = column("status") == names.find("status", "ok")
    env, reward = column("env"), column("reward").astype(np.float64)
    for number, name in enumerate(names.by_kind.get("env", [])[:50]):
        mask = is_train & is_ok & (env == number)
        if mask.any():
            found[f"reward/{name}"] = _with_spread(step[mask], reward[mask])
    if (mask := is_train).any():
        found["rollouts/failed_share"] = _means(step[mask], (~is_ok[mask]).astype(np.float64))
    if (mask := is_train & is_ok).any():
        trained = column("trained")[mask].astype(np.float64)
        found["rollouts/trained_share"] = _means(step[mask], trained)
        found["length/sampled"] = _with_spread(step[mask], column("sampled")[mask].astype(np.float64))
        found["rollouts/truncated_share"] = _means(step[mask], column("truncated")[mask].astype(np.float64))
        oldest = column("version_min")[mask]
        known = oldest >= 0
        if known.any():
            found["staleness"] = _with_spread(step[mask][known], (step[mask] - oldest)[known].astype(np.float64))
    return found


def _bounds(step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Order by step, the steps, and where each begins in that order."""
    order = np.argsort(step, kind="stable")
    steps, starts = np.unique(step[order], return_index=True)
    return order, steps, starts


def _means(step: np.ndarray, values: np.ndarray) -> list[list[float]]:
    order, steps, starts = _bounds(step)
    means = np.add.reduceat(values[order], starts) / np.diff([*starts, len(step)])
    return [[int(at), float(mean)] for at, mean in zip(steps, means, strict=True)]


def _with_spread(step: np.ndarray, values: np.ndarray) -> list[list[float]]:
    order = np.lexsort((values, step))
    steps, starts = np.unique(step[order], return_index=True)
    ordered = values[order]
    counts = np.diff([*starts, len(step)])
    means = np.add.reduceat(ordered, starts) / counts
    low, high = (ordered[starts + ((counts - 1) * share).astype(int)] for share in QUANTILES)
    return [[int(at), *map(float, rest)] for at, *rest in zip(steps, means, low, high, strict=True)]
