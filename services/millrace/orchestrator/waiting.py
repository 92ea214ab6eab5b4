"""The queue of this orchestrator's runs: who waits, for how long, what is free and what was used, and the claims.

`queue.order` decides; this gathers what it decides by. Nothing of it is only in memory: what a run wants is in its
record, since when it waits and what it used are in its log, and who is free is what workers report. An orchestrator
that starts after `kill -9` decides the same.
"""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Mapping, Sequence
from dataclasses import dataclass

from google.protobuf.timestamp_pb2 import Timestamp

from millrace.config import RLConfig
from millrace.config.sections.shared import QueueConfig
from millrace.errors import InvalidSpecError, MillraceError, Violation
from millrace.orchestrator.catalog import MAX_ENDED, RunCatalog, RunView
from millrace.orchestrator.events import RunEvents
from millrace.orchestrator.queue.groups import NO_GROUPS
from millrace.orchestrator.queue.limits import Terms
from millrace.orchestrator.queue.order import (
    AGE_S,
    DEFAULT_GROUP,
    GroupUse,
    HeldRun,
    QueuedRun,
    QueueGroup,
    QueuePlace,
    WaitReason,
    WorkerPool,
    choose_victims,
    least_accelerators,
    place_runs,
)
from millrace.orchestrator.tenants import belongs_to
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry
from millrace.runlog.records.run_record import RL, RunRecord
from millrace.runlog.run_status import WORKING
from millrace.runlog.usage import SEEN_S
from millrace.telemetry import faults, waits
from millrace.v1 import run_pb2

logger = logging.getLogger(__name__)

WINDOW_S = 86400.0
"""How far back the use of a group counts for its share."""
RETRY_S = 5.0
FAILED_S = 900.0
"""For how long nobody pauses for a run whose last drive failed, or that could not be looked at."""
RECORD_S, REST_S = 5.0, 0.1
"""How often it is looked what a run has, and the shortest time between two looks."""


@dataclass(slots=True, kw_only=True)
class _Preemption:
    """A run pauses for the run `by`, or is about to be asked to."""

    by: str
    reason: str
    """Who that is, what it needs and what the pause costs, in words."""
    is_asked: bool = False


