"""The state that the training loop works on, and the trainer's turn on devices that it shares with replicas."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from millrace.telemetry.waits import LastingWait
from millrace.trainer.checkpoint.resume import Checkpointer
from millrace.trainer.gang.distributed import Gang, release_unused
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.learning.metrics import Disagreement, KlTrend, ReplayWatch
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
_REPUBLISH = b"republish "
"""Begins the order to all ranks to publish a policy again."""
_SLOW_S = 600.0  # age from which the wait is overdue: an evaluation may have to end


class DeviceLender(Protocol):
    """Grants rank 0 the devices; `TrainerWorker` is one."""

    def request_devices(self) -> None:
        """Ask for a turn on the devices."""
        ...

    def has_devices(self, *, timeout_s: float) -> bool:
        """Return whether this trainer has the turn that it asked for.

        If not, wait up to `timeout_s` for a change first.
        """
        ...

    def return_devices(self) -> None:
        """End the turn: the engines may use the devices again."""
        ...

    def should_stop(self) -> bool:
        """Return whether to raise StopRequested rather than continue to wait."""
        ...


class DeviceTurn:
    """`with turn(version):` runs its block while the replicas sleep; without a lender, at once.

    During the wait `republisher` publishes the live version again if replicas find it damaged, because a replica that
    cannot load it may be the one that does not sleep yet.
    """

    def __init__(
        self, gang: Gang, lender: DeviceLender | None, *, republisher: PolicyRepublisher | None = None
    ) -> None:
        """Take turns by asking `lender`; None: the devices are the trainer's alone.

        During a wait for a turn `republisher` publishes the live policy again if replicas find it damaged.
        """
        self._gang = gang
        self._lender = lender
        self._republisher = republisher
        self._wait = LastingWait()
        self.waited_s = 0.0
        """Seconds of the wait for the last turn."""

    def begin(self) -> None:
        """Release the allocator's unused memory, which loading has left, before the first turn.

        Does nothing if the devices are the trainer's alone.
        """
        if self._lender is not None:
            release_unused(self._gang.device)

    def __call__(self, version: int) -> AbstractContextManager[None]:
        """Return a context that waits for the devices at its start, and returns them at its end. Collective in a gang.

        `version` is the policy version that engines serve during the wait. Raises StopRequested if asked to stop
        meanwhile. After an error in the block the devices are not returned; the worker does that once the error's
        frames are freed. Without a lender the context does nothing.
        """
        return nullcontext() if self._lender is None else self._taken(self._lender, version)

    @contextmanager
    def _taken(self, lender: DeviceLender, version: int) -> Iterator[None]:
        """Wait for the devices, run the block, release unused memory at all ranks, and return the devices.

        `version` is published again if replicas find it damaged during the wait. After an error in the block the
        devices are not returned.
        """
        began = time.monotonic()
        self._take(lender, version)
        self.waited_s = time.monotonic() - began
        yield
        release_unused(self._gang.device)
        self._gang.barrier()  # the replicas wake on the devices of all ranks
        if self._gang.is_leader:
            # A request that is not withdrawn would put the replicas to sleep for a trainer that has left.
            lender.return_devices()

    def _take(self, lender: DeviceLender, version: int) -> None:
        """Wait until the lender grants the devices; raise StopRequested if asked to stop. Collective in a gang.

        Meanwhile `version` is published again whenever replicas find it damaged.
        """
        if self._gang.is_leader:
            lender.request_devices()

        def look() -> bytes:
            """Return what all ranks do next: `go`, `stop`, `_REPUBLISH` and a policy, or `wait` after a short wait."""
            if lender.should_stop():
                # A request that stays would put the replicas to sleep for a trainer that leaves.
                lender.return_devices()
                return b"stop"
            if self._republisher is not None and (policy := self._republisher.policy_to_republish(version)) is not None:
                return _REPUBLISH + policy
            self._wait.on("replicas to sleep", waits_on="orchestrator", key="turn", deadline_s=_SLOW_S)
            return b"go" if lender.has_devices(timeout_s=_POLL_S) else b"wait"

        try:
            while (order := self._gang.from_leader(look)) != b"go":
                if order == b"stop":
                    raise StopRequested
                if self._republisher is not None and order.startswith(_REPUBLISH):
                    self._republisher.republish(order.removeprefix(_REPUBLISH))
        finally:
            self._wait.over()


@dataclass(slots=True, kw_only=True)
class Training(Learner):
    """A run under way. `on_progress` is called with the version after every step.

    Skipped steps count from step `skips_from` on: earlier ones have ended the run once, before it was reopened. Only
    `position`, `saved_version` (the newest checkpoint saved here), and the contents of `kl_trend`, `disagreement` and
    `replay_watch` change.
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
    replay_watch: ReplayWatch = field(default_factory=ReplayWatch)

    def save_due_checkpoint(self) -> float:
        """Save a checkpoint if the configured interval asks for one now; return the seconds that this call took.

        Raises what saving the previous checkpoint raised. Collective in a gang.
        """
        began = time.monotonic()
        self.checkpointer.raise_failure()
        if self.checkpointer.is_due(self.position.version):
            self.save_checkpoint()
        return time.monotonic() - began

    def save_checkpoint(self) -> None:
        """Wait until the policy is published, then start to save the live state as the checkpoint of the position.

        Saving goes on in the background. Collective in a gang.
        """
        # A checkpoint never precedes its version: who resumes from it finds the version in the store.
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
        """Start to save a checkpoint of the position, if the run has checkpoints and this position is not saved yet."""
        if self.checkpointer.is_enabled and self.saved_version != self.position.version:
            self.save_checkpoint()
