"""The events of a run, read by cursor."""

import re
from collections.abc import Sequence

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation
from millrace.runlog.names import Stream
from millrace.runlog.redis.entry import Entry, damaged_entry, id_order
from millrace.runlog.redis.log import RunLog
from millrace.v1 import event_pb2

MAX_EVENT_BYTES = 256 * 1024
"""Largest event that is written, but for its number: an event is a report, not a payload."""
MAX_SEQUENCE = 1 << 53
"""Highest number of an event that is read; Redis' scripts count exactly up to here."""
_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class EventReader:
    """Reads the events of a run in their order.

    A cursor from before a rebuild stays good: what follows it in the rebuilt log includes everything that it has not
    seen, and may include, under new cursors and with equal (writer, writer_sequence), what it has. The same cursor in
    another log instance of the *same* generation may be another event's: a reader that sees the server restarted reads
    again from the first event and leaves out what it knows.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log

    async def read(self, *, after: str = "", count: int = 256, block_s: float = 0.0) -> Sequence[event_pb2.Event]:
        """Events behind the cursor `after` ("" = from the oldest), each with its own cursor; waits up to `block_s` ≤ 5.

        What is damaged is left out. `InvalidStateError` (CURSOR_EXPIRED, metadata `oldest_cursor`) when events behind
        the cursor were trimmed.
        """
        if after and not (_CURSOR.fullmatch(after) and max(id_order(after)) < 1 << 64):
            raise InvalidSpecError(
                [Violation(field="after", value=after[:100], message="is no cursor of this run", source="request")]
            )
        entries = await self._log.read(Stream.EVENTS, after=after or "0", count=count, block_s=block_s)
        if after and entries and not _is_next(after, entries[0].id):
            await self._require_untrimmed(after)
        while entries:
            decoded = (readable_event(entry) for entry in entries)
            if found := [event for event in decoded if event is not None]:
                return found
            entries = await self._log.read(Stream.EVENTS, after=entries[-1].id, count=count)
        return []

    async def _require_untrimmed(self, after: str) -> None:
        """Trimming removes the oldest: what is missing behind an event that is there was damaged, and left out."""
        oldest = await self._log.read(Stream.EVENTS, after="0", count=1)
        if oldest and id_order(oldest[0].id) > id_order(after):
            raise InvalidStateError(
                f"events behind the cursor {after} were trimmed; the oldest is {oldest[0].id}",
                reason="CURSOR_EXPIRED",
                remedy="watch again without a cursor",
                metadata={"oldest_cursor": oldest[0].id},
            )


def _is_next(cursor: str, id_: str) -> bool:
    """Whether no event can lie between two ids: `<generation>-*` is gapless and begins at 0.

    A newer generation begins with what a rebuild left; what the older one had behind the cursor is in it again.
    """
    generation, number = (int(part) for part in cursor.split("-"))
    next_generation, next_number = (int(part) for part in id_.split("-"))
    if next_generation == generation:
        return next_number == number + 1
    return next_number == 0


def readable_event(entry: Entry) -> event_pb2.Event | None:
    """The event of an entry, with its cursor; None if it is damaged."""
    try:
        return None if entry.damage else decode_event(entry)
    except CorruptObjectError:
        return None


def decode_event(entry: Entry) -> event_pb2.Event:
    """The event that an entry holds, with its cursor; `CorruptObjectError` if it holds none."""
    event = decode_message(
        event_pb2.Event,
        entry.d,
        what=f"event {entry.id}",
        reason="EVENT_CORRUPT",
        max_bytes=MAX_EVENT_BYTES + 64,  # the number is added to what was measured
    )
    if event.writer_sequence > MAX_SEQUENCE:
        raise CorruptObjectError(
            f"event {entry.id} has the number {event.writer_sequence} of its writer", reason="EVENT_CORRUPT"
        )
    try:
        event.time.ToNanoseconds()
    except ValueError as error:  # no time that has a date: nobody could show the event
        raise CorruptObjectError(f"event {entry.id} has no valid time: {error}", reason="EVENT_CORRUPT") from error
    event.cursor = entry.id
    return event


def with_damage(entry: Entry) -> Entry:
    """The entry, or one that says why no event can be read from it."""
    try:
        if not entry.damage:
            decode_event(entry)
    except CorruptObjectError as error:
        return damaged_entry(entry.id, error)
    return entry
