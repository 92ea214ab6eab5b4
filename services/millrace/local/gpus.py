"""The assignment of this machine's GPUs to the engine and the trainer of a one-machine stack."""

import asyncio
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from millrace.config import RLConfig
from millrace.errors import InvalidStateError
from millrace.inference.launch_env import is_given
from millrace.processes import sessions
from millrace.storage.clean_up import TemporaryDirectory

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
    """Return the numbers of the GPUs that nvidia-smi lists, as far as CUDA_VISIBLE_DEVICES of `environ` allows.

    It is empty without a driver. The variable may name them by number or by (the beginning of) their UUID; parts of a
    GPU (MIG) are not found.
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
    """Return the memory of the smallest of these GPUs (numbers of nvidia-smi), in GiB.

    None if `gpus` is empty, or if the driver does not report the memory of each. `environ` has the PATH on which
    nvidia-smi is found.
    """
    found = _asked("memory.total", environ, "nounits")
    sizes = [found.get(index, "") for index in gpus]
    if not sizes or not all(size.isdecimal() for size in sizes):
        return None
    return min(map(int, sizes)) / 1024  # the driver says MiB


def _asked(field: str, environ: Mapping[str, str], *form: str) -> dict[int, str]:
    """Return one field of nvidia-smi by the number of each GPU; empty without a driver that answers.

    `form` are further words for the format of the output, such as `nounits`.
    """
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

    It does for a wheel of torch that is made for CPUs (`torch_version`, None for the installed one), or with
    MILLRACE_TRAINER_DEVICE=cpu.
    """
    wheel = version("torch") if torch_version is None else torch_version
    return () if environ.get("MILLRACE_TRAINER_DEVICE") == "cpu" or wheel.endswith("+cpu") else machine_gpus(environ)


def driver_version() -> str:
    """Return the version of NVIDIA's driver that the kernel has loaded; "" without one."""
    return DRIVER.read_text().strip() if DRIVER.exists() else ""


def wheel_version() -> str:
    """Return the version of torch that is installed here, with the local part that names its CUDA release.

    "" without torch.
    """
    try:
        return version("torch")
    except PackageNotFoundError:  # a machine from which runs are only submitted
        return ""


def is_too_old(driver: str, wheel: str) -> bool:
    """Return whether a wheel of torch, by its version, cannot work on a driver.

    False if the versions do not show it.
    """
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
    """Return the GPUs of the services `inference` and `trainer`, by name.

    `inference` and `trainer`, if not None, are the configured GPUs, and are returned as they are. Otherwise the engine
    gets the first `engine_size` of `gpus` that the trainer does not have, and the trainer gets the rest; with too few
    GPUs both share them. Without `gpus` only configured services have an entry.
    """
    given = {name: tuple(ids) for name, ids in (("inference", inference), ("trainer", trainer)) if ids is not None}
    if not gpus:
        return given
    free = [index for index in gpus if index not in given.get("trainer", ())] or list(gpus)
    engine = given.setdefault("inference", tuple(free[:engine_size]))
    given.setdefault("trainer", tuple(index for index in gpus if index not in engine) or tuple(gpus))
    return given


def are_shared(assigned: Mapping[str, Sequence[int]]) -> bool:
    """Return whether the services `inference` and `trainer` have a GPU in common.

    `assigned` has the GPUs by service.
    """
    return bool({*assigned.get("inference", ())} & {*assigned.get("trainer", ())})


def require(assigned: Mapping[str, Sequence[int]], gpus: Sequence[int]) -> None:
    """Raise InvalidStateError (GPU_UNUSABLE), naming every GPU in `assigned` (by service) that is not in `gpus`."""
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


# The part of a GPU that vLLM may take beside the trainer: what the trainer's estimate leaves.

