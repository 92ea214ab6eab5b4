"""The events of a run: an ordered, buffered writer that survives the loss of Redis."""

import asyncio
import contextlib
import hashlib
import logging
import time
from collections import deque

from millrace.errors import (
    STORAGE_ERRORS,
    CapacityError,
    ConflictError,
    InternalError,
    LogGoneError,
    MillraceError,
    UnavailableError,
)
from millrace.race import first_of
from millrace.runlog.event_archive import MAX_EVENT_BYTES
from millrace.runlog.names import Stream
from millrace.runlog.redis.log import RunLog, read_hashes
from millrace.telemetry import waits
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

QUEUE_SIZE = 1024
"""Events that may wait for Redis; `write` waits, visibly, when so many do."""
RING_SIZE = 512
"""Newest events that a writer keeps, to append them again where Redis lost them. Archived ones come back by a rebuild,
and these many are more than one writer makes between two archivings."""
FLUSH_S = 30.0
LOOK_S = 4.0
"""How often an idle writer looks whether Redis still has what it wrote."""
_RETRY_S = 2.0
_MAX_RENUMBER = 100  # each conflict means that a process of the same name made progress


class EventWriter:
    """Appends events in order as `writer`, numbered 1, 2, 3, … without gaps, in the background.

    `write` returns at once while Redis answers; when it does not, or does not hold the log, events queue and are
    appended later. What a rebuilt log or a restarted Redis lacks of the newest `ring_size` events is appended again,
    with the same numbers and bytes. The name must be of one process at a time; a successor under the same name
    continues its numbers.
    """

    def __init__(self, log: RunLog, writer: str, *, queue_size: int = QUEUE_SIZE, ring_size: int = RING_SIZE) -> None:
        """Create a writer of events to the run's log; nothing runs before the first `write`.

        `writer` is its name, of one process at a time. `queue_size` events may wait for Redis; the newest `ring_size`
        are kept, to append them again where Redis loses them.
        """
        self._log = log
        self._writer = writer
        # None asks for a look at whether Redis has what was written.
        self._queue: asyncio.Queue[event_pb2.Event | None] = asyncio.Queue(queue_size)
        self._pump: asyncio.Task[None] | None = None
        self._sequence: int | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_size)
        self._sent = (0, b"")
        """Number and bytes of the event that was sent last, until an answer says that it is in the log."""
        self._instance = ""
        self._failure: MillraceError | None = None

    @property
    def num_queued(self) -> int:
        """Return the number of events that wait to be appended."""
        return self._queue.qsize()

    async def write(self, event: event_pb2.Event) -> None:
        """Queue a copy of an event, to be appended in the background; its `time` is now unless set.

        Waits only while the queue is full. Raises CapacityError if the event is too large, and the error that ended the
        writer (such as `NotFoundError`).
        """
        if self._failure is not None:
            raise self._failure
        copy = event_pb2.Event()
        copy.CopyFrom(event)
        # A cursor is of the log that gave it, and this event may come from another one.
        copy.ClearField("cursor")
        copy.writer = self._writer
        if not copy.HasField("time"):
            copy.time.FromNanoseconds(time.time_ns())
        # Measured without the number, which `_append` sets; readers allow for it (`decode_event`).
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
        """Wait until every event is in the log as Redis holds it now.

        `UnavailableError` after `timeout_s`; raises the error that ended the writer, if one did.
        """
        if self._pump is None:
            return
        is_flushed = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                is_flushed = await self._join(self._pump)
        if self._failure is not None:
            raise self._failure
        if not is_flushed:
            raise UnavailableError(
                f"{self._queue.qsize()} events of {self._writer} could not be written within {timeout_s:g} s",
                reason="EVENTS_UNWRITTEN",
                remedy="see why Redis does not answer, or why no orchestrator rebuilds the log",
            )

    async def close(self, *, timeout_s: float = FLUSH_S) -> None:
        """Wait until every event is in the log, then stop the background task, whether that succeeded or not.

        Raises as `flush` does.
        """
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            if self._pump is not None:
                self._pump.cancel()
                # `wait` has a deadline, and does not raise the cancellation of the task here.
                await asyncio.wait((self._pump,), timeout=timeout_s)

    async def _join(self, pump: asyncio.Task[None]) -> bool:
        """Wait until the queue is empty and Redis was compared with the ring once more.

        Return False if the background task, `pump`, ended before.
        """
        await self._put(None)
        joined, _ = await first_of(self._queue.join(), pump)
        return joined is not None

    async def _put(self, item: event_pb2.Event | None) -> None:
        """Wait for room in the queue and put the item into it.

        None asks for a look at whether Redis has what was written. Raise the error of the background task if that ends,
        because no room comes then.
        """
        assert self._pump is not None
        await first_of(self._queue.put(item), self._pump)
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        """Append what is queued, and look at Redis every `LOOK_S` seconds without work.

        An error ends it and is kept for callers.
        """
        try:
            while True:
                try:
                    async with asyncio.timeout(LOOK_S):
                        event = await self._queue.get()
                except TimeoutError:
                    await self._persist(None)
                    continue
                await self._persist(event)
                # Not after an error: `flush` must not take this event for written.
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

    async def _persist(self, event: event_pb2.Event | None) -> None:
        """Append one event (None: only what Redis lost), trying for as long as it takes.

        Raise what waiting cannot fix.
        """
        conflicts = 0
        while True:
            try:
                if event is None or self._sequence is None:
                    await self._look()
                if event is not None:
                    await self._append(event)
                return
            except LogGoneError:
                # Only an orchestrator rebuilds it. What the new copy lacks of the ring is appended by the next look.
                await self._log.wait_reopened(f"to append events of {self._writer}")
                self._sequence = None
            except STORAGE_ERRORS as error:
                # It may last: the queue fills meanwhile, and `write` waits, which is visible.
                reason = f"to append an event of {self._writer}: {error.message}"
                with waits.waiting(reason, waits_on="redis", refusal=waits.Refusal.of(error)):
                    await asyncio.sleep(_RETRY_S)
            except ConflictError:  # a predecessor under this name wrote meanwhile, or Redis lost its tail
                conflicts += 1
                if conflicts > _MAX_RENUMBER:
                    raise
                self._sequence = None

    async def _look(self) -> None:
        """Read the newest number that Redis has of this writer, and append what it lacks of the ring.

        Nothing is done while Redis holds the same copy of the log as at the last look.
        """
        # Before the number: if Redis restarts after this, the next look sees another instance and compares again.
        instance = await self._log.read_instance()
        if self._sequence is not None and instance == self._instance:
            return
        held = await self._log.writer_sequence(self._writer)
        lacking = [(number, data) for number, data in self._ring if number > held]
        if lacking:
            logger.warning(
                "appending again events that Redis lost",
                extra={"uid": self._log.uid, "writer": self._writer, "count": len(lacking), "behind": held},
            )
        self._sequence = held
        for number, data in lacking:
            await self._append_again(number, data)
        # Only now: if an append fails before, the next look begins again.
        self._instance = instance

    async def _append_again(self, number: int, data: bytes) -> None:
        """Append once more, under its old number, an event that Redis has lost; `data` are its serialized bytes.

        If events before it are lost for good, it gets the next number.
        """
        assert self._sequence is not None
        if number != self._sequence + 1:
            # It gets another number, under which it may have to be appended once more.
            self._ring.remove((number, data))
            event = event_pb2.Event.FromString(data)
            logger.error(
                "events are lost: more of them than a writer keeps were not archived",
                extra={"uid": self._log.uid, "writer": self._writer, "old": number, "new": self._sequence + 1},
            )
            event.writer_sequence = number = self._sequence + 1
            data = event.SerializeToString(deterministic=True)
            self._ring.append((number, data))
        result = await self._log.append_event(data, writer=self._writer, sequence=number)
        result.require(f"repeating event {number} of {self._writer}")
        self._sequence = number

    async def _append(self, event: event_pb2.Event) -> None:
        """Try once to append an event as the next of this writer, and keep it in the ring; it gets its number here.

        `ConflictError` if that is not the next number in Redis.
        """
        assert self._sequence is not None
        number, data = self._sent
        # A rebuild may keep an event whose answer was lost with the log: it is in the log under the number that this
        # writer has found there, and must not get the next one as well.
        if number != self._sequence or not await self._holds(data):
            number = event.writer_sequence = self._sequence + 1
            data = event.SerializeToString(deterministic=True)
            self._sent = number, data
            result = await self._log.append_event(data, writer=self._writer, sequence=number)
            result.require(f"event {number} of {self._writer}")
        # Only now: after a lost answer the same number and bytes are sent again, which Redis answers with ALREADY.
        self._sent = 0, b""
        self._sequence = number
        self._ring.append((number, data))

    async def _holds(self, data: bytes) -> bool:
        """Return whether the event stream in Redis has an entry with these bytes."""
        return bool(data) and hashlib.sha256(data).hexdigest() in await read_hashes(self._log, Stream.EVENTS)
