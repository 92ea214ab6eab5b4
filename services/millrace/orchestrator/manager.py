"""Which runs this replica drives: it claims open runs by lease when a trainer is free, and keeps the leases."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from millrace.custom_code import CustomCode
from millrace.errors import CorruptObjectError, FencedError, LogGoneError, MillraceError, all_errors
from millrace.orchestrator import run_meters
from millrace.orchestrator.beside import LogPlace, Readers
from millrace.orchestrator.catalog import RunCatalog, RunView
from millrace.orchestrator.chain import storage_of
from millrace.orchestrator.drive.assembly import RunParts
from millrace.orchestrator.drive.run_driver import RunDriver
from millrace.orchestrator.drive.sealer import Sealer, ended_lately
from millrace.orchestrator.drive.train_run import EvalRunDriver, TrainRunDriver
from millrace.orchestrator.events import RunContext, RunEvents
from millrace.orchestrator.intents import POLL_S, PREEMPT, ROLE, DesiredState, DesiredStates
from millrace.orchestrator.queue.groups import NO_GROUPS
from millrace.orchestrator.queue.order import QueueGroup
from millrace.orchestrator.waiting import RunQueue
from millrace.orchestrator.watchdog import Watchdog, report_takeover
from millrace.orchestrator.why import HeldUp, explain, queued_words
from millrace.orchestrator.workers import RETIRED_S, WorkerKind, WorkerRegistry
from millrace.runlog import EventWriter, Lease, RunLog
from millrace.runlog.names import Names
from millrace.runlog.records.numbered import write_intent
from millrace.runlog.records.revisions import load_reopenings
from millrace.runlog.records.run_record import EVAL
from millrace.runlog.records.sealed import is_sealed
from millrace.runlog.redis.lease import read_held
from millrace.runlog.run_status import TERMINAL
from millrace.telemetry import faults, waits
from millrace.v1 import run_pb2, run_service_pb2

logger = logging.getLogger(__name__)

LEASE_TTL_S = 15.0
SCAN_S = 0.5
"""How often open runs are looked for; CreateRun also wakes the scan at once."""
SEALED_S = 5.0
"""How long an open run that has a seal is left to the orchestrator that ends it."""
BACKOFF_S = 5.0
"""Pause before a run is tried again whose claim or drive failed."""
DAMAGED_PAUSE_S = 30.0
"""The same for a run some of whose objects cannot be read: each try takes an epoch, and somebody has to repair it."""
MAX_GONE, GONE_WINDOW_S = 3, 60.0
"""How often within the window a run whose log was gone is claimed again without a pause."""

Work: TypeAlias = Callable[[RunView], Awaitable[None]]
"""What is done with a run under its claim."""


@dataclass(slots=True)
class _Claim:
    """A run that this replica drives or tries to."""

    driver: RunDriver | None = None
    lease: Lease | None = None
    desired: DesiredState = field(default_factory=DesiredState)

    def apply(self, desired: DesiredState) -> None:
        """Keep what the user asks of the run, and pass it to the run's driver, if there is one."""
        self.desired = desired
        if self.driver is not None:
            self.driver.apply(desired)