RUNTIME_GIB = 4.0
"""Memory that is in no estimate: CUDA's contexts and what the allocators cannot use."""
ENGINE_GIB = 2.0
"""Memory that vLLM needs beside its weights to serve at all: its activations, its graphs and a small cache."""
ASLEEP_GIB = 2.0
"""Memory that vLLM keeps while it sleeps: its graphs, and what is not its allocator's."""
MOST_OF_GPU = 0.9
"""The part that vLLM takes of a GPU of its own."""
WEIGHT_BYTES = 2
"""Bytes of a parameter, in bfloat16."""
_KEPT = ("parameters", "optimizer", "buffers")  # in the trainer's memory between two steps
_ESTIMATE_TIMEOUT_S = 180.0
_KILLED_S = 10.0
_GIB = 2**30


async def engine_share(
    config: RLConfig, assigned: Mapping[str, Sequence[int]], *, note: Callable[[str], object] = lambda text: None
) -> float:
    """Return the part (0 to 1) of a GPU for vLLM, which the trainer of the run uses, too.

    That is `SHARED_UTILIZATION`, or more for vLLM's weights, at most what a step leaves; a vLLM that sleeps while a
    step is computed gets what the trainer leaves between two steps. The step is estimated by `millrace estimate`, in a
    process of its own. Without that, or the GPU's size, the result is `SHARED_UTILIZATION`, and `note` gets the reason.
    `assigned` has the GPUs by service. Raises InvalidStateError (GPU_TOO_SMALL) if both do not fit.
    """
    trainer = assigned["trainer"]
    shared = [index for index in trainer if index in assigned["inference"]]
    gpu_gib = await asyncio.to_thread(memory_gib, shared)
    if gpu_gib is None:
        note(f"nvidia-smi does not say how large the GPU is: vLLM gets {SHARED_UTILIZATION} of it")
        return SHARED_UTILIZATION
    note("computing what the trainer leaves of the GPU to vLLM")
    # Of a GPU that is large beyond need: what is asked is the size of the step, and no keys that make it smaller.
    found = await _estimate(config, num_gpus=len(trainer), memory_gib=2**20, reserve_gib=0)
    if isinstance(found, str):
        note(f"what the trainer takes is not known ({found}): vLLM gets {SHARED_UTILIZATION} of the GPU")
        return SHARED_UTILIZATION
    plan = _Plan(found, memory_gib=gpu_gib, tp=config.inference.parallel.tp)
    sleeps = config.inference.sleep_while_training
    if plan.fits(sleeps=sleeps):
        return plan.share(sleeps=sleeps)
    reserve_gib = min(RUNTIME_GIB + (ASLEEP_GIB if sleeps else plan.engine_gib), gpu_gib)
    tried = await _estimate(config, num_gpus=len(trainer), memory_gib=gpu_gib, reserve_gib=reserve_gib)
    sleep = "let vLLM sleep (inference.sleep_while_training = true, async_level = 0), "
    raise InvalidStateError(
        f"trainer and vLLM do not fit onto one GPU of {gpu_gib:.0f} GiB: {plan.describe(sleeps=sleeps)}, and "
        f"{RUNTIME_GIB:.0f} GiB are left for the runtime",
        reason="GPU_TOO_SMALL",
        remedy=f"{_advice(tried)}{sleep if not sleeps and plan.fits(sleeps=True) else ''}give them GPUs of their own "
        "(inference_gpu_ids, trainer_gpu_ids), or set inference.gpu_memory_utilization, which is taken as it is",
    )


