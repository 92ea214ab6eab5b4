"""The trainer's synchronous client of a run's log.

All waiting is done on the background loop: the next batch is read while the current one is trained on, the lease is
renewed, and events are appended in order. Rank 0 of a gang holds lease and epoch and writes; the other ranks open the
log only to read their chunks.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from millrace.errors import (
    CorruptObjectError,
    InternalError,
    LogGoneError,
    MillraceError,
    NotFoundError,
    UnavailableError,
)
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.rollouts.batch_wire import decode_header, verify_chunk
from millrace.runlog import EventWriter, Names, RunLog, open_redis
from millrace.runlog.names import Stream
from millrace.runlog.records.revisions import is_failed_closing, load_step, read_chunk, read_header
from millrace.runlog.records.run_record import require_exists
from millrace.runlog.redis import damage
from millrace.runlog.redis.connection import MAX_BLOCK_S
from millrace.runlog.redis.entry import Entry
from millrace.storage import ObjectStore
from millrace.telemetry import waits
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.log.hold import Hold, outlasting, reopened
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)


# Read one batch: wait for its header in Redis, take from the store what Redis does not (or no longer) hold.

_PARALLEL_GETS = 4
_REOPENED_POLL_S = 1.0  # each time the store is asked, too


async def read_batch(
    log: RunLog, step: int, *, want_chunks: Sequence[int] | None = None, timeout_s: float | None = None
) -> tuple[batch_pb2.BatchHeader, bytes, dict[int, bytes]]:
    """Wait for batch `step`; return its header, the header's stored bytes, and its chunks by index.

    Only the chunks `want_chunks` are read; None: all. What Redis lacks comes from the store; every chunk is checked
    against the sha256 in the header. `CorruptObjectError` if header or chunks are damaged or of another batch,
    `UnavailableError` (BATCH_WAIT_TIMEOUT) after `timeout_s`; None waits without end.
    """
    header_bytes = await _wait_in_force(log, step, timeout_s=timeout_s)
    header = decode_header(header_bytes)
    if header.step != step or header.run_uid != log.uid:
        raise CorruptObjectError(
            f"header {step} of run {log.uid} says step {header.step} of run {header.run_uid}",
            reason="BATCH_CORRUPT",
            remedy="restore that object from a replica of the bucket",
        )
    wanted = range(len(header.chunks)) if want_chunks is None else want_chunks
    gate = asyncio.Semaphore(_PARALLEL_GETS)

    async def fetch(index: int) -> bytes:
        async with gate:
            return await _read_chunk(log, header, index)

    found = await asyncio.gather(*(fetch(index) for index in wanted))
    return header, header_bytes, dict(zip(wanted, found, strict=True))


async def _wait_in_force(log: RunLog, step: int, *, timeout_s: float | None) -> bytes:
    """Wait for the header of batch `step` that is trained on or closes the run, and return its stored bytes.

    A failed closing header at which the run was reopened is not: its successor is waited for. Raises UnavailableError
    after `timeout_s` (None: never).
    """
    started = time.monotonic()
    left_s = timeout_s
    while True:
        data = await wait_for_header(log, step, timeout_s=left_s)
        if not is_failed_closing(decode_header(data)):
            return data
        found = await asyncio.to_thread(load_step, log.store, log.names, step)
        in_force = data if found is None else found.in_force
        if in_force is not None:
            return in_force
        # No time was left already before this look, which was the last one.
        if left_s == 0.0:
            raise _timed_out(log, step, timeout_s)
        with waits.waiting(f"batch {step}, at which the run was reopened", waits_on="orchestrator"):
            await asyncio.sleep(_REOPENED_POLL_S)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started))


async def wait_for_header(log: RunLog, step: int, *, timeout_s: float | None = None) -> bytes:
    """Wait until Redis or the store has header `step`, and return its stored bytes.

    The store is asked first, and whenever Redis was silent for 5 s: the step may be trimmed, or its append lost. What
    Redis has is compared with it, too: an entry that is not the committed header costs the log a rebuild. While Redis
    does not hold the log the store goes on being asked, and a rebuilt log is adopted; `NotFoundError` when the run is
    being deleted. `UnavailableError` (BATCH_WAIT_TIMEOUT) after `timeout_s`; None waits without end.
    """
    started = time.monotonic()
    # The first look must not block: the store may have the step although Redis has trimmed it.
    limit_s = 0.0
    with waits.waiting(f"batch {step}", waits_on="orchestrator", deadline_s=timeout_s or 0.0) as wait:
        while True:
            left_s = MAX_BLOCK_S if timeout_s is None else timeout_s - (time.monotonic() - started)
            block_s = max(0.0, min(limit_s, left_s))
            limit_s = MAX_BLOCK_S
            entries = await _read_or_adopt(log, step, block_s)
            wait.update(reason=f"batch {step}" + (" (the log of the run is gone)" if entries is None else ""))
            try:
                stored = await asyncio.to_thread(read_header, log.store, log.names, step)
            except NotFoundError as error:
                if entries:
                    await _require_lost(log, step, entries[0], error)
            else:
                # The store decides. An entry that differs from the committed header is damage in Redis.
                if entries and entries[0].id == f"{step}-1" and entries[0].d != stored:
                    await damage.require_committed(log, step, entries[0].d)
                return stored
            if timeout_s is not None and time.monotonic() - started >= timeout_s:
                raise _timed_out(log, step, timeout_s)


def _timed_out(log: RunLog, step: int, timeout_s: float | None) -> UnavailableError:
    """Make the error for a batch that did not come within `timeout_s`."""
    return UnavailableError(
        f"batch {step} of run {log.uid} did not come within {timeout_s or 0.0:g} s",
        reason="BATCH_WAIT_TIMEOUT",
        remedy="see `millrace run why` for what the orchestrator waits for",
        metadata={"uid": log.uid, "step": str(step)},
    )


async def _read_or_adopt(log: RunLog, step: int, block_s: float) -> list[Entry] | None:
    """Return the next batch entry from `step` on, if it comes within `block_s`, else an empty list.

    None while Redis does not hold the log. A rebuilt log is adopted. `NotFoundError` if the run is being deleted.
    """
    try:
        # `STEP-1` is the id of the header, the first entry after `STEP-0`.
        return await log.read(Stream.BATCHES, after=f"{step}-0", count=1, block_s=block_s)
    except LogGoneError:
        pass
    try:
        await log.reopen()
    except LogGoneError:
        await asyncio.to_thread(require_exists, log.store, log.names)
        await asyncio.sleep(min(block_s, _POLL_S))
        return None
    return []


async def _require_lost(log: RunLog, step: int, entry: Entry, error: NotFoundError) -> None:
    """Raise `error` if the store lost the header of `step`: Redis has `entry`, a later step, which the store has, too.

    What Redis has and the store never had is foreign: the copy is marked as damaged, and nothing is raised.
    """
    found = int(entry.id.partition("-")[0])
    try:
        if found == step:
            raise await damage.mark_damaged(
                log, f"stream {Stream.BATCHES}", f"at {entry.id}: that step is not committed"
            )
        await damage.require_backed(log, Stream.BATCHES, found)
    except LogGoneError as gone:
        logger.warning("a batch in Redis is foreign", extra={"uid": log.uid, "step": step, "error": gone.message})
        return
    raise error


async def _read_chunk(log: RunLog, header: batch_pb2.BatchHeader, index: int) -> bytes:
    """Return chunk `index` of a committed header from Redis, or from the store if it is missing or damaged there."""
    # Entry 1 of a step is its header, entry 2 its chunk 0.
    id_ = f"{header.step}-{index + 2}"
    try:
        entries = await log.read_range(Stream.BATCHES, id_, id_)
        if entries and not entries[0].damage:
            verify_chunk(header, index, entries[0].d)
            return entries[0].d
    except CorruptObjectError as error:
        logger.warning("chunk in Redis is damaged, reading the store", extra={"uid": log.uid, "error": str(error)})
    return await asyncio.to_thread(read_chunk, log.store, header, index)


_POLL_S = 0.5
_READ_TIMEOUT_S = 600.0  # chunks of a batch; a gang's collective times out after that, too
_WRITE_TIMEOUT_S = 120.0
_CLOSE_S = 4.0  # twice within the grace period; if Redis is dead, only events are lost: facts are in the store

ReadBatch = tuple[batch_pb2.BatchHeader, bytes, Mapping[int, bytes]]


class LogClient:
    """One run's log: call `begin`, `poll_ready` until it is open, and in any case `close`, which releases the lease."""

    def __init__(
        self,
        background: BackgroundLoop,
        *,
        redis_url: str,
        store: ObjectStore,
        names: Names,
        owner: str,
        slot: str,
        gang: Gang,
        should_stop: Callable[[], bool],
    ) -> None:
        """Prepare the client of one run's log; open nothing yet.

        `owner` (the worker's id) and `slot` (the address that one process at a time can have) go into the lease.
        `should_stop` says whether the trainer is asked to release the run.
        """
        self._background = background
        self._redis_url = redis_url
        self._store = store
        self._names = names
        self._owner = owner
        self._slot = slot
        self._is_leader = gang.is_leader
        self._is_alone = gang.is_alone
        self._should_stop = should_stop
        self._is_closed = False
        self._log: RunLog | None = None
        self._hold: Hold | None = None
        self._events: EventWriter | None = None
        self._opening: concurrent.futures.Future[None] | None = None
        self._keeping: concurrent.futures.Future[None] | None = None
        self._reading: tuple[int, concurrent.futures.Future[ReadBatch], waits.Ahead] | None = None

    def begin(self) -> None:
        """Start to open the run's log in the background; rank 0 also takes the lease and a new epoch.

        That may take long: a dead predecessor's lease has to expire, or a lost log to be rebuilt.
        """
        self._opening = self._background.submit(self._open())

    def poll_ready(self, *, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the log is open, and at rank 0 the lease held; return whether it is.

        Raises what opening raised. Call `begin` first.
        """
        assert self._opening is not None
        # Not `result(timeout_s)`, whose TimeoutError could also be one that opening has raised.
        concurrent.futures.wait([self._opening], timeout_s)
        if not self._opening.done():
            return False
        self._opening.result()
        return True

    @property
    def run_hash(self) -> str:
        """Return the sha256 (hex) of the run's resolved config."""
        return self._opened.run_hash

    @property
    def epoch(self) -> int:
        """Return the fencing epoch with which this trainer holds the run; raise InternalError at ranks other than 0."""
        return self._held.epoch.number

    @property
    def before(self) -> str:
        """Return in words how the previous training of the run ended; empty if there was none.

        Raises InternalError at ranks other than 0.
        """
        return self._held.before

    # BatchLog

    def is_stop_requested(self) -> bool:
        """Return whether the trainer is asked to release the run.

        Raises the error that ended the lease's renewal, if it has ended: FencedError if another trainer has the run.
        """
        if self._held.lost is not None:
            raise self._held.lost
        return self._should_stop()

    def prefetch(self, step: int) -> None:
        """Start to read batch `step` in the background, which waits until it is there; stop reading another batch.

        A process alone reads all chunks; a rank of a gang reads only the header.
        """
        # Each poll calls this: a read of the same step goes on.
        if self._reading is None or self._reading[0] != step:
            self._cancel_reading()
            # A rank of a gang learns only from the header which chunks have its samples.
            ahead = waits.Ahead()
            reading = self._background.submit(self._read(step, None if self._is_alone else [], ahead=ahead))
            self._reading = step, reading, ahead

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """Wait up to `timeout_s` for the header of batch `step`, and return its bytes as stored.

        None if it is not there.
        """
        self.prefetch(step)
        assert self._reading is not None
        self._reading[2].need()
        done, _ = concurrent.futures.wait([self._reading[1]], timeout_s)
        return self._reading[1].result()[1] if done else None

    def read_superseded(self, step: int, revisions: int) -> list[bytes]:
        """Read the first `revisions` headers of batch `step` from the store, as stored, oldest first."""
        return [read_header(self._store, self._names, step, revision) for revision in range(revisions)]

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """Return the chunks of batch `step` with the indices `chunks`, by index, each verified against the header.

        The batch must be committed. Chunks that were read ahead are not read again.
        """
        if not chunks:
            return {}
        if self._reading is not None and self._reading[0] == step and self._reading[1].done():
            found = self._reading[1].result()[2]
            if all(index in found for index in chunks):
                return {index: found[index] for index in chunks}
        _, _, found = self._call(self._read(step, chunks), f"reading batch {step}", _READ_TIMEOUT_S)
        return dict(found)

    # PolicyLog

    def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        """Append the announcement of a published version to the log's policies, and wait for Redis without limit.

        `is_replay`: the store had the version already, with equal weights. If asked to stop meanwhile, returns without
        having announced it, which the trainer that continues the run does.
        """
        # Without a deadline: Redis may be away for long, and the version is committed in the store.
        appending = self._background.submit(self._held.append_policy(entry, is_replay=is_replay))
        while not concurrent.futures.wait([appending], _POLL_S).done:
            if self._should_stop() or self._is_closed:  # closed: the training failed while this was under way
                appending.cancel()
                logger.warning("asked to stop before the policy was announced", extra={"version": entry.version})
                return
        appending.result()

    def write_event(self, event: event_pb2.Event) -> None:
        """Queue an event to be appended to the log, in order; wait for Redis only if very many are queued.

        Rank 0 only.
        """
        if self._events is None:
            raise InternalError("only rank 0 writes events", reason="NOT_LEADER")
        self._call(self._events.write(event), "writing an event", _WRITE_TIMEOUT_S)

    async def write(self, event: event_pb2.Event) -> None:
        """Queue an event to be appended to the log, from the background loop; do nothing at ranks other than 0."""
        if self._events is not None:
            await self._events.write(event)

    def flush(self) -> None:
        """Wait until every queued event is in the log.

        An error of Redis is raised only if asked to stop, else it is tried again. LogGoneError is raised at once.
        """
        while self._events is not None:
            try:
                return self._call(self._events.flush(), "writing events", _WRITE_TIMEOUT_S)
            except LogGoneError:
                raise
            except UnavailableError as error:
                if self._should_stop():
                    raise
                logger.warning("events not written; trying again", extra={"error": str(error)})

    def close(self, why: str) -> None:
        """Stop reading, write queued events, release the lease, and disconnect; log an error instead of raising it.

        `why` says in words how this training ended, for the trainer that holds the lease next (`before`).
        """
        self._is_closed = True
        self._cancel_reading()
        # Before the lease is released, because `keep` would take it for lost, or renew it.
        for future in (self._opening, self._keeping):
            if future is not None:
                future.cancel()
        try:
            self._call(self._close(why), "closing the log", _WRITE_TIMEOUT_S)
        # Not raised: this runs in a `finally`, and would replace the error that ended the training.
        except (MillraceError, OSError) as error:  # OSError: also a TimeoutError of the coroutine itself
            logger.warning("the run's log was not closed in order", extra={"error": str(error) or repr(error)})

    # On the background loop

    async def _open(self) -> None:
        """Open the log; at rank 0 also acquire the run's lease, which is renewed from then on, and a new epoch."""
        redis = open_redis(self._redis_url)
        self._log = RunLog(redis, self._store, names=self._names, generation=0, run_hash="")
        if not self._is_leader:
            await reopened(self._log)
            return
        self._hold = await Hold.take(self._log, owner=self._owner, slot=self._slot)
        self._keeping = self._background.submit(self._hold.keep())
        self._events = EventWriter(self._log, f"trainer-{self._hold.epoch.number}")

    async def _read(self, step: int, chunks: Sequence[int] | None, *, ahead: waits.Ahead | None = None) -> ReadBatch:
        """Wait for batch `step`, also while Redis does not answer.

        Return header, its bytes, and the chunks `chunks` by index. None: all chunks. The waits are those of `ahead`;
        None: of a caller that waits for the result.
        """
        run_log = self._opened

        async def read() -> ReadBatch:
            return await read_batch(run_log, step, want_chunks=chunks)

        # While a step is computed nobody waits for the next batch: `run why` would name a circle of trainer and
        # orchestrator that wait for each other, where the trainer works.
        with ahead or contextlib.nullcontext():
            if self._hold is not None:
                return await self._hold.outlasting(read)
            return await outlasting(read, reopen=lambda: reopened(run_log))

    async def _close(self, why: str) -> None:
        """Write queued events, release the lease with the reason `why`, and disconnect, each in bounded time."""
        if self._log is None:
            return
        try:
            if self._events is not None:
                await self._events.close(timeout_s=_CLOSE_S)
            if self._hold is not None:
                async with asyncio.timeout(_CLOSE_S):
                    await self._hold.release(why)
        finally:
            await self._log.redis.aclose()

    @property
    def _opened(self) -> RunLog:
        """Return the open log; raise InternalError if it is not open yet."""
        if self._log is None:
            raise InternalError("the log is not open yet", reason="NOT_OPEN")
        return self._log

    @property
    def _held(self) -> Hold:
        """Return the lease and epoch with which rank 0 holds the run; raise InternalError at other ranks."""
        if self._hold is None:
            raise InternalError("only rank 0 holds the run", reason="NOT_LEADER")
        return self._hold

    def _cancel_reading(self) -> None:
        """Stop reading ahead, if a batch is being read."""
        if self._reading is not None:
            self._reading[1].cancel()
            self._reading = None

    def _call(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        return self._background.call(coroutine, what=what, timeout_s=timeout_s)
