"""Preemption: which running runs pause for the head of the queue, a function without I/O.

A run pauses for another only if it may (`queue.preemptible`), if the other one's priority is higher, and if the workers
of those that pause, with what is free, are all that the other one needs. Of the priority of who waits nothing counts
that it gained by waiting, so waiting makes no run pause. Of the priority of who runs that counts: a run that waited
long keeps what it got at last, and two runs never preempt each other in turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass


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
