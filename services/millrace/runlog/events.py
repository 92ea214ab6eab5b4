"""The events of a run: an ordered, buffered writer, and a reader by cursor."""

import asyncio
import logging
import re
import time
from collections.abc import Sequence

from millrace.errors import (
    CapacityError,
    CorruptObjectError,
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    LogGoneError,
    MillraceError,
    UnavailableError,
    Violation,
)
from millrace.runlog.log import AppendResult, RunLog
from millrace.runlog.names import Stream
from millrace.telemetry import waits
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1024
"""Events that may wait for Redis; `write` waits, visibly, when so many do."""
MAX_EVENT_BYTES = 256 * 1024
"""An event is a report, not a payload."""
FLUSH_S = 30.0
_RETRY_S = 2.0
_MAX_RENUMBER = 100  # each conflict means that a process of the same name made progress

_CURSOR = re.compile(r"\d{1,19}-\d{1,19}")


class EventWriter:
    """Appends events in order as `writer`, numbered 1, 2, 3, … without gaps, in the background.

    `write` returns at once while Redis answers; when it does not, events queue and are appended later. The name must be
    of one process at a time; a successor under the same name continues its numbers.
    """

    def __init__(self, log: RunLog, writer: str, *, queue_size: int = QUEUE_SIZE) -> None:
        self._log = log
        self._writer = writer
        self._queue: asyncio.Queue[event_pb2.Event] = asyncio.Queue(queue_size)
        self._pump: asyncio.Task[None] | None = None
        self._sequence: int | None = None
        self._failure: MillraceError | None = None

    async def write(self, event: event_pb2.Event) -> None:
        """Queue an event; its `time` is now unless set. Raises what ended the writer (such as `LogGoneError`)."""
        if self._failure is not None:
            raise self._failure
        copy = event_pb2.Event()
        copy.CopyFrom(event)
        copy.ClearField("cursor")
        copy.writer = self._writer
        if not copy.HasField("time"):
            copy.time.FromNanoseconds(time.time_ns())
        if copy.ByteSize() > MAX_EVENT_BYTES:
            raise CapacityError(
                f"an event of {copy.ByteSize()} bytes is above {MAX_EVENT_BYTES}",
                reason="EVENT_TOO_LARGE",
                remedy="write a summary",
            )
        if self._pump is None:
            self._pump = asyncio.create_task(self._run(), name=f"events of {self._writer}")
        if self._queue.full():
            with waits.waiting("room in the event queue", waits_on="redis"):
                await self._put(copy)
        else:
            self._queue.put_nowait(copy)

    async def flush(self, *, timeout_s: float = FLUSH_S) -> None:
        """Return when every queued event is in the log; `UnavailableError` after `timeout_s`."""
        if self._pump is None:
            return
        joined = asyncio.ensure_future(self._queue.join())
        try:
            await asyncio.wait((joined, self._pump), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            joined.cancel()
        if self._failure is not None:
            raise self._failure
        if not joined.done() or joined.cancelled():
            raise UnavailableError(
                f"{self._queue.qsize()} events of {self._writer} could not be written within {timeout_s:g} s",
                reason="EVENTS_UNWRITTEN",
                remedy="see why Redis does not answer",
            )

    async def close(self, *, timeout_s: float = FLUSH_S) -> None:
        """Flush, then stop the background task in any case."""
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.wait((self._pump,), timeout=timeout_s)

    async def _put(self, event: event_pb2.Event) -> None:
        """Wait for room, or for the end of the background task, which would leave none for ever."""
        put = asyncio.ensure_future(self._queue.put(event))
        assert self._pump is not None
        try:
            await asyncio.wait((put, self._pump), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not put.done():
                put.cancel()
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        try:
            while True:
                event = await self._queue.get()
                await self._append(event)
                self._queue.task_done()
        except MillraceError as error:
            logger.error(
                "event writer ended", extra={"uid": self._log.uid, "writer": self._writer, "error": str(error)}
            )
            self._failure = error
        except Exception as error:  # the edge of a task that nobody awaits: `write` and `flush` must hear of it
            logger.exception("event writer ended", extra={"uid": self._log.uid, "writer": self._writer})
            self._failure = InternalError(
                f"writing events of {self._writer} to run {self._log.uid} failed: {type(error).__name__}: {error}",
                reason="EVENT_WRITER_FAILED",
                remedy="this is a defect: see the log of this process",
            )
            self._failure.__cause__ = error

    async def _append(self, event: event_pb2.Event) -> None:
        """Append one event, for as long as Redis is away; raises what waiting cannot mend."""
        conflicts = 0
        while True:
            try:
                if self._sequence is None:
                    self._sequence = await self._log.writer_sequence(self._writer)
                event.writer_sequence = self._sequence + 1
                result = await self._log.append_event(
                    event.SerializeToString(deterministic=True), writer=self._writer, sequence=event.writer_sequence
                )
            except LogGoneError:
                raise
            except (UnavailableError, CapacityError) as error:
                with waits.waiting(f"to append an event of {self._writer}: {error.message}", waits_on="redis"):
                    await asyncio.sleep(_RETRY_S)
                continue
            if result in (AppendResult.OK, AppendResult.ALREADY):
                self._sequence = event.writer_sequence
                return
            conflicts += 1
            if result is not AppendResult.CONFLICT or conflicts > _MAX_RENUMBER:
                result.require(f"event {event.writer_sequence} of {self._writer}")
            self._sequence = None  # a predecessor under this name wrote meanwhile: continue behind it


class EventReader:
    """Reads the events of a run in their order."""

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
    """Whether no event can lie between two ids: `<generation>-*` is gapless and begins at 0."""
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
