"""Reads the metrics of a run from its archived events: no server, no Redis, the same answer for everybody."""

from collections.abc import Callable
from dataclasses import replace

from millrace.errors import CorruptObjectError
from millrace.exports.metrics import MetricRow, header_values, rows_of
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES, decode_header
from millrace.runlog.events.archive import ArchiveFollower
from millrace.runlog.events.reader import readable_event
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.storage.commit_points import find_newest
from millrace.v1 import event_pb2


class EventFollower:
    """The archived events of a run, in the order of the log, each once. Blocking; of one thread."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._archive = ArchiveFollower(store, names)
        self._told: dict[str, int] = {}

    def read(self) -> list[event_pb2.Event]:
        """The events that were archived since the last call; what is damaged is left out."""
        found = []
        for entry in self._archive.read():
            event = readable_event(entry)
            # A log that was rebuilt holds what came before under new cursors, with the numbers of its writers.
            if event is not None and event.writer_sequence > self._told.get(event.writer, 0):
                self._told[event.writer] = event.writer_sequence
                found.append(event)
        return found


class MetricFollower:
    """The metric rows of a run, each fact once: of a step that was computed again, what was said first stays.

    The archive only grows at its end, so the n-th row is the same for everybody who reads it, whenever.
    """

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._store = store
        self._names = names
        self._events = EventFollower(store, names)
        self._pending: list[MetricRow] = []
        self._keys: set[str] = set()
        self.terminal: event_pb2.Event | None = None
        """The event that ended the run, if it has been read and nothing reopened the run behind it."""

    def read(self, *, on_event: Callable[[event_pb2.Event], None] | None = None) -> list[MetricRow]:
        """The rows that were archived since the last call. After an error nothing is lost: call again."""
        for event in self._events.read():
            if event.HasField("state_changed"):
                self.terminal = event if event.state_changed.chain_hash else None
            if on_event is not None:
                on_event(event)
            for row in rows_of(event):
                if row.key not in self._keys:
                    self._keys.add(row.key)
                    self._pending.append(row)
        found = [self._with_header(row) for row in self._pending]
        self._pending = []
        return found

    def _with_header(self, row: MetricRow) -> MetricRow:
        if not row.key.startswith("batch/"):
            return row
        header = read_header(self._store, self._names, row.step)
        return row if header is None else replace(row, values=row.values | header_values(header))


def read_metrics(store: ObjectStore, names: Names) -> list[MetricRow]:
    """Every metric row that the store has of a run."""
    return MetricFollower(store, names).read()


def read_header(store: ObjectStore, names: Names, step: int) -> batch_pb2.BatchHeader | None:
    """The newest header of a step; None if there is none, or it is damaged (`millrace run audit` says so)."""
    key = find_newest(store, names.batch_header(step))
    if key is None:
        return None
    try:
        return decode_header(store.get(key, max_bytes=MAX_HEADER_BYTES))
    except CorruptObjectError:
        return None
