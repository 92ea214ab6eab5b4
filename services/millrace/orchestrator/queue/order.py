"""The order in which waiting runs get workers: a function of who waits, what is free and what was used, without I/O.

Runs that were interrupted go first, then those of higher priority, then those of the group that has used least by its
weight, then those that came first. What a run needs is claimed whole or not at all. The first run that lacks workers is
the *head*: what is free of its need is kept for it, and runs after it get only what is left (backfill). How long runs
last is not known, so no weaker rule could promise that none of them delays the head. A run that only its group's quota
stops keeps nothing, and neither does one that needs more workers than are registered.

A run that needs no replica to begin takes the next one that is free, before every run that waits: it holds a trainer.
So it gets its trainer after the head only together with a replica that the head does not need.

A priority grows by one in `AGE_S` of waiting, up to the highest priority that waits. There the group's share decides,
and within a group the time of arrival: so every run becomes the head, as groups of equal weight use equally much.
"""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

DEFAULT_GROUP = "default"
"""QueueGroup of the runs that name none. It has no quota unless the server gives it one."""
AGE_S = 900.0
"""Seconds of waiting that raise a run's priority by one."""
CLAIM_S = 60.0
"""Seconds of use that are counted for every claim at once, so that runs that are claimed together are of several
groups."""


class WaitReason(StrEnum):
    """Why a run has no workers yet."""

    TRAINER = "TRAINER"
    """No trainer is free."""
    REPLICAS = "REPLICAS"
    """A trainer is free, but fewer replicas than the run needs."""
    KEPT = "KEPT"
    """What is free is kept for the head of the queue."""
    QUOTA = "QUOTA"
    """The group has as many accelerators as it may have."""
    TOO_LARGE = "TOO_LARGE"
    """Fewer workers are registered than the run needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueGroup:
    """What a group of runs may use."""

    weight: float = 1.0
    """Its share of the accelerators, relative to other groups' weights."""
    quota: int | None = None
    """Most accelerators that its runs have at once; None is no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRun:
    """A run that waits for workers. It needs one trainer and `num_replicas` replicas."""

    uid: str
    """Uids sort by the time of their creation."""
    group: str = DEFAULT_GROUP
    priority: int = 0
    since: float = 0.0
    """When it began to wait, in seconds of the clock of `now`."""
    num_replicas: int = 0
    is_interrupted: bool = False
    """It had workers and goes on, as after the death of its trainer: no quota stops it."""
    tried: float = 0.0
    """When it may be tried again after a claim that failed; 0 if none did. Later ones come after earlier ones."""
    trainers: Sequence[str] = ()
    """Ids of the trainers that are free for it, the best first."""
    replicas: Sequence[str] = ()
    """Ids of the replicas that are free for it, the best first. A run that needs none is given the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupUse:
    """What the runs of a group have used and have."""

    seconds: float = 0.0
    """Accelerator seconds, of trainers and replicas."""
    held: int = 0
    """Accelerators now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPool:
    """The registered workers: how many accelerators each has, by id, free or not."""

    trainers: Mapping[str, int] = field(default_factory=dict)
    replicas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePlace:
    """A run's place in the queue: 1 is the first. It has workers, or a reason why it has none."""

    uid: str
    position: int
    group: str
    priority: int
    """With what the run has gained by waiting."""
    reason: WaitReason | None = None
    workers: tuple[str, ...] = ()
    """Ids of the workers that it gets: a trainer, then its replicas."""
    is_head: bool = False
    """It is the first that lacks workers: those of its need that are free, or become free, are kept for it."""
    kept: tuple[str, ...] = ()
    """Ids of the free workers that are kept for it."""


def place_runs(
    waiting: Iterable[QueuedRun],
    *,
    groups: Mapping[str, QueueGroup],
    used: Mapping[str, GroupUse],
    pool: WorkerPool,
    now: float,
) -> list[QueuePlace]:
    """Return the places of all waiting runs in order: which get workers now, and why each other one does not.

    `groups` are the known groups by name; another one has weight 1 and no quota. `used` is the use by group; one that
    is left out has used nothing. `now` is in seconds.
    """
    round_ = _Round(groups, used, pool)
    places: list[QueuePlace] = []
    for run, priority in _in_order(list(waiting), round_, now):
        places.append(round_.place(run, position=len(places) + 1, priority=priority))
    return places


