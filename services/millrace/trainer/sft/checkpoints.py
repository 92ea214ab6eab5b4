"""The checkpoints of a fine-tuning, found by its run, and the record of what is trained there.

They lie in the run's own directory. A run that is started again continues from the newest one, also to more steps; it
is refused if a key changed that makes it another training.
"""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from millrace.config.sections.sft import SFTConfig
from millrace.decoding import decode_object
from millrace.errors import InvalidSpecError, Violation
from millrace.runlog import ZERO_CHAIN_HASH, Names
from millrace.storage.local import LocalStore
from millrace.storage.retry import RetryPolicy
from millrace.trainer.checkpoint.checkpointer import Checkpointer
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.resume import describe, resume
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.learner import state_tensors
from millrace.trainer.learning.optimizer import PolicyOptimizer

logger = logging.getLogger(__name__)

_NAMES = Names("sft", "run")  # every run has a directory of its own
_RECORD = f"{_NAMES.root}training.json"
_MAX_RECORD_BYTES = 1 << 20
# Only a full disk is tried again, and nothing of this command makes room there but the removal of old checkpoints.
_RETRY = RetryPolicy(deadline_s=5.0)
_MAY_CHANGE = (
    "max_steps",
    "max_skipped_steps",
    "micro_batch_tokens",
    "output_dir",
    "ckpt",
    "eval",
    "inference",
    "inference_gpu_ids",
    "log",
    "pack",
    "run",
    "val",
    "wandb",
)
"""Keys and tables that do not make another training of one that is continued: how long, where, and what is shown."""


class SFTCheckpoints:
    """Saves and restores the state of one run: model, optimizer, and the position in the data. Collective in a gang."""

    def __init__(
        self,
        config: SFTConfig,
        directory: Path,
        *,
        model: nn.Module,
        optimizer: PolicyOptimizer,
        gang: Gang,
        data: Mapping[str, Any],
        base_digest: str = "",
    ) -> None:
        """`data` says in words what the rows are: another training is one on other rows."""
        self._model = model
        self._optimizer = optimizer
        self._gang = gang
        self._position = torch.zeros((), dtype=torch.int64)
        self._checkpointer: Checkpointer | None = None
        if config.ckpt is None:
            return
        self._training = {**_flat(_training(config)), **data}
        self._run_hash = hashlib.sha256(json.dumps(self._training, sort_keys=True).encode()).hexdigest()
        self._store = LocalStore(directory, setting="output_dir", retry=_RETRY)
        self._checkpoints = CheckpointStore(self._store, _NAMES, gang=gang)
        self._author = Author(run_hash=self._run_hash, epoch=0, determinism="best_effort", base_digest=base_digest)
        self._checkpointer = Checkpointer(self._checkpoints, config.ckpt, gang=gang, author=self._author)
        self._resume_step = config.ckpt.resume_step

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._checkpointer is not None:
            self._checkpointer.__exit__(kind, error, traceback)

    @property
    def num_bytes(self) -> int:
        """How many bytes the tensors of one checkpoint take; 0 if none is saved."""
        if self._checkpointer is None:
            return 0
        tensors = state_tensors(self._model, self._optimizer, gang=self._gang).values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def resume(self, *, max_steps: int | None) -> tuple[int, int, int]:
        """Fill the state from the newest checkpoint, if there is one.

        Return the next step, its position, and how many steps in a row before it changed nothing.

        InvalidSpecError names the keys that changed and may not, and a `max_steps` that is over already.
        """
        if self._checkpointer is None:
            return 0, 0, 0
        self._gang.agree(self._require_same_training)
        found = resume(
            self._checkpoints,
            self._model,
            self._optimizer,
            gang=self._gang,
            author=self._author,
            more={"data.position": self._position},
        )
        if found.damaged:
            logger.warning(f"damaged checkpoints are left aside: {describe(found)}; going on from {found.start}")
        step, num_skipped = (0, 0) if found.manifest is None else (found.manifest.step, found.manifest.num_skipped)
        if self._resume_step not in (None, -1, step):
            problem = Violation(
                field="ckpt.resume_step",
                value=str(self._resume_step),
                message=f"is not that of the newest checkpoint, {step}, which fine-tuning goes on from",
            )
            raise InvalidSpecError(
                [problem], remedy="leave it out, or begin from a model directory under another run.name"
            )
        if max_steps is not None and step > max_steps:
            problem = Violation(
                field="max_steps", value=str(max_steps), message=f"is less than the {step} steps that the run has made"
            )
            raise InvalidSpecError([problem], remedy="raise it, or give the new training another run.name")
        return step, int(self._position), num_skipped

    def maybe_save(self, step: int, *, position: int, num_skipped: int, is_last: bool) -> None:
        """Save a checkpoint at the interval and at the end, if the config has checkpoints."""
        if self._checkpointer is None:
            return
        self._checkpointer.raise_failure()
        if is_last or self._checkpointer.is_due(step):
            self._position.fill_(position)
            state = state_tensors(self._model, self._optimizer, gang=self._gang) | {"data.position": self._position}
            self._checkpointer.save(state, step=step, lineage=0, chain_hash=ZERO_CHAIN_HASH, num_skipped=num_skipped)

    def _require_same_training(self) -> None:
        """At rank 0: InvalidSpecError if the checkpoints are of another training; without any, note what is trained."""
        if not self._gang.is_leader:
            return
        if next(iter(self._checkpoints.steps()), None) is None or self._store.head(_RECORD) is None:
            self._store.put(_RECORD, json.dumps(self._training, sort_keys=True, indent=1).encode())
            return
        saved = decode_object(
            self._store.get(_RECORD, max_bytes=_MAX_RECORD_BYTES),
            what=f"the record {self._store.uri(_RECORD)}",
            reason="TRAINING_RECORD_INVALID",
            remedy="delete it, if the config is the one that the run was started with",
            max_bytes=_MAX_RECORD_BYTES,
        )
        changed = [
            Violation(
                field=key,
                value=json.dumps(self._training.get(key)),
                message=f"was {json.dumps(saved.get(key))} in the checkpoints of this run, which makes it another "
                "training",
            )
            for key in sorted(saved.keys() | self._training.keys())
            if saved.get(key) != self._training.get(key)
        ]
        if changed:
            remedy = "set it back to continue the run, or give the new training another run.name"
            raise InvalidSpecError(changed, remedy=remedy)


def _training(config: SFTConfig) -> dict[str, Any]:
    """The keys that decide what is learned."""
    document = config.model_dump(mode="json")
    del document["model"]["publish_dtype"]
    return {key: value for key, value in document.items() if key not in _MAY_CHANGE}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A tree of tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
