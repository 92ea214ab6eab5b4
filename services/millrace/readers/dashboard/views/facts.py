"""What a run's archived events say: the points of its metrics, and the events themselves."""

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from millrace.readers.dashboard.answers import of_message
from millrace.readers.dashboard.index import Columns
from millrace.readers.dashboard.query import StoreRefresh
from millrace.readers.exports.metrics import EventFollower, rows_of
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.v1 import event_pb2

FRESH_S = 1.0
MAX_EVENTS = 100_000
"""Of one run; the oldest are left out of pages, and stay in the log."""
MAX_POINTS = 2_000
"""Of one curve on one page; of more, each n-th and the last."""
_LOUD = ("warning", "rollouts_failed", "state_changed")


class RunFacts:
    """The events of one run, as far as they are archived. Any thread may ask."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        """Make the facts of a run, without events; a refresh of `looking` reads them."""
        self._follower = EventFollower(store, names)
        self._lock = threading.Lock()
        self._keys: set[str] = set()
        self._series: dict[str, dict[int, float]] = {}
        self._ended: dict[int, float] = {}
        self._began = math.inf
        self._events: deque[event_pb2.Event] = deque(maxlen=MAX_EVENTS)
        self._num_left_out = 0
        self._versions: dict[int, list[event_pb2.Event]] = {}
        self._checkpoints: dict[int, event_pb2.CheckpointSaved] = {}
        self.looking = StoreRefresh(self._look, fresh_s=FRESH_S)

    @property
    def names(self) -> list[str]:
        """Return the names of all metrics that events have, sorted."""
        with self._lock:
            return sorted(self._series)

    @property
    def events(self) -> list[event_pb2.Event]:
        """Return the run's events that are held, oldest first."""
        with self._lock:
            return list(self._events)

    @property
    def num_events(self) -> int:
        """Return the number of events that are held."""
        return len(self._events)

    def values(self, name: str) -> dict[int, float]:
        """Return a metric's values by step; of a step that was computed again, the first one."""
        with self._lock:
            return dict(self._series.get(name, {}))

    def is_done(self, step: int) -> bool:
        """Return whether an event says that the trainer has completed the step."""
        with self._lock:
            return step in self._series.get("reward/mean", ())

    @property
    def newest_version(self) -> int:
        """Return the newest policy version that an event names; 0 if none does."""
        with self._lock:
            return max(self._versions, default=0)

    def checkpoint_before(self, version: int) -> event_pb2.CheckpointSaved | None:
        """Return the event of the newest checkpoint at a version or before it; None without one."""
        with self._lock:
            return max(
                (saved for step, saved in self._checkpoints.items() if step <= version),
                key=lambda saved: saved.step,
                default=None,
            )

    def by_step(
        self, names: Sequence[str], *, first: int, size: int, most: int
    ) -> tuple[list[tuple[int, dict[str, float]]], int | None]:
        """Return values of metrics (of all, if no name is given) by step from `first` on, and the next step, None at
        the end.

        These are at most `size` steps with `most` values in all, and at least one step.
        """
        found: dict[int, dict[str, float]] = {}
        with self._lock:
            for name in sorted(names or self._series):
                for step, value in self._series.get(name, {}).items():
                    if step >= first:
                        found.setdefault(step, {})[name] = value
        rows: list[tuple[int, dict[str, float]]] = []
        num_values = 0
        for step in sorted(found):
            num_values += len(found[step])
            if rows and (len(rows) == size or num_values > most):
                return rows, step
            rows.append((step, found[step]))
        return rows, None

    def about(self, version: int) -> list[event_pb2.Event]:
        """Return the events that say that a policy version was published, or is served."""
        with self._lock:
            return list(self._versions.get(version, ()))

    def _look(self) -> None:
        """Read the events that were archived since the last look."""
        new = self._follower.read()
        with self._lock:
            for event in new:
                self._add(event)

    def _add(self, event: event_pb2.Event) -> None:
        """Keep an event, and add its metrics, versions and checkpoints to what is known."""
        # A full deque drops its oldest event for the new one.
        self._num_left_out += len(self._events) == MAX_EVENTS
        self._events.append(event)
        if event.HasField("time"):
            self._began = min(self._began, event.time.ToNanoseconds() / 1e9)
        if (version := _version(event)) is not None:
            self._versions.setdefault(version, []).append(event)
        if event.HasField("checkpoint_saved"):
            self._checkpoints[event.checkpoint_saved.step] = event.checkpoint_saved
        for row in rows_of(event):
            if row.key in self._keys:
                continue
            self._keys.add(row.key)
            if event.HasField("step_completed"):
                self._ended[row.step] = row.time
            for name, value in row.values.items():
                # The first value of a step stays: a resumed trainer reports it again.
                self._series.setdefault(name, {}).setdefault(row.step, value)

    def matching(self, wanted: Iterable[str]) -> list[str]:
        """Return the metrics whose names fit one of `wanted`, each once, in that order.

        A `*` in a name represents any text, slashes too.
        """
        known = self.names
        have = frozenset(known)
        found: dict[str, None] = {}
        for name in wanted:
            if "*" in name:
                found |= dict.fromkeys(each for each in known if _matches(each, name.split("*")))
            elif name in have:
                found[name] = None
        return list(found)

    def curves(
        self,
        wanted: Iterable[str] | None = None,
        *,
        points: int = MAX_POINTS,
        first: int = 0,
        last: int | None = None,
    ) -> dict[str, list[list[float]]]:
        """Return by name the points (step, value) of some metrics, or of all, from step `first` to `last` (None: the
        end).

        They are thinned to about `points` each. A `*` in a wanted name matches any text.
        """
        names = self.names if wanted is None else self.matching(wanted)
        return {
            name: thinned(
                within([[step, value] for step, value in sorted(self.values(name).items())], first, last), points
            )
            for name in names
        }

    def axes(self, steps: Iterable[int]) -> list[list[float]]:
        """Return [step, seconds since the first event, tokens trained on so far] for those of the steps that are
        done.
        """
        with self._lock:
            tokens, ended, began = dict(self._series.get("progress/tokens", {})), dict(self._ended), self._began
        done, total = sorted(ended), 0.0
        trained: dict[int, float] = {}
        for step in done:
            total += tokens.get(step, 0.0)
            trained[step] = total
        return [[step, round(max(0.0, ended[step] - began), 3), trained[step]] for step in sorted({*steps} & {*done})]

    def page(self, *, kinds: Sequence[str], before: str, size: int) -> dict[str, Any]:
        """Return at most `size` events of some kinds (none: of all), the newest first, and whether there are more.

        They are older than the event with the cursor `before`, unless that is empty. `left_out` in the answer is how
        many events are not held any more.
        """
        found: list[dict[str, Any]] = []
        is_behind = not before
        has_more = False
        for event in reversed(self.events):
            if not is_behind:
                is_behind = event.cursor == before
                continue
            kind = event.WhichOneof("body") or ""
            if kinds and kind not in kinds:
                continue
            if len(found) == size:
                has_more = True
                break
            found.append(event_json(event))
        return {"events": found, "has_more": has_more, "left_out": self._num_left_out}


