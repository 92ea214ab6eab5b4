"""The events of a run: an ordered, buffered writer that survives the loss of Redis."""

import asyncio
import contextlib
import logging
import time
from collections import deque

from millrace.errors import CapacityError, ConflictError, InternalError, LogGoneError, MillraceError, UnavailableError
from millrace.race import first_of
from millrace.runlog.event_archive import MAX_EVENT_BYTES
from millrace.runlog.redis.log import RunLog
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
        self._log = log
        self._writer = writer
        self._queue: asyncio.Queue[event_pb2.Event | None] = asyncio.Queue(queue_size)  # None: look at Redis
        self._pump: asyncio.Task[None] | None = None
        self._sequence: int | None = None
        self._ring: deque[tuple[int, bytes]] = deque(maxlen=ring_size)
        self._instance = ""
        self._failure: MillraceError | None = None

    @property
    def num_queued(self) -> int:
        """Return events that wait to be appended."""
        return self._queue.qsize()

    async def write(self, event: event_pb2.Event) -> None:
        """Queue a copy of an event; its `time` is now unless set. Waits only while the queue is full.

        Raises CapacityError if the event is too large, and the error that ended the writer (such as
        `NotFoundError`).
        """
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
        """Wait until every event is in the log as Redis holds it now; `UnavailableError` after `timeout_s`."""
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
        """Wait until every event is in the log, then stop the background task, whether that succeeded or not."""
        try:
            await self.flush(timeout_s=timeout_s)
        finally:
            if self._pump is not None:
                self._pump.cancel()
                await asyncio.wait((self._pump,), timeout=timeout_s)

    async def _join(self, pump: asyncio.Task[None]) -> bool:
        """Wait until the queue is empty and Redis was asked once more.

        Return False if the background task ended before.
        """
        await self._put(None)
        joined, _ = await first_of(self._queue.join(), pump)
        return joined is not None

    async def _put(self, item: event_pb2.Event | None) -> None:
        """Wait for room in the queue.

        Raise the error of the background task if that ends, because no room comes then.
        """
        assert self._pump is not None
        await first_of(self._queue.put(item), self._pump)
        if self._failure is not None:
            raise self._failure

    async def _run(self) -> None:
        try:
            while True:
                try:
                    async with asyncio.timeout(LOOK_S):
                        event = await self._queue.get()
                except TimeoutError:
                    await self._persist(None)
                    continue
                await self._persist(event)
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
        """Append one event (None: only what Redis lost), for as long as it takes; raises what waiting cannot fix."""
        conflicts = 0
        while True:
            try:
                if event is None or self._sequence is None:
                    await self._look()
                if event is not None:
                    await self._append(event)
                return
            except LogGoneError:
                await self._log.wait_reopened(f"to append events of {self._writer}")
                self._sequence = None
            except (UnavailableError, CapacityError) as error:
                reason = f"to append an event of {self._writer}: {error.message}"
                with waits.waiting(reason, waits_on="redis", refusal=waits.Refusal.of(error)):
                    await asyncio.sleep(_RETRY_S)
            except ConflictError:  # a predecessor under this name wrote meanwhile, or Redis lost its tail
                conflicts += 1
                if conflicts > _MAX_RENUMBER:
                    raise
                self._sequence = None

    async def _look(self) -> None:
        """Append the newest events again that Redis lacks, if it is another copy now, and read the next number."""
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
        self._instance = instance

    async def _append_again(self, number: int, data: bytes) -> None:
        """Append an event that Redis lost again, under its old number.

        Under the next one if events before it are lost.
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
        """Try once to append an event as the next of this writer; `ConflictError` if that is not the next number."""
        assert self._sequence is not None
        event.writer_sequence = self._sequence + 1
        data = event.SerializeToString(deterministic=True)
        result = await self._log.append_event(data, writer=self._writer, sequence=event.writer_sequence)
        result.require(f"event {event.writer_sequence} of {self._writer}")
        self._sequence = event.writer_sequence
        self._ring.append((event.writer_sequence, data))