class RunQueue:
    """Decides which waiting runs get this orchestrator's free workers, and says why the others wait."""

    def __init__(
        self, *, catalog: RunCatalog, registry: WorkerRegistry, groups: Mapping[str, QueueGroup] = NO_GROUPS
    ) -> None:
        """Make a queue over the runs of `catalog` and the workers of `registry`.

        `groups` are the server's; without any no use is recorded, and every run is of one group.
        """
        self._catalog, self._registry, self._groups = catalog, registry, groups
        self._asked: dict[str, QueueConfig] = {}
        self._places: dict[str, QueuePlace] = {}
        self._preemptions: dict[str, _Preemption] = {}
        self._has_chosen = asyncio.Event()
        registry.limits.groups = groups

    def claim(self, waiting: Sequence[tuple[RunView, float]]) -> set[str]:
        """Give the free workers to the runs whose turn it is, and return their uids.

        `waiting` are all runs that wait for workers, each with the time from which it may be tried again after a claim
        that failed, 0 if none did.
        """
        now = time.time()
        asked = {view.record.uid: self._asked_of(view.record) for view, _ in waiting}
        has_gangs = any(each.min_replicas for each in asked.values())
        if has_gangs:
            # Runs that began without a replica, or lost theirs, come before those that wait.
            for uid in {each.uid for each in self._registry.held() if not each.is_replica}:
                self._registry.claim(WorkerKind.INFERENCE, uid, limit=self._registry.limits.least(uid))
        runs = [self._as_waiting(view, tried, asked[view.record.uid], has_gangs) for view, tried in waiting]
        used = self._used(now, {view.record.uid for view, _ in waiting}) if self._groups else {}
        places = place_runs(runs, groups=self._groups, used=used, pool=self._pool(), now=now)
        for place in places:
            if place.workers:
                least, most = max(1, asked[place.uid].min_replicas), asked[place.uid].max_replicas
                terms = Terms(group=place.group, least_replicas=least, most_replicas=most)
                self._registry.give(place.uid, place.workers, terms)
        head = next((place for place in places if place.is_head), None)
        self._registry.limits.head = head.uid if head is not None else ""
        self._registry.limits.head_replicas = asked[head.uid].min_replicas if head is not None else 0
        self._places = {place.uid: place for place in places}
        tried = {view.record.uid: at for view, at in waiting}
        # What cannot be driven must not have others pause at each of its tries.
        has_failed = head is not None and tried[head.uid] > 0 and time.monotonic() - tried[head.uid] < FAILED_S
        self._choose_victims(None if has_failed else head, asked)
        if claimed := {place.uid for place in places if place.workers}:
            faults.reach(faults.Point.ORCHESTRATOR_WORKERS_GIVEN)
        return claimed

    def _as_waiting(self, view: RunView, tried: float, asked: QueueConfig, has_gangs: bool) -> QueuedRun:
        """Return a run as the order looks at it; where no run waits for replicas (`has_gangs`), without these."""
        uid, free, is_interrupted = view.record.uid, self._registry.free_for, view.status.state in WORKING
        return QueuedRun(
            uid=uid,
            group=asked.group,
            priority=asked.priority,
            since=_waits_since(view),
            # One that was interrupted goes on with the replicas that are left.
            num_replicas=0 if is_interrupted else asked.min_replicas,
            is_interrupted=is_interrupted,
            tried=tried,
            trainers=[each.worker_id for each in free(WorkerKind.TRAINER, uid, fresh=True)],
            replicas=[each.worker_id for each in free(WorkerKind.INFERENCE, uid)] if has_gangs else (),
        )

    def _choose_victims(self, head: QueuePlace | None, asked: Mapping[str, QueueConfig]) -> None:
        """Choose which runs pause for the head of the queue; `asked` has what the waiting runs want.

        Runs that were asked before keep to it. What was chosen and not asked is chosen anew.
        """
        held = {each.uid for each in self._registry.held() if not each.is_replica}
        num_leaving = self._num_letting_go()
        self._preemptions = {uid: each for uid, each in self._preemptions.items() if uid in held and each.is_asked}
        if head is None:
            return
        wants = asked[head.uid]
        pool = self._pool()
        num_trainers = len([each for each in head.kept if each in pool.trainers])
        num_replicas = wants.min_replicas - (len(head.kept) - num_trainers)
        runs = [found for uid in sorted(held) if (found := self._as_held(uid)) is not None]
        victims = choose_victims(
            runs,
            priority=wants.priority,
            num_trainers=max(0, 1 - num_trainers - num_leaving),
            num_replicas=max(0, num_replicas),
        )
        for uid in victims:
            self._preemptions[uid] = _Preemption(by=head.uid, reason=self._reason(uid, head.uid, wants.priority))
        if victims:
            self._has_chosen.set()

    def _num_letting_go(self) -> int:
        """Return how many trainers have no run, but report one that is at rest: they save its state, and are free then.

        A run that was asked to pause counts as at rest: what was read of its log may be from before it did.
        """
        going_on = self._registry.going_on - {uid for uid, each in self._preemptions.items() if each.is_asked}
        free = (each for each in self._registry.accepting(WorkerKind.TRAINER) if not each.run_uid)
        return sum(bool(each.reported) and each.reported not in going_on for each in free)

    def _as_held(self, uid: str) -> HeldRun | None:
        """Return a run that has workers as preemption looks at it; None if it may not pause for another one now."""
        view = self._catalog.known(uid)
        if view is None or view.status.state != run_pb2.RUN_STATE_RUNNING:
            return None
        asked, is_leaving = self._asked_of(view.record), uid in self._preemptions
        if not asked.preemptible and not is_leaving:
            return None
        waited_s = view.status.claimed_at - (view.status.queued_at or _created(view))
        return HeldRun(
            uid=uid,
            priority=asked.priority + int(max(0.0, waited_s) / AGE_S),
            num_replicas=len(self._registry.owned(WorkerKind.INFERENCE, uid)),
            is_leaving=is_leaving,
        )

    def _reason(self, uid: str, head: str, priority: int) -> str:
        """Return in words for which run the run `uid` pauses, the `head` of the queue, and what it loses by that.

        The name of another tenant's run is left out.
        """
        view = self._catalog.known(uid)
        name = self.name_of(head, tenant=view.record.tenant if view is not None else "")
        by = f"run {name} (priority {priority})" if name else "another run of higher priority"
        config = view.record.config or {} if view is not None else {}
        steps = view.status.num_steps if view is not None else 0
        if config.get("ckpt") is not None or not steps:
            return f"{by}: no step is lost, what is played and not finished within 30 s is played again"
        return f"{by}: {steps} steps are trained again, as it has no `ckpt`"

    async def preempt(self, ask: Callable[[str, str], Awaitable[bool]]) -> None:
        """Call `ask` with the uid of each run that shall pause for another one, and why, until cancelled.

        It returns whether the run was asked. If not, or after an error, the next look may choose the run again.
        """
        while await self._has_chosen.wait():
            self._has_chosen.clear()
            for uid, chosen in list(self._preemptions.items()):
                # Another look may have chosen anew while one of the runs was asked.
                if chosen.is_asked or self._preemptions.get(uid) is not chosen:
                    continue
                chosen.is_asked = True
                faults.reach(faults.Point.ORCHESTRATOR_PREEMPT_CHOSEN)
                try:
                    chosen.is_asked = await ask(uid, chosen.reason)
                except MillraceError as error:
                    chosen.is_asked = False
                    logger.warning("cannot ask a run to pause for another", extra={"uid": uid, "error": str(error)})

    def note(self, uid: str) -> str:
        """Return in words for which run a running run pauses, and at which price; empty if it does not."""
        found = self._preemptions.get(uid)
        return f"it pauses for {found.reason}; then it is queued again, and goes on by itself" if found else ""

    def _asked_of(self, record: RunRecord) -> QueueConfig:
        """Return what a run's config says of the queue; the defaults for an older config, or one without."""
        if (found := self._asked.get(record.uid)) is None:
            try:
                found = QueueConfig.model_validate((record.config or {}).get("queue") or {})
            except ValueError:
                found = QueueConfig()  # the driver of the run reports what is wrong with its config
            if len(self._asked) >= 2 * MAX_ENDED:
                self._asked.clear()
            self._asked[record.uid] = found
        return found

    def _pool(self) -> WorkerPool:
        """Return the registered workers that take work, with their accelerators."""
        trainers, replicas = (
            {each.worker_id: each.accelerators for each in self._registry.accepting(kind)}
            for kind in (WorkerKind.TRAINER, WorkerKind.INFERENCE)
        )
        return WorkerPool(trainers=trainers, replicas=replicas)

    def _used(self, now: float, waiting: Container[str]) -> dict[str, GroupUse]:
        """Return the use by group: what the logs say for the last `WINDOW_S`, and what runs have now.

        Runs that this orchestrator drives have the workers that the registry gives them, others what their logs say.
        Sets what runs of other orchestrators have in the registry's limits.
        """
        here = self._registry.limits.counted(self._registry.held())
        held, elsewhere = Counter[str](), Counter[str]()
        seconds: dict[str, float] = defaultdict(float)
        for view in self._catalog.views:
            if view.record.kind != RL:
                continue
            uid, group, usage = view.record.uid, self._asked_of(view.record).group, view.status.usage
            seconds[group] += usage.seconds(now, since=now - WINDOW_S)
            if uid in here:
                held[group] += here[uid]
            elif uid not in waiting and view.damage is None:
                elsewhere[group] += usage.held
        self._registry.limits.elsewhere = elsewhere
        return {
            group: GroupUse(seconds=seconds[group], held=held[group] + elsewhere[group]) for group in {*seconds, *held}
        }

    async def read_ended(self) -> None:
        """Read the runs that ended before this process began, whose use counts; nothing without groups."""
        while self._groups:
            try:
                newest = (await self._catalog.list_names())[:MAX_ENDED]
                await self._catalog.read_listed(reversed(newest))  # which keeps those that were read last
                return
            except MillraceError as error:
                logger.warning("cannot read what ended runs have used, trying again", extra={"error": str(error)})
            with waits.waiting("another look at what ended runs have used"):
                await asyncio.sleep(RETRY_S)

    async def record(self, uid: str, events: RunEvents) -> None:
        """Write an event whenever the accelerators of a driven run change, and every `SEEN_S` that it still has them.

        Until cancelled; nothing without groups, but of a tenant's run always.
        """
        written: tuple[int, int] | None = None
        view = self._catalog.known(uid)
        is_counted = bool(self._groups) or (view is not None and bool(view.record.tenant))
        written_at = 0.0
        # unregistered wait: a periodic look, which awaits nothing else
        while is_counted:
            changed = self._registry.changed
            trainer, replicas = (
                sum(each.accelerators for each in self._registry.owned(kind, uid))
                for kind in (WorkerKind.TRAINER, WorkerKind.INFERENCE)
            )
            # At rest a run has none: what it still gives back does not count.
            is_due = (trainer or replicas) and time.monotonic() - written_at >= SEEN_S
            if events.state in WORKING and (is_due or (trainer, replicas) != written):
                written, written_at = (trainer, replicas), time.monotonic()
                await events.workers_assigned(trainer=trainer, replicas=replicas)
            await asyncio.sleep(REST_S)
            try:
                async with asyncio.timeout(RECORD_S if written else REST_S):
                    await changed.wait()
            except TimeoutError:
                continue

    def require_place(self, config: RLConfig) -> None:
        """Raise InvalidSpecError if a run names a group that the server does not have, or needs more than its quota."""
        asked = config.queue
        known = sorted({DEFAULT_GROUP, *self._groups})
        if asked.group not in known:
            problem = Violation(
                field="queue.group",
                value=asked.group,
                message=f"is no group of this server, which has: {', '.join(known)} (`MILLRACE_QUEUE_GROUPS`)",
            )
            raise InvalidSpecError([problem], reason="GROUP_UNKNOWN")
        quota = self._groups.get(asked.group, QueueGroup()).quota
        least = least_accelerators(self._pool(), asked.min_replicas)
        if quota is not None and least > quota:
            message = (
                f"needs {least} accelerators at once, with the trainer, and group {asked.group!r} may have {quota}: "
                "lower it, or choose another group"
            )
            problem = Violation(field="queue.min_replicas", value=str(asked.min_replicas), message=message)
            raise InvalidSpecError([problem], reason="QUOTA_TOO_SMALL")

    def words(self, uid: str, *, tenant: str = "") -> tuple[str, str]:
        """Return in words a run's place in the queue, and why it waits there with what would free it.

        Both are empty if the run does not wait, the place if no other one waits and the run has neither group nor
        priority, the reason if only no trainer is free. With a `tenant` the place is empty, because it counts
        others' runs, and the reason names no run of another tenant.
        """
        place = self._places.get(uid)
        if place is None or place.reason is None:
            return "", ""
        asked = self._asked.get(uid, QueueConfig())
        where = f"place {place.position} of {len(self._places)}"
        terms = [f"group {place.group}"] if self._groups else []
        if asked.priority or place.priority:
            aged = f", {place.priority} by waiting" if place.priority != asked.priority else ""
            terms.append(f"priority {asked.priority}{aged}")
        where += f" ({', '.join(terms)})" if terms else ""
        is_alone = len(self._places) == 1 and not terms
        return "" if is_alone or tenant else where, self._why(place, asked, tenant)

    def _why(self, place: QueuePlace, asked: QueueConfig, tenant: str) -> str:
        """Return in words, for a `tenant` or an operator, why a run at this place waits, and what would free it."""
        pausing = sorted(uid for uid, each in self._preemptions.items() if each.by == place.uid)
        if pausing:
            names = {name for uid in pausing if (name := self.name_of(uid, tenant=tenant))}
            return f"run {', '.join(sorted(names)) or 'another one'} of lower priority pauses for it"
        match place.reason:
            case WaitReason.REPLICAS:
                free = sum(each in self._pool().replicas for each in place.kept)
                return (
                    f"{free} of the {asked.min_replicas} replicas that it needs are free"
                    + (", and kept for it" if free else "")
                    + "; it begins when runs that have replicas end, or with more replicas"
                )
            case WaitReason.KEPT:
                head = next((each for each in self._places.values() if each.is_head), None)
                name = self.name_of(head.uid, tenant=tenant) if head is not None else ""
                return f"what is free is kept for {f'run {name}' if name else 'another run'}, which comes before it"
            case WaitReason.QUOTA:
                quota = self._groups.get(place.group, QueueGroup()).quota
                return f"its group may have {quota} accelerators at once; it begins when runs of the group end"
            case WaitReason.TOO_LARGE:
                there = len(self._pool().replicas)
                return f"it needs {asked.min_replicas} replicas, registered are {there}; it begins with more"
            case _:
                return ""

    def name_of(self, uid: str, *, tenant: str = "") -> str:
        """Return the name of a run by its uid; the uid itself if it is unknown.

        Empty if there is a `tenant` and the run is not one of its own.
        """
        known = self._catalog.known(uid)
        if known is None:
            return "" if tenant else uid
        return known.record.name if belongs_to(known.record, tenant) else ""


def _waits_since(view: RunView) -> float:
    """Return since when a run waits, in seconds since the epoch: since its newest event, or its creation without any.

    A run that waits writes no events.
    """
    return view.status.last_time or _created(view)


def _created(view: RunView) -> float:
    """Return when a run was created, in seconds since the epoch; 0 if its record does not say so."""
    if not view.record.create_time:
        return 0.0
    created = Timestamp()
    created.FromJsonString(view.record.create_time)
    return created.ToNanoseconds() / 1e9
