"""Names what a run waits for: a silent worker, the end of the chain when nothing moves, a wait that is overdue.

One watchdog per driven run. It only looks, and reports in events of the run, so that nobody has to ask
`millrace run why` at the right moment; who restarts what is frozen is the supervisor or the platform.

| what                                                     | event                                              |
|----------------------------------------------------------|----------------------------------------------------|
| a worker of the run silent, lost, replaced, back         | WORKER_SILENT, WORKER_LOST, WORKER_REPLACED, WORKER_BACK |
| no progress for 20 s, again at 60 s, 300 s, 900 s, …     | wait_reported: the end of the chain                |
| a wait older than its deadline of a worker that answers  | wait_reported: that wait, once in 10 minutes       |
| Redis did not answer for a while and does again          | REDIS_SILENT                                       |
| this process stood still (frozen, or its machine was)    | ORCHESTRATOR_STOOD_STILL; nobody else is blamed    |

The run's trainer reports what this process misses while it is still (ORCHESTRATOR_SILENT). A run whose steps take
longer than 20 s is not stuck: each standstill that ended by itself makes the watchdog more patient.
"""

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from millrace.orchestrator.chain import SILENT_S, Chain
from millrace.orchestrator.drive.assembly import RunParts
from millrace.orchestrator.events import RunContext, RunEvents
from millrace.orchestrator.why import chain_of, components, serves
from millrace.orchestrator.workers import WorkerKind, WorkerRecord, WorkerRegistry
from millrace.runlog.records.numbered import epoch_owner
from millrace.runlog.redis.connection import OUTAGES
from millrace.telemetry import waits
from millrace.telemetry.waits import METER, Meter, Wait

logger = logging.getLogger(__name__)

