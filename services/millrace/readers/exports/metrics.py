"""The metrics that a run's events hold, by name and step. The names and units are in docs/metrics.md."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from millrace.errors import CorruptObjectError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, decode_header
from millrace.runlog.event_archive import ArchiveFollower, readable_event
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.storage.base import find_newest
from millrace.v1 import event_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """What one fact of the log says at one step."""

    key: str
    """The fact, such as `step/17`: the same in every repetition of its event."""
    step: int
    time: float
    """When its event was written, in seconds since 1970."""
    values: dict[str, float] = field(default_factory=dict)


def rows_of(event: event_pb2.Event) -> list[MetricRow]:
    """Return an event's metrics as one row with all values; empty if the event is not about a step."""
    kind = event.WhichOneof("body")
    found = _READERS[kind](event) if kind in _READERS else None
    if found is None:
        return []
    key, step, values = found
    return [MetricRow(key=key, step=step, time=event.time.ToNanoseconds() / 1e9, values=values)]


def points(rows: Iterable[MetricRow]) -> Iterator[tuple[str, int, float]]:
    """Yield (metric, step, value) of all rows, each metric once per step: the first value counts."""
    seen: set[tuple[str, int]] = set()
    for row in rows:
        for name, value in row.values.items():
            if (name, row.step) not in seen:
                seen.add((name, row.step))
                yield name, row.step, value


def header_values(header: batch_pb2.BatchHeader) -> dict[str, float]:
    """Return metrics by name from a batch's header: rewards and shares by environment, and lengths of the samples.

    Empty without samples.
    """
    if not header.samples:
        return {}
    rewards: dict[tuple[int, int, int], tuple[int, float]] = {}
    for entry in header.samples:
        rewards[entry.ordinal, entry.member, entry.attempt] = (entry.env, entry.reward)
    by_env: dict[str, list[float]] = defaultdict(list)
    for env, reward in rewards.values():
        by_env[header.envs[env]].append(reward)
    lengths = [entry.length for entry in header.samples]
    values = {
        "seq_len/mean": sum(lengths) / len(lengths),
        "seq_len/max": float(max(lengths)),
        "seq_len/min": float(min(lengths)),
    }
    for env, found in sorted(by_env.items()):
        values[f"reward/{env}"] = sum(found) / len(found)
        values[f"batch/{env}"] = len(found) / len(rewards)
    return values


_Found = tuple[str, int, dict[str, float]]


def _step(event: event_pb2.Event) -> _Found:
    """Return the row's key (`step/<step>`), its step and the metrics of a completed step."""
    body = event.step_completed
    values = dict(body.metrics) | {
        "reward/mean": body.reward_mean,
        "batch/off_policy_level/mean": body.staleness_mean,
        "batch/off_policy_level/max": float(body.staleness_max),
        "progress/tokens": float(body.num_tokens),
        "progress/samples": float(body.num_rollouts),
        "time/step": body.step_seconds,
        "time/wait_for_batch": body.wait_seconds,
    }
    return f"step/{body.step}", body.step, values


def _batch(event: event_pb2.Event) -> _Found:
    """Return the row's key (`batch/<step>`), its step and the metrics of a committed batch."""
    body = event.batch_committed
    values = dict(body.metrics) | {
        "batch/trained_groups": float(body.num_trained),
        "batch/dropped_groups": float(sum(body.dropped.values())),
        **{f"batch/dropped/{reason}": float(count) for reason, count in sorted(body.dropped.items())},
        **{f"batch/filtered/{kind}": float(count) for kind, count in sorted(body.filtered.items())},
    }
    pools = {"easy": body.num_easy_tasks, "normal": body.num_normal_tasks, "hard": body.num_hard_tasks}
    if any(pools.values()):
        values |= {f"pool/{name}": float(count) for name, count in pools.items()}
    return f"batch/{body.step}", body.step, values


def _eval(event: event_pb2.Event) -> _Found:
    """Return the row's key (`eval/<env>/<step>`), its step and the metrics of an evaluation."""
    body = event.eval_completed
    prefix = f"eval/{body.env}"
    values = {
        f"{prefix}/reward/mean": body.reward_mean,
        f"{prefix}/num_rollouts": float(body.num_rollouts),
        f"{prefix}/num_failed": float(body.num_failed),
        f"{prefix}/policy_version": float(body.policy_version),
        f"{prefix}/policy_version_max": float(body.policy_version_max),
        f"{prefix}/num_skipped": float(len(body.skipped)),
        f"{prefix}/seconds": body.seconds,
        **{f"{prefix}/{_place(name)}{name}": value for name, value in sorted(body.metrics.items())},
    }
    return f"{prefix}/{body.step}", body.step, values


def _place(name: str) -> str:
    """Return where in an evaluation's names a figure is: pass@k and pass^k as in prime-rl, the others below
    `metrics/`.
    """
    return "" if name.startswith(("pass@", "pass^")) else "metrics/"