class _Plan:
    """The memory that trainer and vLLM need on one GPU: at the same time, or in turns if vLLM `sleeps` during a
    step.
    """

    def __init__(self, found: Mapping[str, Any], *, memory_gib: float, tp: int) -> None:
        """Take the result `found` of `millrace estimate`, the GPU's memory, and over how many GPUs (`tp`) vLLM's
        weights are spread.
        """
        self.engine_gib = ENGINE_GIB + found["parameters"] * WEIGHT_BYTES / tp / _GIB
        parts = found["bytes_per_rank"]
        self._step_gib = parts["peak"] / _GIB
        self._kept_gib = sum(parts.get(kind, 0) for kind in _KEPT) / _GIB
        self._memory_gib = memory_gib

    def _left_gib(self, *, sleeps: bool) -> float:
        """Return the memory that is left for vLLM while it generates, in GiB.

        `sleeps` says that no step is computed then.
        """
        return self._memory_gib - RUNTIME_GIB - (self._kept_gib if sleeps else self._step_gib)

    def fits(self, *, sleeps: bool) -> bool:
        """Return whether trainer and vLLM fit onto the GPU; `sleeps` says that vLLM sleeps while a step is computed."""
        has_slept = not sleeps or self._step_gib + ASLEEP_GIB + RUNTIME_GIB <= self._memory_gib
        return has_slept and self._left_gib(sleeps=sleeps) >= self.engine_gib

    def share(self, *, sleeps: bool) -> float:
        """Return vLLM's part of the GPU, 0 to 1, rounded down to a hundredth: at most what the trainer leaves while
        vLLM generates.

        `sleeps` says that vLLM sleeps while a step is computed: then it gets up to `MOST_OF_GPU`; otherwise
        `SHARED_UTILIZATION`, or more if its weights need that.
        """
        part = MOST_OF_GPU if sleeps else max(SHARED_UTILIZATION, self.engine_gib / self._memory_gib)
        return math.floor(min(part, self._left_gib(sleeps=sleeps) / self._memory_gib) * 100) / 100

    def describe(self, *, sleeps: bool) -> str:
        """Return in words the memory that trainer and vLLM need.

        `sleeps` says that vLLM sleeps while a step is computed.
        """
        step, engine = f"a step takes {self._step_gib:.1f} GiB", f"vLLM {self.engine_gib:.1f} GiB at least"
        if not sleeps:
            return f"{step}, {engine}"
        return (
            f"{step} beside {ASLEEP_GIB:.0f} GiB of a sleeping vLLM, {engine} beside {self._kept_gib:.1f} GiB of a "
            "trainer that waits"
        )


def flags_on_shared_gpu(flags: str) -> str:
    """Return the JSON text of `MILLRACE_VLLM_FLAGS` with `SHARED_UTILIZATION` added: the stack's runs are not known
    yet.

    Flags that set the utilization are returned as they are, and so is a text that is no JSON object, which the replica
    refuses.
    """
    try:
        found = json.loads(flags or "{}")
    except ValueError:
        return flags
    if not isinstance(found, dict) or is_given("gpu_memory_utilization", found):
        return flags
    return json.dumps({**found, "inference.gpu_memory_utilization": SHARED_UTILIZATION})


def _advice(tried: dict[str, Any] | str) -> str:
    """Return the keys that make the step fit, as the beginning of a remedy; "" if the estimate `tried` found none."""
    remedy = () if isinstance(tried, str) else tried["remedy"] or ()
    keys = [key for key in remedy if not key.startswith("--")]
    return f"set {' and '.join(keys)}, " if keys else ""


async def _estimate(config: RLConfig, *, num_gpus: int, memory_gib: float, reserve_gib: float) -> dict[str, Any] | str:
    """Run `millrace estimate` for the run's step and return its result; if it fails, a line with the reason.

    `num_gpus`, `memory_gib` of each, and the `reserve_gib` that is not the trainer's are its arguments.
    """
    with TemporaryDirectory(prefix="millrace-gpu-") as directory:
        path = Path(directory) / "run.json"
        path.write_text(config.resolved_json())
        asked = ["estimate", "@", str(path), "--gpus", str(num_gpus), "--gpu-memory", f"{memory_gib:.2f}"]
        asked += ["--reserve", f"{reserve_gib:.2f}", "--format", "json"]
        argv = [sys.executable, "-m", "millrace.cli", *asked]
        process = await sessions.start(argv, env=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            async with asyncio.timeout(_ESTIMATE_TIMEOUT_S):
                output, errors = await process.communicate()
        except TimeoutError:
            return f"it took more than {_ESTIMATE_TIMEOUT_S:.0f} s"
        finally:
            if process.returncode is None:  # out of time, or the command was interrupted
                sessions.kill_group(process.pid)
                async with asyncio.timeout(_KILLED_S):
                    await process.wait()
    # 1 says that the step does not fit, which is a result, too.
    if process.returncode in (0, 1) and output.startswith(b"{"):
        return json.loads(output)
    return next((line for line in errors.decode(errors="replace").splitlines() if "Error" in line), "no reason given")