TICK_S = 1.0
REPORT_SILENT_S = 10.0
"""Silence of a worker after which an event says so: ten heartbeats, so that a busy machine accuses nobody."""
NO_PROGRESS_S = (20.0, 60.0, 300.0, 900.0)
"""Ages of a standstill at which the end of the chain is reported; after the last one, each time as much has passed."""
PATIENCE, MOST_PATIENT = 1.5, 30.0
"""Factor on these ages after a reported standstill that ended although no component had been silent."""
OVERDUE_AGAIN_S = 600.0
"""Shortest time between two reports of the same overdue wait: in a slow run it may come back at every step."""
REPORT_STILL_S = 5.0
REPORT_OUTAGE_S = 5.0
OUTAGE_SETTLES_S = 2.0
"""Time for all commands that wait in one outage to notice its end; the longest wait is reported."""
OUTAGE_MEMORY_S = 60.0
"""How far back outages are reported when this watchdog begins: the drive before may have ended by one."""
MAX_EVENTS, PER_S = 60, 600.0
"""Most events within that many seconds; further ones go to the process's log only."""
MAX_GONE = 64
"""Silent and lost workers that are remembered, so that their return can be reported."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """A worker at the last look."""

    record: WorkerRecord
    silent_since: float
    is_reported: bool = False


class Watchdog:
    """Looks at a driven run once per second, and reports what it waits for."""

    def __init__(
        self,
        *,
        run_uid: str,
        owner: str,
        registry: WorkerRegistry,
        events: RunEvents,
        progress: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        meter: Meter = METER,
    ) -> None:
        """Make the watchdog of a run that the orchestrator `owner` drives.

        `progress` returns a value that differs whenever the run got ahead. `clock` gives monotonic seconds, and `meter`
        the times in which this process did not run.
        """
        self._run_uid = run_uid
        self._owner = owner
        self._registry = registry
        self._events = events
        self._progress = progress
        self._clock = clock
        self._meter = meter
        self._looked = clock()
        self._seen: dict[str, _Seen] = {}
        self._gone: dict[str, float] = {}
        self._at = progress()
        self._moved = clock()
        self._num_reported = 0
        self._patience = 1.0
        self._has_accused = False
        self._overdue: dict[tuple[str, str, str], float] = {}
        self._outages_until = clock() - OUTAGE_MEMORY_S
        self._sent: deque[float] = deque()

    @classmethod
    def of(cls, parts: RunParts, *, owner: str) -> Self:
        """Make the watchdog of a driven run; rollouts, commits, policies and training steps count as progress.

        `owner` names this orchestrator.
        """
        context = parts.context

        def progress() -> object:
            """Return a value that differs whenever the run got ahead."""
            desired = parts.policies.desired
            return (
                parts.stream.newest,
                parts.book.step,
                context.events.state,
                desired and (desired.lineage, desired.version),
                parts.policies.served_version(),
                [
                    (record.trainer.epoch, record.trainer.step)
                    for record in context.registry.alive(WorkerKind.TRAINER)
                    if record.trainer is not None and record.trainer.run_uid == context.record.uid
                ],
            )

        return cls(
            run_uid=context.record.uid,
            owner=owner,
            registry=context.registry,
            events=context.events,
            progress=progress,
        )

    async def run(self) -> None:
        """Look every `TICK_S` seconds and report what is found, until cancelled."""
        waits.watch()
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(TICK_S)
            await self.look()

    async def look(self) -> None:
        """Write events on silent workers, a standstill, overdue waits and outages of Redis that are due now.

        After this process itself stood still report only that: what was seen before is out of date.
        """
        now = self._clock()
        still_s = self._meter.within(self._looked, now)
        self._looked = now
        if still_s > SILENT_S:
            # What was seen before is out of date, and nobody listened to workers that seem silent: look again later.
            self._moved, self._num_reported = now, 0
            if still_s > REPORT_STILL_S:
                await self._warn(
                    "ORCHESTRATOR_STOOD_STILL",
                    f"orchestrator {self._owner} stood still for {still_s:.0f} s: it was frozen, or its machine was "
                    "overloaded",
                )
            return
        await self._look_at_workers(now)
        await self._look_at_progress(now)
        await self._look_at_waits(now)
        await self._look_at_redis(now)

    async def _look_at_workers(self, now: float) -> None:
        """Report workers of the run that fell silent, answer again, or are gone since the last look.

        `now` is monotonic.
        """
        current = {record.worker_id: record for record in self._registry.records() if serves(record, self._run_uid)}
        for worker_id in self._seen.keys() - current.keys():
            await self._report_gone(self._seen.pop(worker_id), current, now)
        for worker_id, record in current.items():
            seen = self._seen.setdefault(worker_id, _Seen(record=record, silent_since=record.silent_since))
            silence_s = now - record.silent_since
            if silence_s > REPORT_SILENT_S and not seen.is_reported:
                seen.is_reported = True
                self._remember_gone(worker_id, record.silent_since)
                await self._warn("WORKER_SILENT", f"{_name(record)} has not answered for {silence_s:.0f} s: {_CAUSES}")
            elif silence_s < SILENT_S and (since := self._gone.pop(worker_id, None)) is not None:
                seen.is_reported = False
                await self._warn("WORKER_BACK", f"{_name(record)} answers again, after {now - since:.0f} s of silence")
            seen.record, seen.silent_since = record, record.silent_since

    async def _report_gone(self, seen: _Seen, current: dict[str, WorkerRecord], now: float) -> None:
        """Report that a worker of the run was lost, or was replaced by another one in its slot.

        Nothing if it was released.

        `current` are the run's workers now, by id.
        """
        record, slot = seen.record, seen.record.worker.slot
        silence_s = now - seen.silent_since
        # A slot has one process at a time, so another worker in it is the successor.
        heir = next((r for r in current.values() if slot and r.worker.slot == slot), None)
        if heir is not None:
            self._gone.pop(record.worker_id, None)
            if not record.is_leaving:
                await self._warn(
                    "WORKER_REPLACED",
                    f"{_name(record)} ended and {heir.worker_id} took its place; it was heard of "
                    f"{silence_s:.0f} s ago; what it held is played or replayed by others",
                )
        elif record.worker_id in self._registry.lost and not record.is_leaving:
            self._remember_gone(record.worker_id, seen.silent_since)
            await self._warn(
                "WORKER_LOST",
                f"{_name(record)} has not answered for {silence_s:.0f} s and counts as lost: {_CAUSES}; "
                "what it held goes to others",
            )

    def _remember_gone(self, worker_id: str, since: float) -> None:
        """Remember since when (monotonic) a worker is silent, so that its return can be reported.

        The oldest are forgotten.
        """
        self._gone.setdefault(worker_id, since)
        while len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]

    async def _look_at_progress(self, now: float) -> None:
        """Report what the run waits for if it has made no progress for long; longer each time it is reported again.

        `now` is monotonic. Where such standstills end by themselves, later ones are reported later.
        """
        at = self._progress()
        if at != self._at:
            if self._num_reported and not self._has_accused:
                # It ended by itself and no component was silent: the steps of this run just take that long.
                self._patience = min(self._patience * PATIENCE, MOST_PATIENT)
            self._at, self._moved, self._num_reported, self._has_accused = at, now, 0, False
            return
        idle_s = now - self._moved
        if idle_s < _threshold_s(self._num_reported) * self._patience:
            return
        self._num_reported += 1
        chain = chain_of(self._run_uid, self._registry, owner=self._owner)
        logger.warning(
            "no progress", extra={"run": self._run_uid, "seconds": round(idle_s, 1), "chain": str(chain) or "(none)"}
        )
        await self._report_wait(_end_of(chain, owner=self._owner, idle_s=idle_s))

    async def _look_at_waits(self, now: float) -> None:
        """Report each overdue wait of components that answer, the same one at most every `OVERDUE_AGAIN_S`.

        Waits whose reasons differ only in numbers are the same one.
        """
        self._overdue = {key: at for key, at in self._overdue.items() if now - at < OVERDUE_AGAIN_S}
        for component in components(self._run_uid, self._registry, owner=self._owner, is_troubled=True):
            if component.is_silent:
                # Its last report is as old as its silence, which has an event of its own.
                continue
            for wait in component.waits:
                # Ages and counts in a reason differ at every look.
                key = (wait.owner, wait.waits_on, re.sub(r"[\d.]+", "#", wait.reason))
                if wait.is_overdue and key not in self._overdue:
                    self._overdue[key] = now
                    await self._report_wait(wait)

    async def _look_at_redis(self, now: float) -> None:
        """Report outages of Redis that are over by `now` (monotonic), each once.

        While one lasts, no event could be written anyway. Time in which this process itself did not run does not count.
        """
        for outage in list(OUTAGES):
            if not self._outages_until < outage.ended < now - OUTAGE_SETTLES_S:
                continue
            self._outages_until = outage.ended
            # Without the time in which this process itself did not run.
            seconds = outage.seconds - self._meter.within(outage.began, outage.ended)
            if seconds > REPORT_OUTAGE_S:
                await self._warn("REDIS_SILENT", f"Redis at {outage.address} did not answer for {seconds:.0f} s")

    async def _warn(self, reason: str, message: str) -> None:
        """Log a finding that blames a component, and write it as an event unless the run has had too many.

        `reason` is UPPER_SNAKE, `message` a sentence.
        """
        self._has_accused = True
        logger.warning(message, extra={"run": self._run_uid, "reason": reason})
        if self._may_send():
            await self._events.warning(reason, message)

    async def _report_wait(self, wait: Wait) -> None:
        """Log a wait that holds the run up, and write it as an event unless the run has had too many."""
        fields = {"owner": wait.owner, "wait": wait.reason, "age_s": round(wait.age_s, 1)}
        logger.warning("a wait is long", extra={"run": self._run_uid, **fields})
        if self._may_send():
            await self._events.wait_reported(wait)

    def _may_send(self) -> bool:
        """Return whether the run may get another event (`MAX_EVENTS` in `PER_S`), and count it if so."""
        now = self._clock()
        while self._sent and now - self._sent[0] > PER_S:
            self._sent.popleft()
        if len(self._sent) >= MAX_EVENTS:
            return False
        self._sent.append(now)
        return True


async def report_takeover(context: RunContext, *, owner: str, spoke_at: Mapping[str, float]) -> None:
    """Write the event that the orchestrator `owner` took the run over from another one; nothing if none held it before.

    `spoke_at` has by orchestrator the time of its last event, in seconds since the epoch.
    """
    epoch, run_log = context.epoch, context.log
    before = ""
    if epoch.number > 1:
        before = await asyncio.to_thread(epoch_owner, run_log.store, run_log.names, epoch.role, epoch.number - 1)
    if not before or before == owner:
        return
    last_event = (
        f"wrote its last event {max(0.0, time.time() - spoke_at[before]):.0f} s ago"
        if before in spoke_at
        else ("wrote no event")
    )
    await context.events.warning(
        "ORCHESTRATOR_REPLACED",
        f"orchestrator {owner} took the run over from {before}, which {last_event}: it gave the run back, or it is "
        "frozen or gone and its lease ran out",
    )


_CAUSES = "it is frozen or gone, or its machine or the network is"


def _name(record: WorkerRecord) -> str:
    """Return kind and id of a worker, for messages."""
    return f"{record.kind} {record.worker_id}"


def _threshold_s(num_reported: int) -> float:
    """Return the age in seconds at which a standstill is reported that was reported `num_reported` times."""
    last = len(NO_PROGRESS_S) - 1
    return NO_PROGRESS_S[num_reported] if num_reported <= last else NO_PROGRESS_S[last] * (num_reported - last + 1)


def _end_of(chain: Chain, *, owner: str, idle_s: float) -> Wait:
    """Return the wait at the end of the chain; for an empty one, a wait of `owner`, `idle_s` old, for any progress."""
    if chain.links:
        return chain.links[-1].wait
    return Wait(owner=owner, reason="any progress of the run; no service says that it waits", age_s=idle_s)
