"""The trainer's synchronous client of a run's log.

All waiting is done on the background loop: the next batch is read while the current one is trained on, the lease is
renewed, and events are appended in order. Rank 0 of a gang holds lease and epoch and writes; the other ranks open the
log only to read their chunks.
"""

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from millrace.errors import InternalError, LogGoneError, MillraceError, UnavailableError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.runlog import EventWriter, Names, RunLog, open_redis
from millrace.runlog.records.revisions import read_header
from millrace.runlog.redis.batch_reader import read_batch
from millrace.storage import ObjectStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.log.hold import Hold, outlasting, reopened
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

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
        self._reading: tuple[int, concurrent.futures.Future[ReadBatch]] | None = None

    def begin(self) -> None:
        """Start to open the log in the background; the leader also takes the lease and a new epoch.

        That may take long: a dead predecessor's lease has to expire, or a lost log to be rebuilt.
        """
        self._opening = self._background.submit(self._open())

    def poll_ready(self, *, timeout_s: float) -> bool:
        """Wait up to `timeout_s` until the log is open, and at the leader held; return whether it is.

        Raises what opening raised.
        """
        assert self._opening is not None
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
        """Return the fencing epoch that this trainer holds."""
        return self._held.epoch.number

    @property
    def before(self) -> str:
        """Return how the previous training of the run ended, as text; empty if there was none."""
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
        """Start to read a step in the background, until it is there; cancel the reading of another step.

        A process alone reads all chunks; a rank of a gang reads only the header.
        """
        if self._reading is None or self._reading[0] != step:
            self._cancel_reading()
            self._reading = step, self._background.submit(self._read(step, None if self._is_alone else []))

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """Wait for the header of a step and return it as stored; None if it is not there in time."""
        self.prefetch(step)
        assert self._reading is not None
        done, _ = concurrent.futures.wait([self._reading[1]], timeout_s)
        return self._reading[1].result()[1] if done else None

    def read_superseded(self, step: int, revisions: int) -> list[bytes]:
        """Read the first `revisions` headers of a step as stored; every rank reads them itself."""
        return [read_header(self._store, self._names, step, revision) for revision in range(revisions)]

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """Return chunks of a committed step by their index, each verified against the header."""
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
        """Announce a published version in the log; `is_replay`: the store had it already, with equal weights.

        Waits for Redis without limit. If asked to stop meanwhile, returns without having announced it, which the
        trainer that continues the run does.
        """
        appending = self._background.submit(self._held.append_policy(entry, is_replay=is_replay))
        while not concurrent.futures.wait([appending], _POLL_S).done:
            if self._should_stop() or self._is_closed:  # closed: the training failed while this was under way
                appending.cancel()
                logger.warning("asked to stop before the policy was announced", extra={"version": entry.version})
                return
        appending.result()

    def write_event(self, event: event_pb2.Event) -> None:
        """Queue an event, in order; wait for Redis only if very many are queued."""
        if self._events is None:
            raise InternalError("only rank 0 writes events", reason="NOT_LEADER")
        self._call(self._events.write(event), "writing an event", _WRITE_TIMEOUT_S)

    async def write(self, event: event_pb2.Event) -> None:
        """Queue an event, as `write_event` does, from the background loop; do nothing at ranks other than 0."""
        if self._events is not None:
            await self._events.write(event)

    def flush(self) -> None:
        """Wait until every event is in the log; an error of Redis is raised only if asked to stop, else tried again.

        LogGoneError is raised at once.
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

        `why` says how this training ended, for `before` of the trainer that holds the lease next.
        """
        self._is_closed = True
        self._cancel_reading()
        for future in (self._opening, self._keeping):
            if future is not None:
                future.cancel()
        try:
            self._call(self._close(why), "closing the log", _WRITE_TIMEOUT_S)
        except (MillraceError, OSError) as error:  # OSError: also a TimeoutError of the coroutine itself
            logger.warning("the run's log was not closed in order", extra={"error": str(error) or repr(error)})

    # On the background loop

    async def _open(self) -> None:
        """Open the log; the leader also takes the hold, begins to renew it, and opens the event writer."""
        redis = open_redis(self._redis_url)
        self._log = RunLog(redis, self._store, names=self._names, generation=0, run_hash="")
        if not self._is_leader:
            await reopened(self._log)
            return
        self._hold = await Hold.take(self._log, owner=self._owner, slot=self._slot)
        self._keeping = self._background.submit(self._hold.keep())
        self._events = EventWriter(self._log, f"trainer-{self._hold.epoch.number}")

    async def _read(self, step: int, chunks: Sequence[int] | None) -> ReadBatch:
        """Read a step with these chunks (None: all); wait until it is there, also while Redis does not answer."""
        run_log = self._opened

        async def read() -> ReadBatch:
            return await read_batch(run_log, step, want_chunks=chunks)

        if self._hold is not None:
            return await self._hold.outlasting(read)
        return await outlasting(read, reopen=lambda: reopened(run_log))

    async def _close(self, why: str) -> None:
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
        if self._log is None:
            raise InternalError("the log is not open yet", reason="NOT_OPEN")
        return self._log

    @property
    def _held(self) -> Hold:
        if self._hold is None:
            raise InternalError("only rank 0 holds the run", reason="NOT_LEADER")
        return self._hold

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].cancel()
            self._reading = None

    def _call(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        return self._background.call(coroutine, what=what, timeout_s=timeout_s)
