"""The device that a rank computes on: the GPU that was asked for, or an error that says why there is none.

Nothing falls back to a CPU silently. `MILLRACE_TRAINER_DEVICE=cuda` requires a GPU; the local stack, the chart and
compose set it if they give the trainer one. `auto`, the default, requires one if the machine has one and torch is built
for CUDA: a laptop with a GPU and a CPU wheel trains on the CPU.
"""

import hashlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from millrace.errors import InvalidSpecError, InvalidStateError, Violation

logger = logging.getLogger(__name__)

VARIABLE = "MILLRACE_TRAINER_DEVICE"
"""auto, cpu or cuda."""
CHOICES = ("auto", "cpu", "cuda")
_GPU = Path("/dev/nvidia0")
_DRIVER = Path("/sys/module/nvidia/version")


def choose_device(environ: Mapping[str, str] = os.environ, *, gpu: Path = _GPU, driver: Path = _DRIVER) -> torch.device:
    """Choose the device of this rank from MILLRACE_TRAINER_DEVICE, LOCAL_RANK and CUDA_VISIBLE_DEVICES.

    `gpu` and `driver` are the kernel's files that show a GPU and its driver's version. Raises InvalidStateError
    (GPU_UNUSABLE) if a GPU is required and cannot be used, and InvalidSpecError for an unknown choice.
    """
    choice = environ.get(VARIABLE) or "auto"
    if choice not in CHOICES:
        message = f"must be one of {', '.join(CHOICES)}"
        raise InvalidSpecError([Violation(field=VARIABLE, value=choice, message=message, source="environment")])
    if choice == "cpu" or (choice == "auto" and environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")):
        return torch.device("cpu")
    local_rank = int(environ.get("LOCAL_RANK", "0"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if local_rank < found:
        return torch.device("cuda", local_rank)
    if choice == "auto" and not found and not (gpu.exists() and torch.version.cuda):
        return torch.device("cpu")
    raise _unusable(environ, local_rank=local_rank, found=found, driver=driver)


def release_unused(device: torch.device) -> None:
    """Give the allocator's unused memory back to the GPU, after all queued work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def release_after_failure(device: torch.device) -> None:
    """Give unused memory back after a failed job; only log an error of the device, which may be broken itself."""
    try:
        release_unused(device)
    except RuntimeError:
        logger.warning("the device's memory cannot be given back", exc_info=True)


def _unusable(environ: Mapping[str, str], *, local_rank: int, found: int, driver: Path) -> InvalidStateError:
    version = driver.read_text().strip() if driver.exists() else "none that the kernel shows"
    wheel = f"torch {torch.__version__}, " + (f"CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA")
    seen = environ.get("CUDA_VISIBLE_DEVICES")
    visible = f"; CUDA_VISIBLE_DEVICES is {seen!r}" if seen is not None else ""
    if found:
        what = f"rank {local_rank} of this machine has no GPU: torch sees {found}"
        remedy = f"start at most {found} ranks here, or make more GPUs visible"
    elif not torch.version.cuda:
        what = "a GPU is asked for or there, and this torch cannot use it"
        remedy = "install a CUDA wheel of torch (an image with the tag -cuda)"
    else:
        what = "a GPU is asked for or there, and CUDA does not start"
        remedy = "install a driver that the wheel works with (CUDA 13: 580 or newer), or an older wheel"
    return InvalidStateError(
        f"{what} (driver: {version}; wheel: {wheel}{visible})",
        reason="GPU_UNUSABLE",
        remedy=f"{remedy}; to train on the CPU set {VARIABLE}=cpu",
    )


# Makes torch repeat itself bit for bit.


def resolve_determinism(choice: str, *, is_compiled: bool) -> str:
    """Return "best_effort" for `auto` if blocks are compiled, else `choice` as it is.

    Compiled kernels depend on which shapes came first, and on whether the compiler worked at all, which may differ at
    another start. The config refuses `strict` together with compiled blocks.
    """
    return "best_effort" if is_compiled and choice == "auto" else choice


def set_determinism(choice: str, *, seed: int, device: torch.device) -> bool:
    """Make torch deterministic for "strict", or for "auto" on a CPU; seed it in any case. Return whether it is.

    Sets the number of threads on a CPU, because it decides the order of sums: OMP_NUM_THREADS, else 1.
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
    """Set torch's seed, differently at each rank; before, all ranks have one seed, so that they make the same model."""
    torch.manual_seed(int.from_bytes(hashlib.sha256(f"{seed}/{rank}".encode()).digest()[:8]))


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """The states of the random generators that a computation on a device draws from: the host's, and that of a GPU."""

    device: torch.device
    host: torch.Tensor
    gpu: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> Self:
        """Read the current state."""
        gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device=device, host=torch.get_rng_state(), gpu=gpu)

    def restore(self) -> None:
        """Restore the random state, so that the same numbers are drawn again."""
        torch.set_rng_state(self.host)
        if self.gpu is not None:
            torch.cuda.set_rng_state(self.gpu, self.device)
