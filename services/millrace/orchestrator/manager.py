"""Which runs this replica drives: it claims open runs by lease when a trainer is free, and keeps the leases."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import redis.asyncio

from millrace.errors import FencedError, MillraceError, all_errors
from millrace.internal.v1 import worker_service_pb2
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.run_driver import RunDriver
from millrace.orchestrator.run_view import RunView
from millrace.orchestrator.workers import WorkerRegistry
from millrace.runlog import EventWriter, Lease, RunLog
from millrace.storage import ObjectStore

log = logging.getLogger(__name__)

ROLE = "orchestrator"
LEASE_TTL_S = 15.0
SCAN_S = 0.5
"""How often open runs are looked for; CreateRun also wakes the scan at once."""
CANCEL_POLL_S = 2.0
"""How often the intents of a run are read, for cancellations that another replica acknowledged."""
BACKOFF_S = 5.0
"""Pause before a run is tried again whose claim or drive failed."""


@dataclass(slots=True)
class _Claim:
    """A run that this replica drives or tries to."""

    driver: RunDriver | None = None
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True
        if self.driver is not None:
            self.driver.cancel()


class RunManager:
    """Claims and drives runs until it is stopped. Nothing that one run does ends the service."""

    def __init__(
        self,
        *,
        owner: str,
        redis: redis.asyncio.Redis,
        store: ObjectStore,
        prefix: str,
        catalog: RunCatalog,
        registry: WorkerRegistry,
        on_scan: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._redis = redis
        self._store = store
        self._prefix = prefix
        self._catalog = catalog
        self._registry = registry
        self._on_scan = on_scan
        self._claims: dict[str, _Claim] = {}
        self._not_before: dict[str, float] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look for open runs now."""
        self._wake.set()

    def cancel(self, uid: str) -> None:
        """Tell the driver of a run, if it is here, that its cancellation was acknowledged."""
        if uid in self._claims:
            self._claims[uid].cancel()
        self._not_before.pop(uid, None)
        self.wake()

    async def run(self) -> None:
        """Claim and drive; ends by cancellation, which releases every lease."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._registry.keep_pulse())
            while True:
                self._wake.clear()
                self._on_scan()
                for view in await self._claimable():
                    self._claims[view.record.uid] = _Claim()
                    tasks.create_task(self._drive_safely(view))
                try:
                    async with asyncio.timeout(SCAN_S):
                        await self._wake.wait()
                except TimeoutError:
                    continue

    async def _claimable(self) -> list[RunView]:
        """Open runs that nobody drives here, oldest first: those that get a trainer, or only need their closing."""
        found = []
        try:
            views = await self._catalog.refresh()
        except MillraceError as error:
            log.warning("cannot list runs, trying again", extra={"error": str(error)})
            return []
        for view in views:
            uid = view.record.uid
            if view.is_terminal or uid in self._claims or time.monotonic() < self._not_before.get(uid, 0.0):
                continue
            try:
                trainers = self._registry.claim(worker_service_pb2.WORKER_KIND_TRAINER, uid, limit=1)
                if trainers or await self._is_cancelled(await self._catalog.open_log(uid)):
                    found.append(view)
            except MillraceError as error:
                self._back_off(view, error)
        return found

    async def _drive_safely(self, view: RunView) -> None:
        uid = view.record.uid
        try:
            await self._drive(view)
        except Exception as error:  # noqa: BLE001 - the edge of a run: whatever it was, the other runs go on
            self._back_off(view, error)
        finally:
            del self._claims[uid]
            self._registry.release(uid)

    def _back_off(self, view: RunView, error: Exception) -> None:
        self._not_before[view.record.uid] = time.monotonic() + BACKOFF_S
        causes = "; ".join(f"{type(cause).__name__}: {cause}" for cause in all_errors(error))
        fields = {"run": view.record.name, "again_in_s": BACKOFF_S, "error": causes}
        known = all(isinstance(cause, MillraceError) for cause in all_errors(error))
        log.error("run given up by this replica for now", extra=fields, exc_info=None if known else error)

    async def _drive(self, view: RunView) -> None:
        record, claim = view.record, self._claims[view.record.uid]
        run_log = await self._catalog.open_log(record.uid)
        lease = await Lease.acquire(run_log, ROLE, self._owner, LEASE_TTL_S)
        if lease is None:
            self._not_before[record.uid] = time.monotonic() + SCAN_S
            return
        try:
            epoch = await run_log.acquire_epoch(ROLE, self._owner)
            await lease.renew(epoch=epoch.number)
            events = RunEvents(EventWriter(run_log, self._owner))
            events.state = view.run.state
            try:
                claim.driver = RunDriver(
                    record=record,
                    run_log=run_log,
                    epoch=epoch,
                    lease=lease,
                    registry=self._registry,
                    events=events,
                )
                if claim.is_cancelled or await self._is_cancelled(run_log):
                    claim.cancel()
                log.info("run claimed", extra={"run": record.name, "epoch": epoch.number})
                async with asyncio.TaskGroup() as tasks:
                    keepers = [
                        tasks.create_task(self._renew(lease, run_log)),
                        tasks.create_task(self._look_for_cancel(claim, run_log)),
                    ]
                    await claim.driver.run()
                    for keeper in keepers:
                        keeper.cancel()
            finally:
                await events.close()
        finally:
            await lease.release()

    async def _renew(self, lease: Lease, run_log: RunLog) -> None:
        """Renew the lease at a third of its ttl; losing it ends the drive."""
        while True:
            await asyncio.sleep(LEASE_TTL_S / 3)
            if not await lease.renew():
                raise FencedError(
                    f"the lease of run {run_log.uid} was lost to another orchestrator",
                    reason="LEASE_LOST",
                    remedy="that one continues the run",
                )

    async def _look_for_cancel(self, claim: _Claim, run_log: RunLog) -> None:
        while not await self._is_cancelled(run_log):  # noqa: ASYNC110 - the intent is an object in the store
            await asyncio.sleep(CANCEL_POLL_S)
        claim.cancel()

    async def _is_cancelled(self, run_log: RunLog) -> bool:
        return any(intent.kind == "cancel" for intent in await run_log.read_intents())