def event_json(event: event_pb2.Event) -> dict[str, Any]:
    """Return an event as plain data: cursor, time, writer, kind, body, and whether people should see it."""
    kind = event.WhichOneof("body") or "unknown"
    return {
        "cursor": event.cursor,
        "time": event.time.ToNanoseconds() / 1e9,
        "writer": event.writer[:200],
        "kind": kind,
        "is_loud": kind in _LOUD,
        "body": of_message(getattr(event, kind)) if kind != "unknown" else {},
    }


def _version(event: event_pb2.Event) -> int | None:
    """Return the policy version that an event says was published or is served; None for other events."""
    match event.WhichOneof("body"):
        case "policy_published":
            return event.policy_published.version
        case "policy_served":
            return event.policy_served.version
        case _:
            return None


def _matches(name: str, parts: Sequence[str]) -> bool:
    """Return whether a name consists of these parts, in order, with any text between each two."""
    first, *middle, last = parts
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    at, end = len(first), len(name) - len(last)
    for part in middle:
        at = name.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def within(points: list[list[float]], first: int, last: int | None) -> list[list[float]]:
    """Return the points [step, …] from step `first` to step `last` (None: the end)."""
    return [point for point in points if first <= point[0] and (last is None or point[0] <= last)]


def thinned(points: list[list[float]], most: int) -> list[list[float]]:
    """Return about `most` of the points: each n-th, and the last one; all if they are fewer."""
    if len(points) <= most or most < 2:
        return points
    stride = -(-len(points) // most)
    return [*points[:-1:stride], points[-1]]


# Curves that no event has, from the rows of the index: rewards with their spread, staleness, lengths, shares.

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
        """Return by name the points [step, mean, low, high] or [step, mean] of a run's curves, thinned to about
        `points` each.

        They are from step `first` to `last` (None: the end). Rows that the index has gained since the last call are
        added.
        """
        with self._lock:
            num_rows = columns.num_rows
            for name, curve in _curves(columns, columns.rows()[self._num_rows : num_rows]).items():
                self._curves.setdefault(name, []).extend(curve)
            self._num_rows = num_rows
            return {name: thinned(within(curve, first, last), points) for name, curve in self._curves.items()}


def _curves(columns: Columns, rows: np.ndarray) -> dict[str, list[list[float]]]:
    """Return by name the curves of rows of the index: rewards, lengths and staleness with spread, and shares of
    rollouts.
    """
    found: dict[str, list[list[float]]] = {}
    if not len(rows):
        return found
    names = columns.names

    def column(name: str) -> np.ndarray:
        # A column of a structured array strides over whole rows: a copy makes the many masks below cheap.
        return np.ascontiguousarray(rows[name])

    step = column("step")
    is_train = column("purpose") == names.find("purpose", "train")
    is_ok = column("status") == names.find("status", "ok")
    env, reward = column("env"), column("reward").astype(np.float64)
    # A page shows at most 50 environments, however many the run has.
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
        # A sample of an external endpoint has no version (-1), hence no staleness.
        known = oldest >= 0
        if known.any():
            found["staleness"] = _with_spread(step[mask][known], (step[mask] - oldest)[known].astype(np.float64))
    return found


def _bounds(step: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the order of the rows by step, the distinct steps, and where each begins in that order.

    `step` has each row's.
    """
    order = np.argsort(step, kind="stable")
    steps, starts = np.unique(step[order], return_index=True)
    return order, steps, starts


def _means(step: np.ndarray, values: np.ndarray) -> list[list[float]]:
    """Return [step, mean of the values] for each step; `step` and `values` have one item per row."""
    order, steps, starts = _bounds(step)
    means = np.add.reduceat(values[order], starts) / np.diff([*starts, len(step)])
    return [[int(at), float(mean)] for at, mean in zip(steps, means, strict=True)]


def _with_spread(step: np.ndarray, values: np.ndarray) -> list[list[float]]:
    """Return [step, mean, 10 % quantile, 90 % quantile] for each step; `step` and `values` have one item per row."""
    order = np.lexsort((values, step))
    steps, starts = np.unique(step[order], return_index=True)
    ordered = values[order]
    counts = np.diff([*starts, len(step)])
    means = np.add.reduceat(ordered, starts) / counts
    low, high = (ordered[starts + ((counts - 1) * share).astype(int)] for share in QUANTILES)
    return [[int(at), *map(float, rest)] for at, *rest in zip(steps, means, low, high, strict=True)]
