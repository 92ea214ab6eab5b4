"""What the loop works on: the learner of one run, where its work comes from and where it goes to."""

from collections.abc import Callable
from dataclasses import dataclass

from millrace.trainer.checkpoint.checkpointer import Checkpointer
from millrace.trainer.learning.learner import Learner, state_tensors
from millrace.trainer.log.batches import Batches
from millrace.trainer.publish.publisher import Publisher
from millrace.trainer.reporter import Reporter


@dataclass(slots=True)
class Position:
    """Where training stands: the weights are version `version`, after the batches that `chain_hash` proves."""

    version: int
    chain_hash: bytes


@dataclass(slots=True, kw_only=True)
class Training(Learner):
    """A run under way. `on_progress` hears the version after every step.

    Only `position` and `saved_version`, the newest checkpoint saved here, change.
    """

    batches: Batches
    publisher: Publisher
    checkpointer: Checkpointer
    reporter: Reporter
    position: Position
    on_progress: Callable[[int], None]
    saved_version: int | None = None

    def save_checkpoint(self) -> float:
        """Save the live state as the checkpoint of the position, behind its policy; return the seconds it took."""
        self.publisher.finish()
        state = state_tensors(self.model, self.optimizer, gang=self.gang)
        saved = self.checkpointer.save(
            state, step=self.position.version, chain_hash=self.position.chain_hash, lineage=self.publisher.lineage
        )
        self.reporter.checkpoint_saved(
            step=self.position.version,
            uri=saved.uri,
            size_bytes=saved.size_bytes,
            manifest_sha256=saved.manifest_sha256,
        )
        self.saved_version = self.position.version
        return saved.seconds

    def save_last_checkpoint(self) -> None:
        """Save the position on the way out, if the run has checkpoints and the interval has not just saved it."""
        if self.checkpointer.is_enabled and self.saved_version != self.position.version:
            self.save_checkpoint()
