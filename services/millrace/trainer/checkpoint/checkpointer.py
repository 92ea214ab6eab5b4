"""Saves checkpoints while the training goes on.

    main thread      step n ─▶ publish version n + 1 ─▶ (waits for the checkpoint before) write to scratch ─▶ step n + 1
    beside it                                                             upload, manifest, prune, report ─▶

A checkpoint is the state at its step: what is uploaded later was written then. At most one is under way. With
`save_async = false` the training waits for it.
"""

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from millrace.config.sections.shared import CheckpointConfig
from millrace.errors import MillraceError
from millrace.trainer.background import BackgroundWork, BackgroundWriter
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.store import CheckpointStore, WrittenCheckpoint
from millrace.trainer.gang.distributed import Gang

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """What was saved, where, and how long it took until it was durable."""

    step: int
    uri: str
    size_bytes: int
    seconds: float
    manifest_sha256: str


class Checkpointer(BackgroundWriter):
    """Saves at the interval, at the end and on request, and prunes.

    Used as a context manager around the training: leaving it waits for what is under way, or gives it up if the
    training failed. `on_saved` hears of every checkpoint that is durable, on the thread that made it so, and `on_left`
    of what cannot be deleted of those that are not kept.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        config: CheckpointConfig | None,
        *,
        gang: Gang,
        author: Author,
        on_saved: Callable[[SavedCheckpoint], None] = lambda _: None,
        on_left: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._checkpoints = checkpoints
        self._config = config
        self._author = author
        self._on_saved = on_saved
        self._on_left = on_left
        self._told: set[str] = set()
        self._work = BackgroundWork(gang=gang)
        self._is_async = config is not None and config.save_async
        self._uploading = gang.beside("checkpoints") if self._is_async else gang

    @property
    def is_enabled(self) -> bool:
        """Whether the run has checkpoints at all."""
        return self._config is not None

    def is_due(self, step: int) -> bool:
        """Whether the interval asks for a checkpoint of version `step`."""
        return self._config is not None and self._config.interval is not None and step % self._config.interval == 0

    def raise_failure(self) -> None:
        """Raise what saving raised, if it has ended. Collective in a gang."""
        self._work.finish_if_done()

    def save(
        self, state: dict[str, torch.Tensor], *, step: int, lineage: int, chain_hash: bytes, num_skipped: int = 0
    ) -> None:
        """Begin to save version `step`, when the checkpoint before is saved. Collective in a gang."""
        began = time.monotonic()
        self._work.finish()
        written = self._checkpoints.write(
            state, step=step, lineage=lineage, chain_hash=chain_hash, num_skipped=num_skipped, author=self._author
        )
        self._work.begin(f"checkpoint {step} to be saved", lambda: self._commit(written, began=began))
        if not self._is_async:
            self._work.finish()

    def _commit(self, written: WrittenCheckpoint, *, began: float) -> None:
        manifest = self._checkpoints.commit(written, gang=self._uploading)
        saved = SavedCheckpoint(
            step=manifest.step,
            uri=self._checkpoints.uri(manifest.step),
            size_bytes=manifest.size_bytes,
            seconds=time.monotonic() - began,
            manifest_sha256=hashlib.sha256(manifest.to_bytes()).hexdigest(),  # canonical: the stored bytes
        )
        logger.info(
            "checkpoint saved", extra={"step": saved.step, "seconds": round(saved.seconds, 3), "uri": saved.uri}
        )
        self._on_saved(saved)
        if self._uploading.is_leader and self._config is not None:
            self._prune(self._config)

    def _prune(self, config: CheckpointConfig) -> None:
        """Delete what retention does not keep. What was saved is saved, whatever becomes of that."""
        try:
            dropped, left = self._checkpoints.prune(config)
        except MillraceError as error:
            message = f"checkpoints that are no longer kept are looked for later: {error.message}"
            logger.warning(message)
            self._on_left(message)
            return
        for step in dropped:
            logger.info("checkpoint deleted", extra={"step": step})
        for leftover in left:
            if leftover.is_to_be_told and leftover.name not in self._told:
                self._told.add(leftover.name)
                self._on_left(str(leftover))
