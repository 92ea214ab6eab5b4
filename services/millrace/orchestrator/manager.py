"""Which runs this replica drives: it claims queued runs by lease when workers are free, and keeps the leases."""

import asyncio
import logging
from collections.abc import Callable

import redis.asyncio

from millrace.errors import FencedError, LogGoneError, MillraceError, UnavailableError
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


class RunManager:
    """Claims and drives runs until it is stopped."""

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
        self._drivers: dict[str, RunDriver] = {}
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Look for open runs now."""
        self._wake.set()

    def cancel(self, uid: str) -> None:
        """Tell the driver of a run, if it is here, that its cancellation was acknowledged."""
        driver = self._drivers.get(uid)
        if driver is not None:
            driver.cancel()
        self.wake()

    async def run(self) -> None:
        """Claim and drive; ends by cancellation, which releases every lease."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                self._on_scan()
                for view in await self._open_runs():
                    if view.record.uid not in self._drivers and await self._is_claimable(view):
                        tasks.create_task(self._drive(view))
                        await asyncio.sleep(0)
                try:
                    async with asyncio.timeout(SCAN_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    async def _open_runs(self) -> list[RunView]:
        try:
            return [view for view in await self._catalog.refresh() if not view.is_terminal]
        except UnavailableError as error:
            log.warning("cannot list runs, trying again", extra={"error": str(error)})
            return []

    async def _is_claimable(self, view: RunView) -> bool:
        """A run is claimed when a trainer is free for it, or when it was cancelled and only needs its closing."""
        trainers = self._registry.alive(worker_service_pb2.WORKER_KIND_TRAINER)
        return any(record.run_uid in ("", view.record.uid) for record in trainers) or await self._is_cancelled(view)

    async def _is_cancelled(self, view: RunView) -> bool:
        run_log = await RunLog.open(self._redis, self._store, prefix=self._prefix, uid=view.record.uid)
        return any(intent.kind == "cancel" for intent in await run_log.read_intents())

    async def _drive(self, view: RunView) -> None:
        record = view.record
        try:
            run_log = await RunLog.open(self._redis, self._store, prefix=self._prefix, uid=record.uid)
            lease = await Lease.acquire(run_log, ROLE, self._owner, LEASE_TTL_S)
            if lease is None:
                return
            try:
                epoch = await run_log.acquire_epoch(ROLE, self._owner)
                events = RunEvents(EventWriter(run_log, self._owner))
                events.state = view.run.state
                driver = RunDriver(record=record, run_log=run_log, epoch=epoch, registry=self._registry, events=events)
                self._drivers[record.uid] = driver
                log.info("run claimed", extra={"run": record.name, "epoch": epoch.number})
                try:
                    async with asyncio.TaskGroup() as tasks:
                        keeper = tasks.create_task(self._keep(lease, driver, run_log))
                        await driver.run()
                        keeper.cancel()
                finally:
                    await events.close()
            finally:
                await lease.release()
        except* (FencedError, LogGoneError) as group:
            log.error("run given up by this replica", extra={"run": record.name, "error": str(group.exceptions[0])})
        except* MillraceError as group:
            log.error("run claim failed, trying again", extra={"run": record.name, "error": str(group.exceptions[0])})
            await asyncio.sleep(SCAN_S)
        finally:
            self._drivers.pop(record.uid, None)

    async def _keep(self, lease: Lease, driver: RunDriver, run_log: RunLog) -> None:
        """Renew the lease at a third of its ttl and look for a cancellation; losing the lease ends the drive."""
        while True:
            if any(intent.kind == "cancel" for intent in await run_log.read_intents()):
                driver.cancel()
            await asyncio.sleep(min(CANCEL_POLL_S, LEASE_TTL_S / 3))
            if not await lease.renew():
                raise FencedError(
                    f"the lease of run {run_log.uid} was lost to another orchestrator", reason="LEASE_LOST"
                )
