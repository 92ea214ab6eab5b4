"""The trainer's turn on devices that it shares with replicas (`inference.sleep_while_training`).

Before it computes it asks the orchestrator, which puts the replicas to sleep; behind the version that it published it
gives back what its allocator has kept, and the replicas wake. What it keeps are weights, optimizer state and buffers.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from millrace.telemetry.waits import LastingWait
from millrace.trainer.gang.devices import release_unused
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.log.stop import StopRequested

_POLL_S = 0.5  # how soon a stop is noticed
_SLOW_S = 600.0  # age from which the wait is overdue: an evaluation may have to end


class Desk(Protocol):
    """Where rank 0 asks for devices; `TrainerWorker` is one."""

    def want_devices(self) -> None:
        """Ask for a turn."""
        ...

    def has_devices(self, *, timeout_s: float) -> bool:
        """Whether the turn is this trainer's; waits for that so long at most."""
        ...

    def return_devices(self) -> None:
        """The turn is over."""
        ...

    def should_stop(self) -> bool:
        """Whether to raise StopRequested instead of waiting on."""
        ...


class DeviceTurn:
    """`with turn():` computes while the replicas sleep. Without a desk it computes at once."""

    def __init__(self, gang: Gang, desk: Desk | None) -> None:
        self._gang = gang
        self._desk = desk
        self._wait = LastingWait()
        self.waited_s = 0.0
        """Seconds that the last turn was waited for."""

    def __call__(self) -> AbstractContextManager[None]:
        """A turn. Entering it waits as long as it takes, and raises StopRequested if asked to; collective in a gang."""
        return nullcontext() if self._desk is None else self._taken(self._desk)

    @contextmanager
    def _taken(self, desk: Desk) -> Iterator[None]:
        try:
            self._take(desk)
            yield
        finally:
            release_unused(self._gang.device)
            if self._gang.is_leader:
                desk.return_devices()

    def _take(self, desk: Desk) -> None:
        began = time.monotonic()
        if self._gang.is_leader:
            desk.want_devices()

        def look() -> str:
            """At rank 0: `go`, `stop` or, after a short wait, `wait`."""
            if desk.should_stop():
                return "stop"
            self._wait.on("replicas to sleep", waits_on="orchestrator", key="turn", deadline_s=_SLOW_S)
            return "go" if desk.has_devices(timeout_s=_POLL_S) else "wait"

        try:
            while (told := self._gang.from_leader(look)) == "wait":
                continue
        finally:
            self._wait.over()
        self.waited_s = time.monotonic() - began
        if told == "stop":
            raise StopRequested