def _in_order(waiting: Sequence[QueuedRun], round_: "_Round", now: float) -> Iterable[tuple[QueuedRun, int]]:
    """Yield each run with its priority at `now`, the first one first; shares count what was placed meanwhile."""
    top = max((run.priority for run in waiting), default=0)

    def priority(run: QueuedRun) -> int:
        """Return the run's priority with what it has gained by waiting."""
        return min(top, run.priority + int(max(0.0, now - run.since) / AGE_S))

    queues: dict[str, deque[tuple[tuple[bool, int], tuple[float, str], QueuedRun]]] = {}
    # An interrupted run whose claim failed has no precedence, else a few that always fail would keep all workers.
    keyed = [((not run.is_interrupted or run.tried > 0, -priority(run)), (run.tried, run.uid), run) for run in waiting]
    for each in sorted(keyed, key=lambda each: each[:2]):
        queues.setdefault(each[2].group, deque()).append(each)
    while queues:
        first = min(queues, key=lambda group: (queues[group][0][0], round_.share(group), queues[group][0][1]))
        rank, _, run = queues[first].popleft()
        yield run, -rank[1]
        if not queues[first]:
            del queues[first]


class _Round:
    """What is free and used while the runs are placed one after the other."""

    def __init__(self, groups: Mapping[str, QueueGroup], used: Mapping[str, GroupUse], pool: WorkerPool) -> None:
        """Begin a round in which no run has a place."""
        self._groups, self._pool = groups, pool
        self._seconds = {name: use.seconds for name, use in used.items()}
        self._held = {name: use.held for name, use in used.items()}
        self._taken: set[str] = set()
        self._kept: set[str] = set()
        self._has_head = self._head_needs_replicas = False
        self._full: set[str] = set()
        self._accelerators = {**pool.trainers, **pool.replicas}

    def share(self, group: str) -> float:
        """Return the accelerator seconds that a group has used, by its weight."""
        return self._seconds.get(group, 0.0) / self._groups.get(group, QueueGroup()).weight

    def place(self, run: QueuedRun, *, position: int, priority: int) -> QueuePlace:
        """Return the place of the next run in order, and take what it gets or keep what it lacks others for."""
        workers, reason = self._workers_for(run)
        kept: tuple[str, ...] = ()
        is_head = reason in (WaitReason.TRAINER, WaitReason.REPLICAS) and not self._has_head
        if is_head:
            kept, self._has_head = self._keep(run), True
            self._head_needs_replicas = run.num_replicas > 0
        quota = self._groups.get(run.group, QueueGroup()).quota or 0
        if reason is WaitReason.QUOTA and least_accelerators(self._pool, run.num_replicas) <= quota:
            # What its group may still have is left for it, else small runs of the group would go first for ever.
            self._full.add(run.group)
        self._taken.update(workers)
        cost = self._cost(workers) + (0 if len(workers) > 1 else self._first_replica(run))
        if workers:
            self._held[run.group] = self._held.get(run.group, 0) + cost
        # A run that waits for others counts as if it had its workers: the place of the next one is what it will be.
        if reason not in (WaitReason.QUOTA, WaitReason.TOO_LARGE):
            used_s = CLAIM_S * cost if workers else CLAIM_S * least_accelerators(self._pool, run.num_replicas)
            self._seconds[run.group] = self._seconds.get(run.group, 0.0) + used_s
        return QueuePlace(
            uid=run.uid,
            position=position,
            group=run.group,
            priority=priority,
            reason=reason,
            workers=workers,
            is_head=is_head,
            kept=kept,
        )

    def _workers_for(self, run: QueuedRun) -> tuple[tuple[str, ...], WaitReason | None]:
        """Return the workers that a run gets, all that it needs or none, and why none."""
        if self._pool.trainers and len(self._pool.replicas) < run.num_replicas:
            return (), WaitReason.TOO_LARGE
        free = [each for each in run.trainers if each not in self._taken]
        replicas = [each for each in run.replicas if each not in self._taken]
        trainers = [each for each in free if each not in self._kept]
        # Without a need it takes one that is free.
        own = [each for each in replicas if each not in self._kept][: max(1, run.num_replicas)]
        room = self._room(run)
        if run.group in self._full and not run.is_interrupted:
            return (), WaitReason.QUOTA
        if trainers and not own and not run.num_replicas and self._head_needs_replicas:
            return (), WaitReason.KEPT
        if trainers and len(own) >= run.num_replicas:
            room -= 0 if own else self._first_replica(run)
            trainer = next((each for each in trainers if self._cost((each, *own)) <= room), None)
            return ((trainer, *own), None) if trainer is not None else ((), WaitReason.QUOTA)
        # What it would have at least, if it got the smallest workers.
        if room < math.inf and least_accelerators(self._pool, run.num_replicas) > room:
            return (), WaitReason.QUOTA
        if not trainers:
            return (), WaitReason.KEPT if free else WaitReason.TRAINER
        return (), WaitReason.KEPT if len(replicas) >= run.num_replicas else WaitReason.REPLICAS

    def _keep(self, run: QueuedRun) -> tuple[str, ...]:
        """Keep what is free of a run's need for it, and return the ids."""
        trainers = [each for each in run.trainers if each not in self._taken][:1]
        replicas = [each for each in run.replicas if each not in self._taken][: run.num_replicas]
        self._kept.update(trainers, replicas)
        return (*trainers, *replicas)

    def _room(self, run: QueuedRun) -> float:
        """Return how many accelerators more the quota of a run's group allows the run; infinite without a quota."""
        quota = self._groups.get(run.group, QueueGroup()).quota
        return math.inf if quota is None or run.is_interrupted else quota - self._held.get(run.group, 0)

    def _first_replica(self, run: QueuedRun) -> int:
        """Return the accelerators of the replica that a run takes first if it begins without; 0 if it gets some."""
        return 0 if run.num_replicas else min(self._pool.replicas.values(), default=1)

    def _cost(self, workers: Iterable[str]) -> int:
        """Return how many accelerators these workers have together."""
        return sum(self._accelerators.get(each, 1) for each in workers)