def _published(event: event_pb2.Event) -> _Found:
    """Return the row's key (`published/<version>`), the version as its step, and the metrics of a published policy."""
    body = event.policy_published
    values = {
        "policy/published_bytes": float(body.size_bytes),
        "policy/publish_seconds": body.seconds,
        "policy/changed_fraction": body.changed_fraction,
    }
    return f"published/{body.version}", body.version, values


def _served(event: event_pb2.Event) -> _Found:
    """Return the row's key (`served/<version>`), the version as its step, and the metrics of a policy that a replica
    serves.
    """
    body = event.policy_served
    values = {
        "time/update_weights": body.update_seconds,
        "policy/pause_seconds": body.pause_seconds,
        "policy/fetched_bytes": float(body.fetched_bytes),
    }
    return f"served/{body.version}", body.version, values


def _checkpoint(event: event_pb2.Event) -> _Found:
    """Return the row's key (`checkpoint/<step>`), its step and the metrics of a saved checkpoint."""
    body = event.checkpoint_saved
    return f"checkpoint/{body.step}", body.step, {"checkpoint/size_bytes": float(body.size_bytes)}


def _score(event: event_pb2.Event) -> _Found:
    """Return the row's key (`score/<version>`), the version as its step, and the metrics of the trainer's scores of the
    final evaluation.
    """
    body = event.score_completed
    values = {"score/mismatch_kl": body.mismatch_kl, "score/max_abs_logprob_diff": body.max_abs_logprob_diff}
    return f"score/{body.version}", body.version, values


_READERS = {
    "step_completed": _step,
    "batch_committed": _batch,
    "eval_completed": _eval,
    "policy_published": _published,
    "policy_served": _served,
    "checkpoint_saved": _checkpoint,
    "score_completed": _score,
}


# Reads the metrics of a run from its archived events: no server, no Redis, the same answer for everybody.


class EventFollower:
    """The archived events of a run, in the order of the log, each once. Blocking; of one thread."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._archive = ArchiveFollower(store, names)
        self._newest: dict[str, int] = {}

    def read(self) -> list[event_pb2.Event]:
        """Return the events of the run that were archived since the last call (blocking); what is damaged is left out.

        The first call returns all.
        """
        found = []
        for entry in self._archive.read():
            event = readable_event(entry)
            # A log that was rebuilt holds what came before under new cursors, with the numbers of its writers.
            if event is not None and event.writer_sequence > self._newest.get(event.writer, 0):
                self._newest[event.writer] = event.writer_sequence
                found.append(event)
        return found


class MetricFollower:
    """The metric rows of a run, each fact once: of a step that was computed again, the first values stay.

    The archive only grows at its end, so the n-th row is the same for everybody who reads it, whenever.
    """

    def __init__(self, store: ObjectStore, names: Names) -> None:
        """Begin before the run's first event; nothing is read yet."""
        self._store = store
        self._names = names
        self._events = EventFollower(store, names)
        self._pending: list[MetricRow] = []
        self._keys: set[str] = set()
        self.terminal: event_pb2.Event | None = None
        """The event that ended the run, if it has been read and the run was not reopened after it."""

    def read(self, *, on_event: Callable[[event_pb2.Event], None] | None = None) -> list[MetricRow]:
        """Return the metric rows that were archived since the last call (blocking); the first call returns all.

        After an error nothing is lost: call again. `on_event` gets every new event.
        """
        for event in self._events.read():
            if event.HasField("state_changed"):
                self.terminal = event if event.state_changed.chain_hash else None
            if on_event is not None:
                on_event(event)
            for row in rows_of(event):
                if row.key not in self._keys:
                    self._keys.add(row.key)
                    self._pending.append(row)
        # If a header cannot be read, the rows stay pending.
        found = [self._with_header(row) for row in self._pending]
        self._pending = []
        return found

    def _with_header(self, row: MetricRow) -> MetricRow:
        """Return a row with the metrics of its batch's header added, if it is a batch's and the header can be read."""
        if not row.key.startswith("batch/"):
            return row
        header = read_header(self._store, self._names, row.step)
        return row if header is None else replace(row, values=row.values | header_values(header))


def read_metrics(store: ObjectStore, names: Names) -> list[MetricRow]:
    """Return every metric row that the store has of a run, in the order of the log (blocking)."""
    return MetricFollower(store, names).read()


def read_header(store: ObjectStore, names: Names, step: int) -> batch_pb2.BatchHeader | None:
    """Return the newest header of a step (blocking).

    None if there is none, or it is damaged, which an audit reports.
    """
    key = find_newest(store, names.batch_header(step))
    if key is None:
        return None
    try:
        return decode_header(store.get(key, max_bytes=MAX_HEADER_BYTES))
    except CorruptObjectError:
        return None
