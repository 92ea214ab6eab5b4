"""Makes torch repeat itself bit for bit."""

import hashlib
import os
from dataclasses import dataclass
from typing import Self

import torch


def resolve_determinism(choice: str, *, is_compiled: bool) -> str:
    """What `auto` is where blocks are compiled: best effort.

    Compiled kernels depend on which shapes came first, and on whether the compiler worked at all, which another start
    may answer otherwise. The config refuses `strict` there.
    """
    return "best_effort" if is_compiled and choice == "auto" else choice


def set_determinism(choice: str, *, seed: int, device: torch.device) -> bool:
    """Make torch repeat itself bit for bit if asked to (`auto`: on a CPU); return whether it does.

    The number of threads is part of it, because it decides the order of sums: OMP_NUM_THREADS, else 1.
    """
    is_strict = choice == "strict" or (choice == "auto" and device.type == "cpu")
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or 1))
    if is_strict and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS repeats itself only with a fixed workspace
    torch.use_deterministic_algorithms(is_strict)
    # Costs a few per cent of a step on a CPU, and serves operations that read what nobody wrote: no model has any.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue] - it is set
    torch.manual_seed(seed)
    return is_strict


def seed_rank(seed: int, *, rank: int) -> None:
    """Give each rank random numbers of its own; before that, all load the same model with the same ones."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Where the generators are that a computation on a device draws from: the host's, and that of a GPU."""

    device: torch.device
    host: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """As they are now."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device=device, host=torch.get_rng_state(), gpu=gpu)

    def restore(self) -> None:
        """Let what follows draw the same numbers again."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)
