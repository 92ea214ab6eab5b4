"""What the loop works on: the learner of one run, where its work comes from and where it goes to."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.trainer.checkpoint.checkpointer import Checkpointer
from millrace.trainer.device_turn import DeviceTurn
from millrace.trainer.learning.alarms import Disagreement, KlTrend
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.log.batches import Batches
from millrace.trainer.log.token_log import TokenLogWriter
from millrace.trainer.publish.publisher import Publisher
from millrace.trainer.reporter import Reporter


@dataclass(slots=True)
class Position:
    """Where training stands: the weights are version `version`, after the batches that `chain_hash` proves.

    `num_skipped` are the steps in a row, up to this version, that changed nothing because they were not finite.
    """

    version: int
    chain_hash: bytes
    num_skipped: int = 0


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
        """Begin to save the live state as the checkpoint of the position, behind its policy."""
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