class RunManager:
    """Claims and drives runs until it is stopped. Nothing that one run does ends the service."""

    def __init__(
        self,
        *,
        owner: str,
        place: LogPlace,
        catalog: RunCatalog,
        registry: WorkerRegistry,
        readers: Readers,
        on_scan: Callable[[], None],
        custom_code: CustomCode | None = None,
        groups: Mapping[str, QueueGroup] = NO_GROUPS,
    ) -> None:
        """Make a manager that has no run; `owner` names this orchestrator.

        `on_scan` is called at each look for runs, which shows that the manager works. `custom_code` are the modules of
        users' code that runs may load, None for none. `groups` are those of the queue.
        """
        self._owner = owner
        self._redis, self._store, self._prefix = place.redis, place.store, place.prefix
        self._catalog = catalog
        self._registry = registry
        self._readers = readers
        self._on_scan = on_scan
        self.custom_code = custom_code or CustomCode()
        self.queue = RunQueue(catalog=catalog, registry=registry, groups=groups)
        """Who waits for workers, and why."""
        self._desired = DesiredStates(place.store, place.prefix)
        self._claims: dict[str, _Claim] = {}
        self._sealed: dict[str, float] = {}
        self._not_before: dict[str, float] = {}
        self._pauses: dict[str, waits.LastingWait] = {}
        self._gone: dict[str, list[float]] = {}
        self._kept_events: dict[str, RunEvents] = {}
        self._retired: set[str] = set()
        self._ended: dict[str, RunView] = {}
        self._sealer = Sealer(catalog, owner=owner)
        self.held_up = HeldUp(registry, owner=owner)
        """Which runs get nowhere because something refuses."""
        self._wake = asyncio.Event()
        self.slot = ""
        """Place that only one orchestrator can have at a time: leases of a predecessor there are taken over at once."""

    def wake(self) -> None:
        """Have the loop look for runs to drive now."""
        self._wake.set()

    def progress(self, uid: str) -> run_pb2.RunProgress | None:
        """Return the progress of an evaluation run that this process drives, which no event reports.

        None for other runs.
        """
        claim = self._claims.get(uid)
        return claim.driver.progress() if claim and claim.driver else None

    def holds(self, uid: str) -> bool:
        """Return whether this process works on the run.

        It may, for its exports, for a while after the run has ended.
        """
        return uid in self._claims

    def explain(self, view: RunView, *, note: str = "", tenant: str = "") -> run_service_pb2.ExplainRunResponse:
        """Return why a run does not move (`why.explain`), with its place in the queue if it waits for workers.

        `note` says why the view may be old, "" if it is not. For a `tenant` the text leaves others' runs out.
        """
        uid = view.record.uid
        return explain(
            view,
            self._registry,
            owner=self._owner,
            note="; ".join(filter(None, [note, self.queue.note(uid)])),
            name_of=partial(self.queue.name_of, tenant=tenant),
            is_held=self.holds(uid),
            place=self.queue.words(uid, tenant=tenant),
            tenant=tenant,
        )

    def queue_place(self, view: RunView, *, tenant: str = "") -> str:
        """Return in words where a QUEUED run waits and why, for a `tenant` without others' runs; else an empty text."""
        if view.run.state != run_pb2.RUN_STATE_QUEUED:
            return ""
        uid, name_of = view.record.uid, partial(self.queue.name_of, tenant=tenant)
        place = self.queue.words(uid, tenant=tenant)
        return queued_words(uid, self._registry, owner=self._owner, name_of=name_of, place=place)

    def driven(self) -> list[tuple[RunParts, bool]]:
        """Return the parts of each run that this process drives, and whether it may write to the run: its lease is
        fresh.
        """
        claims = list(self._claims.values())
        return [(c.driver.parts, c.lease.may_write) for c in claims if c.driver is not None and c.lease is not None]

    async def apply(self, uid: str) -> None:
        """Pass the run's newest intents to its driver, if it is driven here, and look for open runs now.

        Called after an intent was written; a pause before another try to drive the run ends.
        """
        self._desired.expire(uid)
        if uid in self._claims:
            desired = await self._desired.read(uid)
            if uid in self._claims:
                self._claims[uid].apply(desired)
        self._not_before.pop(uid, None)
        self.wake()

    async def run(self) -> None:
        """Claim runs and drive them until cancelled, which releases every lease."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._registry.keep_pulse())
                tasks.create_task(self._sealer.run())
                tasks.create_task(self.queue.read_ended())
                tasks.create_task(self.queue.preempt(self._preempt))
                tasks.create_task(self.held_up.run(lambda: self._catalog.views))
                while True:
                    self._wake.clear()
                    self._on_scan()
                    for view, work in await self._claimable():
                        # Before its task begins, so that no later look claims the run once more.
                        self._claims[view.record.uid] = _Claim()
                        tasks.create_task(self._safely(view, work))
                    try:
                        async with asyncio.timeout(SCAN_S):
                            await self._wake.wait()
                    except TimeoutError:
                        continue
        finally:
            for uid in list(self._pauses):
                # This process waits for nothing any more; another replica takes the runs.
                self._end_pause(uid)
            for events in self._kept_events.values():
                await _try_to("write the last events", events.close())

    async def _claimable(self) -> list[tuple[RunView, Work]]:
        """Return the runs to work on now that this process does not drive, and what is to be done with each.

        Those without a failed try come first, the oldest first; then those that were tried the longest ago. Runs that
        have ended are retired and queued for their seals. Nothing is returned if the runs cannot be listed.
        """
        try:
            views = await self._catalog.refresh()
        except MillraceError as error:
            logger.warning("cannot list runs, trying again", extra={"error": str(error)})
            return []
        # A replica that serves a run which goes on is kept for the run's next driver for a while
        # (`WorkerRegistry.claim`).
        at_rest = (*TERMINAL, run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_PAUSED)
        self._registry.going_on = frozenset(view.record.uid for view in views if view.status.state not in at_rest)
        found: list[tuple[RunView, DesiredState]] = []
        for view in [view for view in self._ended.values() if not view.is_terminal or not ended_lately(view)]:
            del self._ended[view.record.uid]
            if view.is_terminal:
                run_meters.forget(view.record.name)
                self._retired.discard(view.record.uid)
        for view in views:
            uid = view.record.uid
            if view.is_terminal:
                self._note_ended(view)
            elif uid not in self._claims and time.monotonic() >= self._not_before.get(uid, 0.0):
                if self._catalog.is_unreadable(view):
                    self._end_pause(uid)
                    continue
                try:
                    found.append((view, await self._desired.read(uid)))
                except Exception as error:  # noqa: BLE001 - the edge of a run: the other runs go on
                    self._put_off(view, error)
        found = await self._unheld(found)
        # Without an await in between: a trainer that registers now goes to the first in the queue. Of equal ones that
        # is the run that was tried longest ago, of those that were never tried the oldest. Else a few that cannot be
        # driven would keep the trainer from the others.
        found.sort(key=lambda each: self._not_before.get(each[0].record.uid, 0.0))
        waiting = [view for view, desired in found if _waits_for_workers(view, desired)]
        for view in (each for each in waiting if each.status.is_preempted):
            self._retire_once(view, has_ended=False)
        claimed = self.queue.claim([(view, self._not_before.get(view.record.uid, 0.0)) for view in waiting])
        works = [(view, self._work_on(view, desired, claimed)) for view, desired in found]
        for view, work in works:
            if work is None:
                self._end_pause(view.record.uid)
        return [(view, work) for view, work in works if work is not None]

    async def _unheld(self, found: list[tuple[RunView, DesiredState]]) -> list[tuple[RunView, DesiredState]]:
        """Return those of the open runs `found` that no other orchestrator holds, or whose free trainer is here.

        A run's trainer is free if it reports the run and is given to none. `found` has each run with what it shall do.
        Workers are not asked any more to release a run that another one holds and that shall not pause. Without an
        answer of Redis all runs are returned: the lease decides.
        """
        names = [Names(self._prefix, view.record.uid) for view, _ in found]
        try:
            held = await read_held(self._redis, names, ROLE, slot=self.slot)
        except MillraceError as error:
            logger.warning("cannot read who holds the runs", extra={"error": str(error)})
            return found
        held -= {trainer.reported for trainer in self._registry.owned(WorkerKind.TRAINER, "")}
        for view, desired in found:
            if view.record.uid in held and not desired.is_paused:
                self._forget_end(view.record.uid)
        return [(view, desired) for view, desired in found if view.record.uid not in held]

    async def _was_just_sealed(self, uid: str) -> bool:
        """Return whether an open run has a seal that was first seen within the last `SEALED_S` seconds.

        Its end is in the log, and the next look reads it. If the log has lost the end, the run is still open
        afterwards, and is driven once more, which writes the end again.
        """
        if not await asyncio.to_thread(is_sealed, self._store, Names(self._prefix, uid)):
            return False
        now = time.monotonic()
        self._sealed = {other: since for other, since in self._sealed.items() if now - since < RETIRED_S}
        return now - self._sealed.setdefault(uid, now) < SEALED_S

    def _work_on(self, view: RunView, desired: DesiredState, claimed: Container[str]) -> Work | None:
        """Return what is to be done with a run now: drive it, reopen it or queue it again; None if nothing.

        `claimed` are the runs that got their workers. Another one that trains is driven only if it shall pause or end,
        or is closing, with a trainer if one is free.
        """
        if view.status.is_reopened:
            return self._reopen
        is_paused = view.status.state == run_pb2.RUN_STATE_PAUSED
        is_closing = _is_closing(view)
        if desired.is_paused and not is_closing:
            if is_paused:
                self._retire_once(view, has_ended=False)
                return None
            return self._drive  # says that it is paused, and gives everything back
        uid = view.record.uid
        if uid in claimed or desired.is_cancelled or not view.status.is_preempted:
            self._forget_end(uid)
        if view.record.kind == EVAL:
            # An evaluation run has endpoints of its own: it needs neither a trainer nor a replica.
            return self._drive
        if uid not in claimed and (desired.is_cancelled or is_closing):
            # For a run that is closing, a trainer that has finished the run is the right one.
            self._registry.claim(WorkerKind.TRAINER, uid, limit=1, fresh=not is_closing)
        if uid in claimed or desired.is_cancelled or is_closing:
            # Another orchestrator may try the same: of the trainers that are free with each, one begins to work.
            self._registry.reserve(uid)
            return self._drive
        return self._queue_again if is_paused else None

    async def _safely(self, view: RunView, work: Work) -> None:
        """Do the work on a run under its claim, and end the claim.

        An error is logged, and the run is tried again later.
        """
        uid = view.record.uid
        try:
            with waits.of_run(uid):
                await work(view)
            self._end_pause(uid)
        except Exception as error:  # noqa: BLE001 - the edge of a run: whatever it was, the other runs go on
            self._put_off(view, error)
        finally:
            claim = self._claims.pop(uid)
            self._registry.release(uid)
            if claim.driver is not None and claim.driver.is_preempted:
                self._retire_once(view, has_ended=False)
            self.wake()

    def _put_off(self, view: RunView, error: Exception) -> None:
        """Log and count a drive that failed with `error`, and set when the run is tried again.

        That is at once if its log is gone, because the next look rebuilds it; after damage the pause is longer, and the
        run is shown as DAMAGED. `run why` names the error meanwhile.
        """
        uid, now = view.record.uid, time.monotonic()
        causes = list(all_errors(error))
        pause_s = BACKOFF_S
        if damage := next((cause for cause in causes if isinstance(cause, CorruptObjectError)), None):
            pause_s = DAMAGED_PAUSE_S
            self._catalog.drive_failed(uid, damage)
        if _is_gone(causes):
            recent = [at for at in self._gone.get(uid, []) if now - at < GONE_WINDOW_S]
            self._gone[uid] = [*recent, now][-MAX_GONE:]
            # Redis may lose the log again and again: then the tries must not follow each other at once.
            pause_s = BACKOFF_S if len(recent) >= MAX_GONE else 0.0
        self._not_before[uid] = now + pause_s
        text = "; ".join(f"{type(cause).__name__}: {cause}" for cause in causes)
        # An error of ours says what happened; a traceback is for defects.
        known = all(isinstance(cause, MillraceError) for cause in causes)
        fields = {"run": view.record.name, "again_in_s": pause_s, "error": text}
        run_meters.drive_failed(view.record.name)
        logger.error("run given up by this replica for now", extra=fields, exc_info=None if known else error)
        with waits.of_run(uid):
            waits_on = next((storage_of(cause) for cause in causes if isinstance(cause, MillraceError)), "")
            reason = f"another try to drive the run: {text}"
            refusal = next((found for cause in causes if (found := waits.Refusal.of(cause))), None)
            self._pauses.setdefault(uid, waits.LastingWait()).on(reason, waits_on=waits_on, key=text, refusal=refusal)

    def _end_pause(self, uid: str) -> None:
        """Stop showing that a run waits for another try."""
        if pause := self._pauses.pop(uid, None):
            pause.over()

    async def _drive(self, view: RunView) -> None:
        """Take the run's lease and a new epoch, and drive the run until it ends, pauses, or the lease is lost.

        If another orchestrator has the lease, or has ended the run since the last look, return: the next look tries
        again.
        """
        uid, claim = view.record.uid, self._claims[view.record.uid]
        run_log = await self._catalog.open_log(uid)
        lease = await Lease.acquire(run_log, ROLE, self._owner, LEASE_TTL_S, slot=self.slot)
        if lease is None:
            self._not_before[uid] = time.monotonic() + SCAN_S
            return
        try:
            # Its holder has sealed the run before it gave the lease back: an epoch would be an object after the seal.
            if await self._was_just_sealed(uid):
                self._not_before[uid] = time.monotonic() + SCAN_S
                return
            # Who let the ended run's log expire may have died before it saw that the run was reopened.
            await run_log.persist()
            epoch = await run_log.acquire_epoch(ROLE, self._owner)
            # The lease was taken before the epoch was known, and names the epoch under which the run is driven.
            await lease.renew(epoch=epoch.number)
            faults.reach(faults.Point.ORCHESTRATOR_CLAIMED)
            self._not_before.pop(uid, None)
            self._registry.announce(uid)
            # Not before: until the run is held again, it is what stopped it that `run why` names.
            self._end_pause(uid)
            events = await self._events(view)
            try:
                kind = EvalRunDriver if view.record.kind == EVAL else TrainRunDriver
                context = RunContext(
                    record=view.record,
                    log=run_log,
                    epoch=epoch,
                    lease=lease,
                    registry=self._registry,
                    events=events,
                    custom_code=self.custom_code,
                )
                driver = kind(context, done_evals=dict(view.status.done_evals))
                claim.lease, claim.driver = lease, driver
                claim.apply(await self._desired.read(uid))
                run_meters.lease_acquired(view.record.name)
                logger.info("run claimed", extra={"run": view.record.name, "epoch": epoch.number})
                await report_takeover(context, owner=self._owner, spoke_at=view.status.spoke_at)
                exported = self._readers.export(view.record, warn=events.warning)
                try:
                    await self._keep(claim, driver, lease, run_log, Watchdog.of(driver.parts, owner=self._owner))
                    if not driver.is_paused:
                        await exported.finish()
                finally:
                    await exported.close(has_ended=driver.has_ended)
            except Exception as error:  # looked at only: `_safely` is the edge that reports it
                if _is_gone(all_errors(error)):
                    # The writer goes on by itself as soon as the log is rebuilt.
                    self._kept_events[uid] = events
                raise
            finally:
                # Those that are kept go on queueing: the next drive writes them into the rebuilt log.
                if uid not in self._kept_events:
                    await _try_to("write the last events", events.close())
        finally:
            await _try_to("release the lease", lease.release())

    async def _keep(self, claim: _Claim, driver: RunDriver, lease: Lease, run_log: RunLog, watchdog: Watchdog) -> None:
        """Run the driver to its end; meanwhile renew the lease, apply new intents to the claim, and run the watchdog.

        If another orchestrator gets the lease, the driver is cancelled, and FencedError raised.
        """
        async with asyncio.TaskGroup() as tasks:
            keepers = [
                # Where the lease is lost, the group cancels the driver.
                tasks.create_task(self._renew(lease, run_log)),
                tasks.create_task(self._follow_intents(claim, run_log.uid)),
                tasks.create_task(watchdog.run()),
                tasks.create_task(self.queue.record(run_log.uid, driver.parts.context.events)),
            ]
            await driver.run()
            for keeper in keepers:
                keeper.cancel()
        self._gone.pop(run_log.uid, None)

    async def _events(self, view: RunView) -> RunEvents:
        """Return a writer of the run's events: that of the previous drive if it ended because the log was gone.

        Else a new one, which goes on from the state in the run's view.
        """
        if kept := self._kept_events.pop(view.record.uid, None):
            return kept
        # A log object of its own: a writer takes over a rebuilt log in place, and the driver has to notice a rebuild.
        run_log = await self._catalog.open_log(view.record.uid)
        events = RunEvents(EventWriter(run_log, self._owner), run=view.record.name)
        events.resume(view.status)
        return events

    async def _queue_again(self, view: RunView) -> None:
        """Write the event that a resumed run waits for a trainer."""
        await self._queue(view, await self._catalog.open_log(view.record.uid), "resumed; no trainer is free")

    async def _reopen(self, view: RunView) -> None:
        """Write the event that a failed run is QUEUED again, into a copy of its log that does not hold the run's
        end.
        """
        uid = view.record.uid
        run_log = await self._catalog.open_reopened(uid)
        records = await asyncio.to_thread(load_reopenings, self._store, run_log.names)
        reason = f"reopened: it goes on with step {records[-1].step + 1}, at which it had failed"
        await self._queue(view, run_log, reason, was=run_pb2.RUN_STATE_FAILED)
        faults.reach(faults.Point.ORCHESTRATOR_REOPEN_QUEUED, step=records[-1].step)
        self._forget_end(uid)
        logger.info("run reopened", extra={"run": view.record.name, "step": records[-1].step, "number": len(records)})

    async def _queue(self, view: RunView, run_log: RunLog, reason: str, *, was: run_pb2.RunState | None = None) -> None:
        """Write the event that the run is QUEUED, for `reason`, under its lease.

        `was` is its state until now, None for that of the view. Does nothing if another orchestrator has the lease, or
        has queued a reopened run already.
        """
        lease = await Lease.acquire(run_log, ROLE, self._owner, LEASE_TTL_S, slot=self.slot)
        if lease is None:
            self._not_before[view.record.uid] = time.monotonic() + SCAN_S
            return
        events = await self._events(view)
        try:
            if was is not None:
                if not (await self._catalog.find(view.record.uid)).status.is_reopened:
                    # Another replica of the orchestrator has queued the run and given the lease back since.
                    return
                events.state = was
            await events.state_changed(run_pb2.RUN_STATE_QUEUED, reason)
        finally:
            await _try_to("write the last events", events.close())
            await _try_to("release the lease", lease.release())

    async def _preempt(self, uid: str, reason: str) -> bool:
        """Write the intent that a run pauses for another one, and tell its driver; return whether it is driven here."""
        if (claim := self._claims.get(uid)) is None or claim.driver is None:
            return False
        payload = {"epoch": claim.driver.parts.context.epoch.number, "reason": reason}
        await write_intent(self._store, Names(self._prefix, uid), PREEMPT, payload)
        faults.reach(faults.Point.ORCHESTRATOR_PREEMPT_INTENT)
        await self.apply(uid)
        return True

    async def _renew(self, lease: Lease, run_log: RunLog) -> None:
        """Renew the lease at a third of its ttl, until cancelled; raise FencedError if another orchestrator has it."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(LEASE_TTL_S / 3)
            if not await lease.renew():
                raise FencedError(
                    f"the lease of run {run_log.uid} was lost to another orchestrator",
                    reason="LEASE_LOST",
                    remedy="that one continues the run",
                )

    async def _follow_intents(self, claim: _Claim, uid: str) -> None:
        """Read the run's intents every `POLL_S` and apply them to its claim, until cancelled; an error is logged.

        In this way the claim also learns of intents that another orchestrator has acknowledged.
        """
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(POLL_S)
            try:
                claim.apply(await self._desired.read(uid))
            except MillraceError as error:
                logger.warning(
                    "cannot read the intents for a run, trying again", extra={"uid": uid, "error": str(error)}
                )

    def _note_ended(self, view: RunView) -> None:
        """Have workers release a run that ended within `RETIRED_S`, and queue it for its seal.

        Its metrics are removed when it has ended that long ago. It is not queued while this process still works on it.
        """
        self._ended[view.record.uid] = view
        if ended_lately(view):
            self._retire_once(view, has_ended=True)
        self._desired.forget(view.record.uid)
        self._not_before.pop(view.record.uid, None)
        self._end_pause(view.record.uid)
        # Otherwise the drive that ended it is about to seal it.
        if view.record.uid not in self._claims:
            self._sealer.note(view)

    def _forget_end(self, uid: str) -> None:
        """Stop asking workers to release a run, because it goes on."""
        if uid in self._retired:
            self._retired.discard(uid)
            self._registry.goes_on(uid)

    def _retire_once(self, view: RunView, *, has_ended: bool) -> None:
        """Have workers release a run that is paused or has ended, unless they were asked or this process works on
        it.
        """
        if view.record.uid not in self._retired and view.record.uid not in self._claims:
            self._retired.add(view.record.uid)
            self._registry.retire(view.record.uid, has_ended=has_ended)


def _is_closing(view: RunView) -> bool:
    """Return whether a run has its closing header, or is about to get it."""
    return view.is_closed or view.status.state == run_pb2.RUN_STATE_STOPPING


def _waits_for_workers(view: RunView, desired: DesiredState) -> bool:
    """Return whether an open run that nobody holds is to be driven as soon as it gets workers, and not before."""
    is_driven_without = view.record.kind == EVAL or view.status.is_reopened or _is_closing(view)
    return not (is_driven_without or desired.is_cancelled or desired.is_paused)


def _is_gone(causes: Iterable[BaseException]) -> bool:
    """Return whether one of these errors says that the run's log is gone from Redis."""
    return any(isinstance(cause, LogGoneError) for cause in causes)


async def _try_to(what: str, work: Awaitable[None]) -> None:
    """Await `work`, a step of a drive's end, called `what` in the log; an error is only logged.

    It would hide why the drive ended.
    """
    try:
        await work
    except MillraceError as error:
        logger.warning("could not %s", what, extra={"error": str(error)})
