"""What the loop works on, and the trainer's turn on devices that it shares with replicas."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from millrace.telemetry.waits import LastingWait
from millrace.trainer.checkpoint.resume import Checkpointer
from millrace.trainer.gang.devices import release_unused
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.learning.metrics import Disagreement, KlTrend
from millrace.trainer.log.background import StopRequested
from millrace.trainer.log.batches import Batches, PolicyRepublisher
from millrace.trainer.log.token_log import TokenLogWriter
from millrace.trainer.publish.publisher import Publisher
from millrace.trainer.reporter import Reporter


@dataclass(slots=True)
class Position:
    """The position of the training: the weights are version `version`, after the batches that `chain_hash` proves.

    `num_skipped` are the steps in a row, up to this version, that changed nothing because they were not finite.
    """

    version: int
    chain_hash: bytes
    num_skipped: int = 0


# The trainer's turn on devices that it shares with replicas (`inference.sleep_while_training`).
#
# Before it computes it asks the orchestrator, which puts the replicas to sleep; after the version that it published
# it gives back what its allocator has kept, and the replicas wake. What it keeps are weights, optimizer state and
# buffers.

_POLL_S = 0.5  # how soon a stop is noticed
_SLOW_S = 600.0  # age from which the wait is overdue: an evaluation may have to end


class Desk(Protocol):
    """Where rank 0 asks for devices; `TrainerWorker` is one."""

    def want_devices(self) -> None:
        """Ask for a turn."""
        ...

    def has_devices(self, *, timeout_s: float) -> bool:
        """Return whether this trainer has the devices' turn; wait for that up to the timeout."""
        ...

    def return_devices(self) -> None:
        """Return the devices to the engines: the turn is over."""
        ...

    def should_stop(self) -> bool:
        """Return whether to raise StopRequested rather than continue to wait."""
        ...


class DeviceTurn:
    """`with turn(version):` computes while the replicas sleep. Without a desk it computes at once.

    `mender` publishes the live version anew if replicas find it damaged: one that cannot load it may be what is waited
    for.
    """

    def __init__(self, gang: Gang, desk: Desk | None, *, republisher: PolicyRepublisher | None = None) -> None:
        self._gang = gang
        self._desk = desk
        self._republisher = republisher
        self._wait = LastingWait()
        self.waited_s = 0.0
        """Seconds that the last turn was waited for."""

    def begin(self) -> None:
        """Give back what loading has left to the allocator."""
        if self._desk is not None:
            release_unused(self._gang.device)

    def __call__(self, version: int) -> AbstractContextManager[None]:
        """Wait for a turn on the devices, before which engines serve `version`; raise StopRequested when asked to stop.

        Collective in a gang. An error within leaves the devices this process's until the worker has freed what the
        error's frames hold.
        """
        return nullcontext() if self._desk is None else self._taken(self._desk, version)

    @contextmanager
    def _taken(self, desk: Desk, version: int) -> Iterator[None]:
        began = time.monotonic()
        self._take(desk, version)
        self.waited_s = time.monotonic() - began
        yield
        release_unused(self._gang.device)
        self._gang.barrier()  # the replicas wake on the devices of all ranks
        if self._gang.is_leader:
            desk.return_devices()

    def _take(self, desk: Desk, version: int) -> None:
        if self._gang.is_leader:
            desk.want_devices()

        def look() -> bytes:
            """Return at rank 0 `go`, `stop`, the policy to publish anew (`mend`) or, after a short wait, `wait`."""
            if desk.should_stop():
                desk.return_devices()
                return b"stop"
            if self._republisher is not None and (policy := self._republisher.policy_to_republish(version)) is not None:
                return b"mend" + policy
            self._wait.on("replicas to sleep", waits_on="orchestrator", key="turn", deadline_s=_SLOW_S)
            return b"go" if desk.has_devices(timeout_s=_POLL_S) else b"wait"

        try:
            while (order := self._gang.from_leader(look)) != b"go":
                if order == b"stop":
                    raise StopRequested
                if self._republisher is not None and order.startswith(b"mend"):
                    self._republisher.republish(order[4:])
        finally:
            self._wait.over()


@dataclass(slots=True, kw_only=True)
class Training(Learner):
    """A run under way. `on_progress` hears the version after every step.

    Skipped steps count from step `skips_from` on: those before a failed run was reopened ended it once already.
    Only `position` and `saved_version`, the newest checkpoint saved here, change, and what `kl_trend` and
    `disagreement` have seen.
    """

    batches: Batches
    publisher: Publisher
    checkpointer: Checkpointer
    token_logs: TokenLogWriter
    reporter: Reporter
    position: Position
    on_progress: Callable[[int], None]
    turn: DeviceTurn
    skips_from: int = 0
    saved_version: int | None = None
    kl_trend: KlTrend = field(default_factory=KlTrend)
    disagreement: Disagreement = field(default_factory=Disagreement)

    def save_due_checkpoint(self) -> float:
        """Save the position if the interval asks for it; return the seconds that the training was held up.

        Raises what saving the checkpoint before raised. Collective in a gang.
        """
        began = time.monotonic()
        self.checkpointer.raise_failure()
        if self.checkpointer.is_due(self.position.version):
            self.save_checkpoint()
        return time.monotonic() - began

    def save_checkpoint(self) -> None:
        """Begin to save the live state as the checkpoint of the position, after its policy."""
        self.publisher.finish()
        state = state_tensors(self.model, self.optimizer, gang=self.gang)
        self.checkpointer.save(
            state,
            step=self.position.version,
            chain_hash=self.position.chain_hash,
            num_skipped=self.position.num_skipped,
            lineage=self.publisher.lineage,
        )
        self.saved_version = self.position.version

    def save_last_checkpoint(self) -> None:
        """Save the position on the way out, if the run has checkpoints and the interval has not just saved it."""
        if self.checkpointer.is_enabled and self.saved_version != self.position.version:
            self.save_checkpoint()
