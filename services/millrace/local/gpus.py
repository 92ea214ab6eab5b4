"""The assignment of this machine's GPUs to the engine and the trainer of a one-machine stack."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from millrace.errors import InvalidStateError

SHARED_UTILIZATION = 0.4
"""Part of a GPU that vLLM takes where the trainer is on it, too, unless its weights need more or the step leaves less.

vLLM's own default, 0.92, would leave the trainer nothing.
"""
DEVICE = Path("/dev/nvidia0")
"""The device of a first GPU."""
DRIVER = Path("/sys/module/nvidia/version")
"""The file with the version of the driver that the kernel has loaded."""
CUDA_13_DRIVER = 580
"""The first driver on which wheels of CUDA 13 work; torch from PyPI is made for that since 2.11."""
_TIMEOUT_S = 20.0


def machine_gpus(environ: Mapping[str, str] = os.environ) -> tuple[int, ...]:
    """Return the numbers of the GPUs that nvidia-smi lists, as far as CUDA_VISIBLE_DEVICES allows.

    None without a driver. The variable may name them by number or by (the beginning of) their UUID; parts of a GPU
    (MIG) are not found.
    """
    found = _asked("uuid", environ)
    if (visible := environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return tuple(found)
    names = [name.strip() for name in visible.split(",")]
    return tuple(
        index
        for name in names
        for index, uuid in found.items()
        if name == str(index) or (name.startswith("GPU-") and uuid.startswith(name))
    )


def memory_gib(gpus: Sequence[int], environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the memory of the smallest of these GPUs, in GiB; None if the driver does not report all."""
    found = _asked("memory.total", environ, "nounits")
    sizes = [found.get(index, "") for index in gpus]
    if not sizes or not all(size.isdecimal() for size in sizes):
        return None
    return min(map(int, sizes)) / 1024  # the driver says MiB


def _asked(field: str, environ: Mapping[str, str], *form: str) -> dict[int, str]:
    """Return a field of each GPU, by its number, from nvidia-smi; nothing without a driver that answers."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return {}
    try:
        command = [program, f"--query-gpu=index,{field}", f"--format={','.join(('csv', 'noheader', *form))}"]
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return {}
    lines = answer.stdout.splitlines() if answer.returncode == 0 else []
    rows = [line.replace(" ", "").split(",") for line in lines]
    return {int(row[0]): row[1] for row in rows if len(row) == 2 and row[0].isdecimal()}


def training_gpus(environ: Mapping[str, str] = os.environ, *, torch_version: str | None = None) -> tuple[int, ...]:
    """Return the GPUs for a trainer whose config names none: all of `machine_gpus`, or none if it trains on the CPU.

    It does for a wheel of torch that is made for CPUs, or with MILLRACE_TRAINER_DEVICE=cpu.
    """
    wheel = version("torch") if torch_version is None else torch_version
    return () if environ.get("MILLRACE_TRAINER_DEVICE") == "cpu" or wheel.endswith("+cpu") else machine_gpus(environ)


def driver_version() -> str:
    """Return the version of NVIDIA's driver that the kernel has loaded; "" without one."""
    return DRIVER.read_text().strip() if DRIVER.exists() else ""


def wheel_version() -> str:
    """Return the version of torch here, with the local part that names its CUDA release, if it has one; "" without
    torch.
    """
    try:
        return version("torch")
    except PackageNotFoundError:  # a machine from which runs are only submitted
        return ""


def is_too_old(driver: str, wheel: str) -> bool:
    """Return whether a wheel of torch cannot work on this driver; False if the versions do not show it."""
    release, _, made_for = wheel.partition("+")
    numbers = [int(part) if part.isdecimal() else 0 for part in (*release.split(".")[:2], driver.split(".")[0])]
    if len(numbers) < 3 or not numbers[2]:
        return False
    is_cuda_13 = made_for.startswith("cu13") or (not made_for and numbers[:2] >= [2, 11])
    return is_cuda_13 and numbers[2] < CUDA_13_DRIVER


def assign(
    gpus: Sequence[int],
    *,
    engine_size: int,
    inference: Sequence[int] | None = None,
    trainer: Sequence[int] | None = None,
) -> dict[str, tuple[int, ...]]:
    """Return the GPUs of each service: those configured, else the first `engine_size` for the engine and the rest for
    the trainer.

    `inference` and `trainer` are configured ones. With too few GPUs both share them. Without GPUs only configured
    services have an entry.
    """
    given = {name: tuple(ids) for name, ids in (("inference", inference), ("trainer", trainer)) if ids is not None}
    if not gpus:
        return given
    free = [index for index in gpus if index not in given.get("trainer", ())] or list(gpus)
    engine = given.setdefault("inference", tuple(free[:engine_size]))
    given.setdefault("trainer", tuple(index for index in gpus if index not in engine) or tuple(gpus))
    return given


def are_shared(assigned: Mapping[str, Sequence[int]]) -> bool:
    """Return whether engine and trainer have a GPU in common."""
    return bool({*assigned.get("inference", ())} & {*assigned.get("trainer", ())})


def require(assigned: Mapping[str, Sequence[int]], gpus: Sequence[int]) -> None:
    """Raise InvalidStateError (GPU_UNUSABLE) with every GPU that a service was assigned and that is not in `gpus`."""
    missing = {name: [index for index in ids if index not in gpus] for name, ids in assigned.items()}
    descriptions = [f"{name} {', '.join(map(str, ids))}" for name, ids in missing.items() if ids]
    if descriptions:
        seen = ", ".join(map(str, gpus)) or "none"
        raise InvalidStateError(
            f"GPUs are asked for that this machine does not show: {'; '.join(descriptions)} (nvidia-smi shows: {seen})",
            reason="GPU_UNUSABLE",
            remedy="fix the driver (`nvidia-smi` has to list them; CUDA 13 needs 580 or newer), or name others in "
            "inference_gpu_ids and trainer_gpu_ids; [] trains on the CPU",
        )
