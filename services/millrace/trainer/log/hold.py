"""The trainer's hold on a run: lease and epoch, kept through restarts of Redis and through the loss of the log.

    take ──▶ HOLDING ──▶ renewed every third of the ttl, and the log's instance compared ──▶ HOLDING
                │            '── another copy of the log (rebuilt, or Redis restarted): append the policies it lacks
                '── another trainer has the lease or a newer epoch ──▶ LOST, for good

Nothing here loses the training's position: a call that needs a log that Redis lost registers a wait until the
orchestrator has rebuilt it, and then goes on. Everything runs on the background loop.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Self, TypeVar

from millrace.decoding import decode_message
from millrace.errors import STORAGE_ERRORS, FencedError, InternalError, LogGoneError, MillraceError, UnavailableError
from millrace.internal.v1 import policy_pb2
from millrace.runlog import AppendResult, Epoch, Lease, RunLog, Stream, reappend_policies
from millrace.runlog.records.numbered import epoch_owner, latest_epoch
from millrace.runlog.records.sealed import seal_key
from millrace.runlog.redis.lease import last_end
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROLE = "trainer"
LEASE_TTL_S = 10.0  # a successor in another place waits at most this long for a killed trainer's lease
_POLL_S = 0.5


class Hold:
    """Lease and epoch of one run. `take` makes one; `keep` must run to renew it."""

    def __init__(self, run_log: RunLog, lease: Lease, epoch: Epoch) -> None:
        """Take the lease and the epoch of a run, which the caller has acquired; `take` acquires both."""
        self._log = run_log
        self._lease = lease
        self._instance = ""  # of the copy that has every policy
        self._appending = asyncio.Lock()
        self._woken = asyncio.Event()  # `keep` has something to do
        self._present = asyncio.Event()  # Redis holds the log, as far as is known
        self._present.set()
        self.epoch = epoch
        self.before = ""
        """How the previous hold ended, as text; empty if this is the run's first."""
        self.lost: MillraceError | None = None
        """The error that ended the renewal for good, or None."""

    @classmethod
    async def take(cls, run_log: RunLog, *, owner: str, slot: str) -> Self:
        """Wait for the log and the lease, acquire a new epoch, append policies that the log lacks, and return it all.

        `owner` is the worker's id, and `slot` the address that one process at a time can have: a lease of the same slot
        does not have to expire. Waits without limit; cancel it to stop, which releases the lease. Raises FencedError
        (RUN_SEALED) if the run has ended.
        """
        wait, lease, has_waited = waits.LastingWait(), None, False
        try:
            while True:
                try:
                    await run_log.reopen()
                    if lease is None or not await lease.renew():  # held already if only a later call failed
                        lease = await Lease.acquire(run_log, ROLE, owner, LEASE_TTL_S, slot=slot)
                    if lease is not None:
                        await asyncio.to_thread(_require_unsealed, run_log)
                        # A lease only says who may try. From the new epoch on, the log refuses what a predecessor
                        # writes.
                        hold = cls(run_log, lease, await run_log.acquire_epoch(ROLE, owner))
                        # A predecessor may have died between a policy's manifest and its announcement.
                        await hold._follow_log()
                        hold.before = await _end_before(run_log, hold.epoch, lease, has_waited=has_waited)
                        logger.info("holding the run", extra={"run": run_log.uid, "epoch": hold.epoch.number})
                        return hold
                    has_waited = True
                    wait.on(f"lease of the trainer of run {run_log.uid}", waits_on="trainer", key="lease")
                # Redis or the store is away, full or closed to us, which passes; every other error ends the attempt.
                except STORAGE_ERRORS as error:
                    _wait_for(wait, error)
                await asyncio.sleep(_POLL_S)
        except BaseException:  # cleans up, then raises
            # Also when cancelled: a successor would have to wait until the lease expires.
            if lease is not None:
                await lease.release()
            raise
        finally:
            wait.over()

    async def keep(self) -> None:
        """Renew the lease, and append policies that the log lacks, until another trainer has the run or renewing fails.

        The reason is in `lost` then. Errors of Redis and of the store do not end it.
        """
        wait = waits.LastingWait()
        try:
            while self.lost is None:
                self._woken.clear()  # before the work, so that a wake-up during the work is handled after it
                pause_s = await self._keep_once(wait)
                if self.lost is None:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(pause_s):
                            await self._woken.wait()
        finally:
            wait.over()
        self._present.set()  # calls that wait for the log must end with the error that the hold is lost

    async def _keep_once(self, wait: waits.LastingWait) -> float:
        """Renew the lease once, and append policies that the log lacks; return the seconds until the next time.

        Sets `lost` if another trainer has the run, or on an unexpected error. `wait` is registered while the log is
        gone.
        """
        try:
            await self._renew()
            await self._follow_log()
            self._present.set()
            wait.over()
        except LogGoneError as error:
            self._present.clear()
            _wait_for(wait, error)
            return _POLL_S
        except STORAGE_ERRORS as error:
            logger.warning("lease not renewed; trying again", extra={"error": str(error)})
            if waits.Refusal.of(error) is not None:  # an outage shows in the calls that wait for Redis
                _wait_for(wait, error)
        except FencedError as error:
            self.lost = error
        except Exception as error:  # the edge of a task that nobody awaits: the job fails with `lost`
            logger.exception("the lease is no longer renewed", extra={"run": self._log.uid})
            self.lost = _renewal_failure(error, uid=self._log.uid)
        return self._lease.ttl_s / 3

    async def append_policy(self, entry: policy_pb2.PolicyEntry, *, is_replay: bool) -> None:
        """Append the announcement of a published version, however long Redis is away; raise `lost` if the run is lost.

        With `is_replay` a version that the log has dropped, or has differently, is no error.
        """
        what = f"announcing policy {entry.lineage}-{entry.version}"

        async def append() -> None:
            """Append the announcement if the lease is fresh.

            Raise UnavailableError, after waking `keep`, if it has to be renewed.
            """
            if not self._lease.may_write:
                self._woken.set()
                raise UnavailableError(f"the lease has to be renewed before {what}", reason="LEASE_STALE")
            # `_follow_log` appends versions in order as well, which two at a time would not.
            async with self._appending:
                await self._append(entry, what, is_replay)

        await self.outlasting(append)

    async def outlasting(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, repeated while Redis is away or lacks the log.

        Waiting is registered. Other errors of `attempt` are raised, and the error `lost` once another trainer has the
        run or the lease is no longer renewed.
        """

        async def present() -> None:
            """Wait until `keep` has found the log in Redis again, or has ended."""
            if self.lost is not None:  # `keep` has ended: nobody would set it again
                return
            # Cleared before `keep` is woken, which sets it once it has found the log.
            self._present.clear()
            self._woken.set()
            await self._present.wait()  # `keep` reopens the log, and registers the wait

        async def checked() -> T:
            if self.lost is not None:
                raise self.lost
            return await attempt()

        return await outlasting(checked, reopen=present)

    async def release(self, why: str) -> None:
        """Release the lease, unless another trainer has it.

        `why` says in words how this hold ended, for the next holder.
        """
        if not isinstance(self.lost, FencedError):
            await self._lease.release(why)

    async def _renew(self) -> None:
        """Renew the lease; raise FencedError if another trainer has it."""
        if not await self._lease.renew(epoch=self.epoch.number):
            raise FencedError(
                f"the trainer lease of run {self._log.uid} was lost",
                reason="LEASE_LOST",
                remedy="another trainer continues the run",
            )

    async def _follow_log(self) -> None:
        """Append the published policies that a new copy of the log lacks; do nothing for a copy that is known.

        Raises LogGoneError while there is no log, and FencedError if another trainer took an epoch.
        """
        try:
            instance = await self._log.read_instance()
        except LogGoneError:
            await self._log.reopen()
            instance = await self._log.read_instance()
        if instance == self._instance:
            return
        # A copy of the log that was rebuilt may not know of a newer epoch, so that the store is asked before anything
        # is appended.
        await self._require_newest_epoch()
        async with self._appending:
            count = await reappend_policies(self._log, self.epoch)
        # At the first call this trainer has just taken the log over, which is no event.
        if self._instance:
            fields = {"run": self._log.uid, "instance": instance, "appended": count}
            logger.warning(
                "Redis holds another copy of the run's log: the policies that it lacked are appended", extra=fields
            )
        # Set last: after an error in appending, the next call tries again.
        self._instance = instance

    async def _require_newest_epoch(self) -> None:
        """Raise FencedError if another trainer took an epoch while the log was away."""
        stored = await asyncio.to_thread(latest_epoch, self._log.store, self._log.names, ROLE)
        require_newest(max(stored, await self._log.current_epoch(ROLE)), held=self.epoch.number, uid=self._log.uid)

    async def _append(self, entry: policy_pb2.PolicyEntry, what: str, is_replay: bool) -> None:
        """Append a policy's announcement, under the lock `_appending`; `what` names the attempt in errors.

        If the log lacks earlier policies, all that it lacks are appended from the store. A version that the log has or
        has passed already is no error with `is_replay`, or if the log's entry announces equal weights.
        """
        data = entry.SerializeToString(deterministic=True)
        result = await self._log.append_policy(self.epoch, data, entry.version)
        if result is AppendResult.CONFLICT:
            if await self._log.next_position(Stream.POLICIES) <= entry.version:
                await reappend_policies(self._log, self.epoch)  # Redis lost its tail; the store has all of it
                return
            if is_replay or await self._is_announced(entry):
                return  # the stream has trimmed this version; its manifest in the store is known to be equal
        result.require(what)

    async def _is_announced(self, entry: policy_pb2.PolicyEntry) -> bool:
        """Return whether the log has an entry for this version with the same lineage and digest.

        Its manifest may differ.
        """
        id_ = f"{entry.version}-1"
        for found in await self._log.read_range(Stream.POLICIES, id_, id_):
            what = f"entry {id_} of the policies of run {self._log.uid}"
            known = decode_message(policy_pb2.PolicyEntry, found.d, what=what, reason="LOG_ENTRY_CORRUPT")
            return (known.lineage, known.digest) == (entry.lineage, entry.digest)
        return False


def _require_unsealed(run_log: RunLog) -> None:
    """Raise FencedError if the run has ended and is sealed (blocking): the assignment is older than its end."""
    # An epoch that is taken after the seal is named by nothing, and the audit would report it.
    if run_log.store.head(seal_key(run_log.store, run_log.names)) is not None:
        raise FencedError(f"run {run_log.uid} has ended, and is sealed", reason="RUN_SEALED")


async def _end_before(run_log: RunLog, epoch: Epoch, lease: Lease, *, has_waited: bool) -> str:
    """Return in words how the trainer with the epoch before `epoch` ended; empty if `epoch` is the run's first.

    It is taken from that trainer's report, and else from `lease`, which this trainer has acquired. `has_waited` says
    that the previous lease had to expire.
    """
    before = epoch.number - 1
    if not before:
        return ""
    owner = await asyncio.to_thread(epoch_owner, run_log.store, run_log.names, ROLE, before) or "the trainer before it"
    end = await last_end(run_log, ROLE)
    if end is not None and end.epoch == before:
        return f"{owner} gave the run back: {end.why}"
    if lease.taken_from:
        return f"the process of {owner} ended without giving the run back: it was killed, ran out of memory or crashed"
    silent = f"{owner} did not give the run back and renewed its lease no longer: its process or machine was "
    return silent + ("killed, frozen or cut off" if has_waited else "killed, or cut off from Redis")


def require_newest(newest: int, *, held: int, uid: str) -> None:
    """Raise FencedError if `newest`, the newest epoch of the run `uid`, is greater than the epoch `held` here."""
    if newest > held:
        raise FencedError(
            f"trainer epoch {newest} of run {uid} exists, this trainer holds {held}",
            reason="STALE_EPOCH",
            remedy="another trainer continues the run",
        )


async def outlasting(attempt: Callable[[], Awaitable[T]], *, reopen: Callable[[], Awaitable[None]]) -> T:
    """Return the result of `attempt`, repeated without limit while Redis is away, which is registered as a wait.

    If Redis lost the log, `reopen` is awaited before the next attempt. Other errors are raised.
    """
    wait = waits.LastingWait()
    try:
        while True:
            try:
                return await attempt()
            except LogGoneError:
                wait.over()
                await reopen()
            except STORAGE_ERRORS as error:
                _wait_for(wait, error)
                await asyncio.sleep(_POLL_S)
    finally:
        wait.over()


async def reopened(run_log: RunLog) -> None:
    """Wait without limit until the log can be opened again, which is registered as a wait.

    A lost log is rebuilt by the orchestrator.
    """
    wait = waits.LastingWait()
    try:
        while True:
            try:
                return await run_log.reopen()
            except STORAGE_ERRORS as error:
                _wait_for(wait, error)
            await asyncio.sleep(_POLL_S)
    finally:
        wait.over()


def _wait_for(wait: waits.LastingWait, error: MillraceError) -> None:
    """Register the wait that `error` causes: for the orchestrator if the log is lost, else for store or Redis."""
    if error.reason == "LOG_DAMAGED":
        wait.on(f"the run's log to be rebuilt: {error.message}", waits_on="orchestrator", key=error.message)
    elif isinstance(error, LogGoneError):
        wait.on("the run's log to be rebuilt, which Redis lost", waits_on="orchestrator", key=error.reason)
    else:
        waits_on = "object store" if error.reason.startswith("STORE_") else "redis"
        wait.on(error.message, waits_on=waits_on, key=error.reason, refusal=waits.Refusal.of(error))


def _renewal_failure(error: Exception, *, uid: str) -> MillraceError:
    """Return the error with which the job of run `uid` fails after renewing its lease raised `error`.

    It is `error` itself, or an InternalError for an exception that is no MillraceError.
    """
    if isinstance(error, MillraceError):
        return error
    failure = InternalError(
        f"renewing the trainer lease of run {uid} failed: {type(error).__name__}: {error}",
        reason="LEASE_RENEWAL_FAILED",
        remedy="this is a defect: see the trainer's log",
    )
    failure.__cause__ = error
    return failure
