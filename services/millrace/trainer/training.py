"""The state that the training loop works on, and the trainer's turn on devices that it shares with replicas."""

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
    """The position of the training: the weights are version `version`, after the batches up to `chain_hash`.

    `num_skipped` are the steps in a row, up to this version, that changed nothing because they were not finite.
    """

    version: int
    chain_hash: bytes
    num_skipped: int = 0


# The trainer's turn on devices that it shares with replicas (`inference.sleep_while_training`).
#
# Before it computes it asks the orchestrator, which puts the replicas to sleep; after publishing the version it
# releases the allocator's unused memory, and the replicas wake. It keeps weights, optimizer state and buffers.

_POLL_S = 0.5  # how soon a stop is noticed
_SLOW_S = 600.0  # age from which the wait is overdue: an evaluation may have to end


class Desk(Protocol):
    """Grants rank 0 the devices; `TrainerWorker` is one."""

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
    """`with turn(version):` runs its block while the replicas sleep; without a desk, at once.

    During the wait `republisher` publishes the live version again if replicas find it damaged, because a replica that
    cannot load it may be the one that does not sleep yet.
    """

    def __init__(self, gang: Gang, desk: Desk | None, *, republisher: PolicyRepublisher | None = None) -> None:
        self._gang = gang
        self._desk = desk
        self._republisher = republisher
        self._wait = LastingWait()
        self.waited_s = 0.0
        """Seconds of the wait for the last turn."""

    def begin(self) -> None:
        """Release the memory that loading has left unused in the allocator; do nothing without a desk."""
        if self._desk is not None:
            release_unused(self._gang.device)

    def __call__(self, version: int) -> AbstractContextManager[None]:
        """Return a context that waits for the devices, and returns them at its end. Collective in a gang.

        `version` is the one that engines serve during the wait. Raises StopRequested if asked to stop meanwhile. After
        an error in the block the devices are not returned; the worker does that once the error's frames are freed.
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
            """Return `go`, `stop`, `mend` with the policy to publish again or, after a short wait, `wait`."""
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
    """A run under way. `on_progress` is called with the version after every step.

    Skipped steps count from step `skips_from` on: earlier ones have ended the run once, before it was reopened. Only
    `position`, `saved_version` (the newest checkpoint saved here), and the contents of `kl_trend` and `disagreement`
    change.
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
        """Save a checkpoint if the interval asks for one; return the seconds that this call took.

        Raises what saving the previous checkpoint raised. Collective in a gang.
        """
        began = time.monotonic()
        self.checkpointer.raise_failure()
        if self.checkpointer.is_due(self.position.version):
            self.save_checkpoint()
        return time.monotonic() - began

    def save_checkpoint(self) -> None:
        """Wait until the policy is published, then start to save the live state as the checkpoint of the position."""
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
        """Save a checkpoint, if the run has checkpoints and this position has not been saved."""
        if self.checkpointer.is_enabled and self.saved_version != self.position.version:
            self.save_checkpoint()
