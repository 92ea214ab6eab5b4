"""The events of a run, read by cursor."""

import re
from collections.abc import Sequence

from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, Violation
from millrace.runlog.log import RunLog
from millrace.runlog.names import Stream
from millrace.v1 import event_pb2

_CURSOR = re.compile(r"\d{1,19}-\d{1,19}")


class EventReader:
    """Reads the events of a run in their order.

    A cursor from before a rebuild stays good: what follows it in the rebuilt log includes everything that it has not
    seen, and may include, under new cursors and with equal (writer, writer_sequence), what it has. The same cursor in
    another log instance of the *same* generation may be another event's: whoever sees the server restarted reads again
    from the first event and leaves out what it knows.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log

    async def read(self, *, after: str = "", count: int = 256, block_s: float = 0.0) -> Sequence[event_pb2.Event]:
        """Events behind the cursor `after` ("" = from the oldest), each with its own cursor; waits up to `block_s` ≤ 5.

        `InvalidStateError` (CURSOR_EXPIRED, metadata `oldest_cursor`) when events behind the cursor were trimmed.
        """
        if after and not _CURSOR.fullmatch(after):
            raise InvalidSpecError(
                [Violation(field="after", value=after[:100], message="is no cursor of this run", source="request")]
            )
        entries = await self._log.read(Stream.EVENTS, after=after or "0", count=count, block_s=block_s)
        if after and entries and not _is_next(after, entries[0].id):
            raise InvalidStateError(
                f"events behind the cursor {after} were trimmed; the oldest is {entries[0].id}",
                reason="CURSOR_EXPIRED",
                remedy="watch again without a cursor",
                metadata={"oldest_cursor": entries[0].id},
            )
        return [_decode(entry.id, entry.d) for entry in entries]


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
