"""The trainer's synchronous face of a run's log.

Everything that waits happens on the background loop: the batch after the current one is read while the current one is
trained on, the lease is renewed, events are appended in order. Rank 0 of a gang holds lease and epoch and writes; the
other ranks open the log only to read their chunks.
"""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Self

from millrace.errors import CapacityError, FencedError, InternalError, LogGoneError, MillraceError, UnavailableError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.runlog import AppendResult, Epoch, EventWriter, Lease, RunLog, Stream, open_redis, reappend_policies
from millrace.storage import ObjectStore
from millrace.telemetry import logging, waits
from millrace.trainer.background import BackgroundLoop
from millrace.trainer.batches import StopRequested
from millrace.v1 import event_pb2

log = logging.getLogger(__name__)

ROLE = "trainer"
LEASE_TTL_S = 10.0  # a successor of a killed trainer waits at most this long
_LEASE_POLL_S = 0.5
_RETRY_S = 1.0
_READ_TIMEOUT_S = 600.0  # chunks of a batch; the store's own retries end long before
_WRITE_TIMEOUT_S = 120.0

ReadBatch = tuple[batch_pb2.BatchHeader, bytes, Mapping[int, bytes]]


class LogClient:
    """One run's log. Make it by `open`; `close` releases the lease."""

    def __init__(self, background: BackgroundLoop, run_log: RunLog, *, should_stop: Callable[[], bool]) -> None:
        self._background = background
        self._log = run_log
        self._should_stop = should_stop
        self._lease: Lease | None = None
        self._epoch: Epoch | None = None
        self._events: EventWriter | None = None
        self._renewal: concurrent.futures.Future[None] | None = None
        self._lost: MillraceError | None = None  # why the lease is no longer renewed
        self._reading: tuple[int, concurrent.futures.Future[ReadBatch]] | None = None
        self._wants_chunks = False

    @classmethod
    def open(
        cls,
        background: BackgroundLoop,
        *,
        redis_url: str,
        store: ObjectStore,
        prefix: str,
        uid: str,
        owner: str,
        is_leader: bool,
        is_alone: bool,
        should_stop: Callable[[], bool],
    ) -> Self:
        """Opens the log; the leader waits for the lease (a dead predecessor's must run out) and takes a new epoch.

        Raises StopRequested if asked to stop while it waits. `is_alone` says that the leader also reads all chunks.
        """

        async def connect() -> RunLog:
            return await RunLog.open(open_redis(redis_url), store, prefix=prefix, uid=uid)

        run_log = background.call(connect(), what=f"opening the log of run {uid}", timeout_s=_WRITE_TIMEOUT_S)
        client = cls(background, run_log, should_stop=should_stop)
        client._wants_chunks = is_alone
        if is_leader:
            try:
                client._hold(owner)
            except BaseException:  # cleans up, then raises
                client.close()
                raise
        return client

    @property
    def run_hash(self) -> str:
        """sha256 of the run's resolved config, hex."""
        return self._log.run_hash

    @property
    def epoch(self) -> int:
        """The fencing epoch that this trainer holds."""
        return self._held_epoch.number

    def run_json(self) -> bytes:
        """The record of the run, as it was created."""
        return self._call(self._log.run_json(), "reading run.json", _READ_TIMEOUT_S)

    # BatchLog

    def is_stop_requested(self) -> bool:
        """Whether to let go of the run; raises why the lease is no longer renewed, if so (FencedError: lost)."""
        if self._lost is not None:
            raise self._lost
        return self._should_stop()

    def prefetch(self, step: int) -> None:
        """Begins to read a step in the background; the reading goes on until it comes."""
        if self._reading is None or self._reading[0] != step:
            self._cancel_reading()
            self._reading = step, self._background.submit(self._read(step))

    def poll_header(self, step: int, *, timeout_s: float) -> bytes | None:
        """The header of a step as stored, or None if it is not there within the time."""
        self.prefetch(step)
        assert self._reading is not None
        done, _ = concurrent.futures.wait([self._reading[1]], timeout_s)
        return self._reading[1].result()[1] if done else None

    def read_chunks(self, step: int, chunks: Sequence[int]) -> dict[int, bytes]:
        """The named chunks of a committed step, each verified against the header."""
        if not chunks:
            return {}
        if self._reading is not None and self._reading[0] == step and self._reading[1].done():
            found = self._reading[1].result()[2]
            if all(index in found for index in chunks):
                return {index: found[index] for index in chunks}
        reading = self._log.read_batch(step, want_chunks=chunks, timeout_s=_READ_TIMEOUT_S)
        _, _, found = self._call(reading, f"reading batch {step}", _READ_TIMEOUT_S)
        return dict(found)

    # PolicyLog

    def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        """Appends a published version. `is_replay`: the store had it already, with equal weights."""
        what = f"announcing policy {entry.lineage}-{entry.version}"
        self._call(self._append_policy(entry, what, is_replay), what, _WRITE_TIMEOUT_S)

    def write_event(self, event: event_pb2.Event) -> None:
        """Appends an event, in order, without waiting for Redis unless very many are queued."""
        if self._events is None:
            raise InternalError("only rank 0 writes events", reason="NOT_LEADER")
        self._call(self._events.write(event), "writing an event", _WRITE_TIMEOUT_S)

    def flush(self) -> None:
        """Returns when every event is in the log."""
        if self._events is not None:
            self._call(self._events.flush(), "writing events", _WRITE_TIMEOUT_S)

    def close(self) -> None:
        """Ends reading, writes what is queued, gives the lease back. Logs what fails: the caller is leaving anyway."""
        self._cancel_reading()
        if self._renewal is not None:
            self._renewal.cancel()
        try:
            self._call(self._close(), "closing the log", _WRITE_TIMEOUT_S)
        except (MillraceError, OSError) as error:  # OSError: also a TimeoutError of the coroutine itself
            log.warning("the run's log was not closed in order", extra={"error": str(error) or repr(error)})

    # On the background loop

    def _hold(self, owner: str) -> None:
        """Takes lease and epoch, begins to renew, opens the event writer."""
        uid = self._log.uid
        with waits.waiting(f"lease of the trainer of run {uid}", waits_on="trainer"):
            while True:
                acquiring = Lease.acquire(self._log, ROLE, owner, LEASE_TTL_S)
                self._lease = self._call(acquiring, "acquiring the lease", _WRITE_TIMEOUT_S)
                if self._lease is not None:
                    break
                if self._should_stop():
                    raise StopRequested
                time.sleep(_LEASE_POLL_S)
        acquired: Epoch = self._call(self._log.acquire_epoch(ROLE, owner), "acquiring an epoch", _WRITE_TIMEOUT_S)
        self._epoch = acquired
        self._renewal = self._background.submit(self._renew(self._lease, acquired))
        # A predecessor may have died between a policy's manifest and its announcement, which others wait for.
        self._call(reappend_policies(self._log, acquired), "announcing published policies", _WRITE_TIMEOUT_S)

        async def open_events() -> EventWriter:
            return EventWriter(self._log, f"trainer-{self.epoch}")

        self._events = self._call(open_events(), "opening the event writer", _WRITE_TIMEOUT_S)
        log.info("holding the run", extra={"run": uid, "epoch": self.epoch})

    async def _renew(self, lease: Lease, epoch: Epoch) -> None:
        """Renews at a third of the ttl; losing the lease to another holder ends the job, and so does any defect."""
        while True:
            try:
                if not await lease.renew(epoch=epoch.number):
                    reason = f"the trainer lease of run {self._log.uid} was lost"
                    self._lost = FencedError(reason, reason="LEASE_LOST", remedy="another trainer continues the run")
                    return
            except (UnavailableError, CapacityError) as error:
                log.warning("lease not renewed; trying again", extra={"error": str(error)})
            except Exception as error:  # the edge of a task that nobody awaits: the job must hear of it
                log.exception("the lease is no longer renewed", extra={"run": self._log.uid})
                self._lost = _renewal_failure(error, uid=self._log.uid)
                return
            await asyncio.sleep(lease.ttl_s / 3)

    async def _read(self, step: int) -> ReadBatch:
        """Reads a step, for as long as it takes; a gang's leader leaves the chunks to each rank."""
        while True:
            try:
                return await self._log.read_batch(step, want_chunks=None if self._wants_chunks else [])
            except LogGoneError:
                raise
            except UnavailableError as error:
                log.warning("batch not readable; trying again", extra={"step": step, "error": str(error)})
                await asyncio.sleep(_RETRY_S)

    async def _append_policy(self, entry: policy_pb2.PolicyEntry, what: str, is_replay: bool) -> None:
        await self._until_may_write(what)
        data = entry.SerializeToString(deterministic=True)
        result = await self._log.append_policy(self._held_epoch, data, entry.version)
        if result is AppendResult.CONFLICT:
            if await self._log.next_position(Stream.POLICIES) <= entry.version:
                await reappend_policies(self._log, self._held_epoch)  # Redis lost its tail; the store has all of it
                return
            if is_replay:
                return  # the stream is past this version and trimmed it; its manifest is proven equal
        result.require(what)

    async def _until_may_write(self, what: str) -> None:
        """Waits until the lease is fresh again; raises why once it is no longer renewed."""
        if self._lease is not None and self._lease.may_write:
            return
        with waits.waiting(f"the lease's renewal before {what}", waits_on="redis", deadline_s=_WRITE_TIMEOUT_S):
            while self._lease is None or not self._lease.may_write:
                if self._lost is not None:
                    raise self._lost
                await asyncio.sleep(_LEASE_POLL_S)

    async def _close(self) -> None:
        try:
            if self._events is not None:
                await self._events.close()
            if self._lease is not None and not isinstance(self._lost, FencedError):
                await self._lease.release()
        finally:
            await self._log.redis.aclose()

    @property
    def _held_epoch(self) -> Epoch:
        if self._epoch is None:
            raise InternalError("only rank 0 holds an epoch", reason="NOT_LEADER")
        return self._epoch

    def _cancel_reading(self) -> None:
        if self._reading is not None:
            self._reading[1].cancel()
            self._reading = None

    def _call(self, coroutine: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        return self._background.call(coroutine, what=what, timeout_s=timeout_s)


def _renewal_failure(error: Exception, *, uid: str) -> MillraceError:
    """What the job fails with when renewing raised `error`."""
    if isinstance(error, MillraceError):
        return error
    failure = InternalError(
        f"renewing the trainer lease of run {uid} failed: {type(error).__name__}: {error}",
        reason="LEASE_RENEWAL_FAILED",
        remedy="this is a defect: see the trainer's log",
    )
    failure.__cause__ = error
    return failure
