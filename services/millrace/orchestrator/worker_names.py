"""Kinds of workers, and short names for people, such as `trainer-1`: a worker keeps its own, and its successor gets
the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from millrace.internal.v1 import worker_service_pb2


class WorkerKind(StrEnum):
    """What a worker does for runs, by the name of its service."""

    TRAINER = "trainer"
    ENV_SERVER = "env-server"
    INFERENCE = "inference"


KINDS = {
    worker_service_pb2.WORKER_KIND_TRAINER: WorkerKind.TRAINER,
    worker_service_pb2.WORKER_KIND_ENV_SERVER: WorkerKind.ENV_SERVER,
    worker_service_pb2.WORKER_KIND_INFERENCE: WorkerKind.INFERENCE,
}

MAX_LEFT = 1024
"""Most numbers that are remembered of workers that are gone."""


class Numbered(NamedTuple):
    """A worker: what it is, and the slot that its successor takes over; "" for none."""

    worker_id: str
    kind: str
    slot: str


@dataclass(slots=True)
class WorkerNames:
    """Numbers the workers of each kind; the smallest number that is free goes to the next."""

    _numbers: dict[str, tuple[Numbered, int]] = field(default_factory=dict)
    _left: dict[tuple[str, str], int] = field(default_factory=dict)
    """Numbers of workers that are gone, by kind and slot, for their successors; the newest `MAX_LEFT`."""

    def of(self, workers: Iterable[Numbered]) -> dict[str, str]:
        """Return each worker's name by its id, such as `trainer-1`, and number the new ones.

        `workers` are all that are registered, in order of registration: the number of one that is missing is
        free, first for its successor in the slot, which may come later.
        """
        living = {place.worker_id: place for place in workers}
        gone = [self._numbers.pop(worker) for worker in list(self._numbers) if worker not in living]
        self._left |= {(place.kind, place.slot): number for place, number in gone if place.slot}
        self._left = dict(list(self._left.items())[-MAX_LEFT:])
        new = [place for worker, place in living.items() if worker not in self._numbers]
        # Others must not take a successor's number.
        new.sort(key=lambda place: (place.kind, place.slot) not in self._left)
        for place in new:
            taken = {number for other, number in self._numbers.values() if other.kind == place.kind}
            free = next(each for each in range(1, len(taken) + 2) if each not in taken)
            number = self._left.pop((place.kind, place.slot), free)
            self._numbers[place.worker_id] = (place, free if number in taken else number)
        return {worker: f"{place.kind}-{number}" for worker, (place, number) in self._numbers.items()}