def least_accelerators(pool: WorkerPool, num_replicas: int) -> int:
    """Return the fewest accelerators that one trainer and `num_replicas` replicas have; one each if none is
    registered. Without any replica a run goes on only until it needs one: one counts.
    """
    count = max(1, num_replicas)
    replicas = sorted(pool.replicas.values())[:count]
    return min(pool.trainers.values(), default=1) + sum(replicas) + (count - len(replicas))


# Preemption: which running runs pause for the head of the queue.
#
# A run pauses for another only if it may (`queue.preemptible`), if the other one's priority is higher, and if the
# workers of those that pause, with what is free, are all that the other one needs. Of the priority of who waits nothing
# counts that it gained by waiting, so waiting makes no run pause. Of the priority of who runs that counts: a run that
# waited long keeps what it got at last, and two runs never preempt each other in turn.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRun:
    """A run that has a trainer and that may pause for another one."""

    uid: str
    """Uids sort by the time of their creation."""
    priority: int = 0
    """With what it had gained by waiting when it got its workers."""
    num_replicas: int = 0
    is_leaving: bool = False
    """It pauses already."""


def choose_victims(held: Sequence[HeldRun], *, priority: int, num_trainers: int, num_replicas: int) -> tuple[str, ...]:
    """Return the uids of the runs that have to pause so that a waiting run gets its workers.

    The waiting run has `priority`, and lacks so many trainers (0 or 1) and replicas. Those of lowest priority pause,
    of equal ones the newest, and none that is not needed. Empty if the runs that pause already free enough, or if no
    choice does.
    """
    leaving = [each for each in held if each.is_leaving]
    if _fits(leaving, num_trainers, num_replicas):
        return ()
    chosen: list[HeldRun] = []
    lower = [each for each in held if not each.is_leaving and each.priority < priority]
    newest_first = sorted(lower, key=lambda each: each.uid, reverse=True)
    for each in sorted(newest_first, key=lambda each: each.priority):
        chosen.append(each)
        if _fits([*leaving, *chosen], num_trainers, num_replicas):
            break
    else:
        return ()
    for each in reversed(chosen[:]):
        others = [other for other in chosen if other is not each]
        if _fits([*leaving, *others], num_trainers, num_replicas):
            chosen = others
    return tuple(each.uid for each in chosen)


def _fits(paused: Sequence[HeldRun], num_trainers: int, num_replicas: int) -> bool:
    """Return whether the workers of these runs are so many: each has one trainer."""
    return len(paused) >= num_trainers and sum(each.num_replicas for each in paused) >= num_replicas
