"""What a training step computes with: model, optimizer, and their state as tensors by name."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from millrace.config.rl import RLConfig
from millrace.config.trainer import TrainerConfig
from millrace.trainer.batch import MicroBatch
from millrace.trainer.determinism import seed_rank, set_determinism
from millrace.trainer.distributed import Gang
from millrace.trainer.forward import token_logprobs
from millrace.trainer.model import load_model, resolve_dtype
from millrace.trainer.optimizer import PolicyOptimizer


@dataclass(slots=True, kw_only=True)
class Learner:
    """What a step computes with.

    `autocast_dtype` is None where none is needed; `is_strict` says whether equal steps give equal bits.
    """

    config: TrainerConfig
    gang: Gang
    model: nn.Module
    optimizer: PolicyOptimizer
    autocast_dtype: torch.dtype | None
    is_strict: bool

    @classmethod
    def of_start_model(cls, config: RLConfig, *, gang: Gang, directory: Path) -> "Learner":
        """The learner of a run at version 0, with the model in `directory`. Collective in a gang."""
        trainer = config.trainer
        is_strict = set_determinism(trainer.determinism, seed=config.seed, device=gang.device)
        compute_dtype = resolve_dtype(trainer.model.dtype, device=gang.device)
        model = gang.shard(load_model(directory), compute_dtype=compute_dtype)
        seed_rank(config.seed, rank=gang.rank)
        return cls(
            config=trainer,
            gang=gang,
            model=model,
            optimizer=PolicyOptimizer(
                model, optim=trainer.optim, scheduler=trainer.scheduler, max_steps=trainer.max_steps
            ),
            autocast_dtype=compute_dtype if gang.is_alone and compute_dtype != torch.float32 else None,
            is_strict=is_strict,
        )

    @property
    def publish_dtype(self) -> torch.dtype:
        """Number format of published policies; `auto` is what the trainer computes in."""
        model = self.config.model
        choice = model.dtype if model.publish_dtype == "auto" else model.publish_dtype
        return resolve_dtype(choice, device=self.gang.device)

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
