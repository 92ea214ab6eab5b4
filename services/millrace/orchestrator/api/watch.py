"""The events of a run for somebody who watches: each once and in order, also across a Redis that lost some of them."""

from collections.abc import Sequence

from millrace.errors import LogGoneError
from millrace.orchestrator.runs.catalog import RunCatalog
from millrace.runlog import EventReader, RunLog
from millrace.v1 import event_pb2


class EventFeed:
    """Reads behind a cursor. When Redis holds another copy of the log, it begins anew and skips what it has given out.

    Another copy may have given the ids of lost events to others, so a cursor alone does not say what was seen: the
    number of each writer's newest event does.
    """

    def __init__(self, catalog: RunCatalog, uid: str, *, after: str) -> None:
        """`after` is the cursor behind which the watcher wants events; empty is from the beginning."""
        self._catalog = catalog
        self._uid = uid
        self._after = after
        self._log: RunLog | None = None
        self._instance = ""
        self._given: dict[str, int] = {}
        self._is_replay = False
        self.cursor = after
        """Cursor of the newest event that was read."""

    async def read(self, *, block_s: float) -> Sequence[event_pb2.Event]:
        """The next events; waits up to `block_s` for the first one."""
        try:
            run_log = self._log
            if run_log is None or await run_log.read_instance() != self._instance:
                run_log = await self._open()
            events = await EventReader(run_log).read(after=self.cursor, block_s=block_s)
        except LogGoneError:
            self._log = None  # the next read opens the rebuilt log
            return []
        fresh = []
        for event in events:
            self.cursor = event.cursor
            if self._is_replay and self._was_given(event):
                continue
            self._given[event.writer] = event.writer_sequence
            fresh.append(event)
        return fresh

    async def _open(self) -> RunLog:
        run_log = await self._catalog.open_log(self._uid)
        instance = await run_log.read_instance()
        if self._instance and instance != self._instance:
            self.cursor, self._is_replay = "", True
        self._log, self._instance = run_log, instance
        return run_log

    def _was_given(self, event: event_pb2.Event) -> bool:
        """Whether the watcher has the event: from us, or from before it came to us."""
        is_before = bool(self._after) and _position(event.cursor) <= _position(self._after)
        return is_before or event.writer_sequence <= self._given.get(event.writer, 0)


def _position(cursor: str) -> tuple[int, ...]:
    return tuple(int(part) for part in cursor.split("-"))
