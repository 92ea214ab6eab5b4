"""The events of a run: read by cursor, across rebuilds of the log."""

import math
import re
import time
from collections.abc import Sequence

from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation
from millrace.runlog.connection import MAX_BLOCK_S
from millrace.runlog.entry import Entry, id_order
from millrace.runlog.log import RunLog
from millrace.runlog.names import Stream
from millrace.v1 import event_pb2

MEMORY = 1024
"""Events that a reader remembers: more than the writers of a run append again after a rebuild."""

LOOK_S = 2.0
"""How often a reader looks whether the server was restarted."""

_CURSOR = re.compile(r"\d{1,19}-\d{1,19}")


class EventReader:
    """Reads the events of a run in their order.

    After `LogGoneError`, `log.reopen()` and a `read` behind the same cursor go on: nothing is skipped, and what was
    read and is in the log again under another cursor is not read twice. The same holds where a restarted Redis lost its
    newest events and their writers append them again; cursors may then step back.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._cursor = ""  # of the newest event that was returned
        self._position = ""  # of the newest that was read: behind the cursor where known events were left out
        self._known: dict[str, str] = {}  # hash → id of the newest events that were returned, oldest first
        self._instance = ""
        self._looked = -math.inf

    async def read(self, *, after: str = "", count: int = 256, block_s: float = 0.0) -> Sequence[event_pb2.Event]:
        """Events behind the cursor `after` ("" = from the oldest), each with its own cursor; waits up to `block_s` ≤ 5.

        `InvalidStateError` (CURSOR_EXPIRED, metadata `oldest_cursor`) when events behind the cursor were trimmed.
        """
        if after and not _CURSOR.fullmatch(after):
            raise InvalidSpecError(
                [Violation(field="after", value=after[:100], message="is no cursor of this run", source="request")]
            )
        if not after or after != self._cursor:  # not a continuation of what was read before
            self._cursor = self._position = after
            self._known.clear()
        await self._look_at_server()
        ends = time.monotonic() + min(block_s, MAX_BLOCK_S)
        while True:
            entries = await self._read_on(count, max(0.0, ends - time.monotonic()))
            new = [entry for entry in entries if entry.h not in self._known]
            if entries:
                self._position = entries[-1].id
            if new:
                self._remember(new)
                return [_decode(entry.id, entry.d) for entry in new]
            if not entries and time.monotonic() >= ends:
                return []
            await self._look_at_server()

    async def _look_at_server(self) -> None:
        """Read the newest events again when the server was restarted: what it lost has other cursors now."""
        if time.monotonic() - self._looked < LOOK_S:
            return
        instance, self._looked = await self._log.read_instance(), time.monotonic()
        is_restarted = self._instance.partition(".")[0] == instance.partition(".")[0] and self._instance != instance
        self._instance = instance
        if is_restarted and self._known:
            last = await self._log.last_id(Stream.EVENTS) or "0-0"
            self._position = min(next(iter(self._known.values())), last, key=id_order)

    async def _read_on(self, count: int, block_s: float) -> list[Entry]:
        position = self._position
        entries = await self._log.read(Stream.EVENTS, after=position or "0", count=count, block_s=min(block_s, LOOK_S))
        if position and entries and not _is_next(position, entries[0].id):
            raise InvalidStateError(
                f"events behind the cursor {position} were trimmed; the oldest is {entries[0].id}",
                reason="CURSOR_EXPIRED",
                remedy="watch again without a cursor",
                metadata={"oldest_cursor": entries[0].id},
            )
        return entries

    def _remember(self, entries: Sequence[Entry]) -> None:
        self._cursor = entries[-1].id
        for entry in entries:
            self._known[entry.h] = entry.id
        for entry_hash in list(self._known)[: max(0, len(self._known) - MEMORY)]:
            del self._known[entry_hash]


def _is_next(cursor: str, id_: str) -> bool:
    """Whether no event can lie between two ids: `<generation>-*` is gapless and begins at 0.

    A newer generation begins with what a rebuild left; what the older one had behind the cursor is in it again.
    """
    generation, number = (int(part) for part in cursor.split("-"))
    next_generation, next_number = (int(part) for part in id_.split("-"))
    if next_generation == generation:
        return next_number == number + 1
    return next_number == 0


def _decode(id_: str, data: bytes) -> event_pb2.Event:
    try:
        event = event_pb2.Event.FromString(data)
    except ValueError as error:  # DecodeError's base class
        raise CorruptObjectError(f"event {id_} does not decode: {error}", reason="EVENT_CORRUPT") from error
    event.cursor = id_
    return event
