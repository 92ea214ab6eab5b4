"""What the loop works on: the parts of one run's training, put together by `job`."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from millrace.config.trainer import TrainerConfig
from millrace.trainer.batch import MicroBatch
from millrace.trainer.batches import Batches
from millrace.trainer.checkpoint import Checkpointer
from millrace.trainer.distributed import Gang
from millrace.trainer.forward import token_logprobs
from millrace.trainer.optimizer import PolicyOptimizer
from millrace.trainer.publisher import Publisher
from millrace.trainer.reporter import Reporter


@dataclass(slots=True)
class Position:
    """Where training stands: the weights are version `version`, after the batches that `chain_hash` proves."""

    version: int
    chain_hash: bytes


@dataclass(slots=True, kw_only=True)
class Training:
    """The parts; only `position` and `saved_version`, the newest checkpoint saved here, change.

    `on_progress` hears the version after every step; `autocast_dtype` is None where none is needed.
    """

    config: TrainerConfig
    gang: Gang
    model: nn.Module
    batches: Batches
    optimizer: PolicyOptimizer
    publisher: Publisher
    checkpointer: Checkpointer
    reporter: Reporter
    position: Position
    autocast_dtype: torch.dtype | None
    on_progress: Callable[[int], None]
    saved_version: int | None = None

    def logprobs(self, micro_batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of a micro-batch under the live model, [B, T]."""
        return token_logprobs(self.model, micro_batch, autocast_dtype=self.autocast_dtype)

    @contextlib.contextmanager
    def learning(self) -> Iterator[None]:
        """In this block the model's dropout is active, if the run wants it; elsewhere it never is, as in the engine."""
        self.model.train(self.config.model.dropout)
        try:
            yield
        finally:
            self.model.eval()

    def save_checkpoint(self) -> float:
        """Saves the live state as the checkpoint of the position, reports it, returns the seconds it took."""
        state = state_tensors(self.model, self.optimizer, gang=self.gang)
        saved = self.checkpointer.save(
            state, step=self.position.version, chain_hash=self.position.chain_hash, lineage=self.publisher.lineage
        )
        self.reporter.checkpoint_saved(step=self.position.version, uri=saved.uri, size_bytes=saved.size_bytes)
        self.saved_version = self.position.version
        return saved.seconds

    def save_last_checkpoint(self) -> None:
        """Saves the position on the way out, if the run has checkpoints and the interval has not just saved it."""
        if self.checkpointer.is_enabled and self.saved_version != self.position.version:
            self.save_checkpoint()


def state_tensors(model: nn.Module, optimizer: PolicyOptimizer, *, gang: Gang) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, as live tensors by name: weights once each, optimizer state, random state."""
    state: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[f"model.{name}"] = tensor.detach()
    for name, parts in optimizer.state_tensors().items():
        state |= {f"optim.{name}.{part}": tensor for part, tensor in parts.items()}
    state[f"rng.cpu.{gang.rank}"] = torch.get_rng_state()
    if gang.device.type == "cuda":
        state[f"rng.cuda.{gang.rank}"] = torch.cuda.get_rng_state(gang.device)
    return state


def restore_random_state(state: dict[str, torch.Tensor], *, gang: Gang) -> None:
    """Sets the generators from a state that was filled from a checkpoint; the rest of it is live already."""
    torch.set_rng_state(state[f"rng.cpu.{gang.rank}"])
    if gang.device.type == "cuda":
        torch.cuda.set_rng_state(state[f"rng.cuda.{gang.rank}"], gang.device)
