"""What running runs may have beyond what they began with: up to their most replicas, their group's quota, and without
what is kept for the head of the queue."""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

from millrace.orchestrator.queue.order import QueueGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What is agreed with a run that has workers."""

    group: str
    least_replicas: int = 1
    """Without so many it may not be able to go on: neither a quota nor the head of the queue keeps them from it."""
    most_replicas: int | None = None
    """None is no limit."""


@dataclass(frozen=True, slots=True)
class GivenWorker:
    """A worker that is given to a run."""

    uid: str
    """Of the run."""
    is_replica: bool
    accelerators: int


class FreeWorker(Protocol):
    """A worker that is given to no run."""

    @property
    def worker_id(self) -> str:
        """Return the unique id of the process."""
        ...

    @property
    def accelerators(self) -> int:
        """Return how many accelerators the worker uses."""
        ...


Free = TypeVar("Free", bound=FreeWorker)


class Limits:
    """The limits of one orchestrator's runs. Runs without terms have none."""

    def __init__(self) -> None:
        """Make limits that limit nothing."""
        self._terms: dict[str, Terms] = {}
        self.groups: Mapping[str, QueueGroup] = {}
        self.elsewhere: Mapping[str, int] = {}
        """Accelerators that runs of other orchestrators have, by group."""
        self.head, self.head_replicas = "", 0
        """Uid of the head of the queue, and how many replicas it needs: so many of those that are free, or become free
        between two looks, are kept for it."""

    def admit(self, uid: str, terms: Terms) -> None:
        """Note the terms of a run that gets workers."""
        self._terms[uid] = terms

    def forget(self, uid: str) -> None:
        """Drop the terms of a run that gave its workers back."""
        self._terms.pop(uid, None)

    def kept_from(self, uid: str) -> int:
        """Return how many free replicas are kept from a run for the head of the queue."""
        return 0 if uid == self.head else self.head_replicas

    def least(self, uid: str) -> int:
        """Return how many replicas a run gets before any limit counts."""
        return self._terms[uid].least_replicas if uid in self._terms else 0

    def counted(self, held: Iterable[GivenWorker]) -> Counter[str]:
        """Return by run how many accelerators its workers have, with one for each replica that it lacks of its least.

        A run that has not got its first replica must not lose the room for it to the next run of its group.
        """
        found, num_replicas = Counter[str](), Counter[str]()
        for each in held:
            found[each.uid] += each.accelerators
            num_replicas[each.uid] += each.is_replica
        for uid in found:
            found[uid] += max(0, self.least(uid) - num_replicas[uid])
        return found

    def allowed(
        self,
        uid: str,
        free: Iterable[Free],
        *,
        num_replicas: int,
        held: Iterable[GivenWorker],
        kept: Container[str] = (),
    ) -> list[Free]:
        """Return those of the free replicas that a run may take, in their order.

        It has `num_replicas`, and may take any up to its least. Beyond that its group's quota counts, and what is kept
        for the head of the queue: `kept`, ids of replicas. `held` are all workers that are given to runs.
        """
        room, found = self.room(uid, held), list[Free]()
        for replica in free:
            if num_replicas + len(found) >= self.least(uid):
                if room < replica.accelerators or replica.worker_id in kept:
                    continue
                room -= replica.accelerators
            found.append(replica)
        return found

    def share(self, uid: str, others: Iterable[str], num_replicas: int) -> int:
        """Return how many of the deployment's replicas a run may have: all, divided by the runs, within its terms.

        `others` are the uids of runs that have workers, possibly with `uid`. What the division leaves over goes to the
        first runs by their uids, so that no run is left without a replica as long as there are as many replicas as
        runs.
        """
        runs = sorted({*others, uid} - {""})
        each, left = divmod(num_replicas, len(runs))
        share = max(1, self.least(uid), each + (runs.index(uid) < left))
        most = self._terms[uid].most_replicas if uid in self._terms else None
        return share if most is None else min(share, most)

    def room(self, uid: str, held: Iterable[GivenWorker]) -> float:
        """Return how many accelerators more the quota of a run's group allows; infinite without one.

        `held` are all workers that are given to runs.
        """
        group = self._terms[uid].group if uid in self._terms else ""
        quota = self.groups[group].quota if group in self.groups else None
        if quota is None:
            return math.inf
        mine = sum(
            count
            for other, count in self.counted(held).items()
            if other in self._terms and self._terms[other].group == group
        )
        return quota - mine - self.elsewhere.get(group, 0)
