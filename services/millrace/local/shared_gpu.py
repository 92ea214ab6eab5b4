"""The part of a GPU that vLLM may take beside the trainer: what the trainer's estimate leaves."""

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import RLConfig
from millrace.errors import InvalidStateError
from millrace.inference.launch_env import is_given
from millrace.local import gpus
from millrace.processes import sessions
from millrace.storage.clean_up import TemporaryDirectory

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
_TIMEOUT_S = 180.0
_KILLED_S = 10.0
_GIB = 2**30


async def engine_share(
    config: RLConfig, assigned: Mapping[str, Sequence[int]], *, note: Callable[[str], object] = lambda text: None
) -> float:
    """Return the part of a shared GPU for vLLM: `SHARED_UTILIZATION`, or more for its weights, at most what a step
    leaves.

    A vLLM that sleeps while a step is computed gets what the trainer leaves between two steps. The step is estimated by
    `millrace estimate`, in a process of its own. Without that, or the GPU's size, the result is `SHARED_UTILIZATION`,
    and `note` gets the reason. Raises InvalidStateError (GPU_TOO_SMALL) if both do not fit.
    """
    trainer = assigned["trainer"]
    shared = [index for index in trainer if index in assigned["inference"]]
    memory_gib = await asyncio.to_thread(gpus.memory_gib, shared)
    if memory_gib is None:
        note(f"nvidia-smi does not say how large the GPU is: vLLM gets {gpus.SHARED_UTILIZATION} of it")
        return gpus.SHARED_UTILIZATION
    note("computing what the trainer leaves of the GPU to vLLM")
    found = await _estimate(config, num_gpus=len(trainer), memory_gib=2**20, reserve_gib=0)  # fits: no key is tried
    if isinstance(found, str):
        note(f"what the trainer takes is not known ({found}): vLLM gets {gpus.SHARED_UTILIZATION} of the GPU")
        return gpus.SHARED_UTILIZATION
    plan = _Plan(found, memory_gib=memory_gib, tp=config.inference.parallel.tp)
    sleeps = config.inference.sleep_while_training
    if plan.fits(sleeps=sleeps):
        return plan.share(sleeps=sleeps)
    reserve_gib = min(RUNTIME_GIB + (ASLEEP_GIB if sleeps else plan.engine_gib), memory_gib)
    tried = await _estimate(config, num_gpus=len(trainer), memory_gib=memory_gib, reserve_gib=reserve_gib)
    sleep = "let vLLM sleep (inference.sleep_while_training = true, async_level = 0), "
    raise InvalidStateError(
        f"trainer and vLLM do not fit onto one GPU of {memory_gib:.0f} GiB: {plan.describe(sleeps=sleeps)}, and "
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
        self.engine_gib = ENGINE_GIB + found["parameters"] * WEIGHT_BYTES / tp / _GIB
        parts = found["bytes_per_rank"]
        self._step_gib = parts["peak"] / _GIB
        self._kept_gib = sum(parts.get(kind, 0) for kind in _KEPT) / _GIB
        self._memory_gib = memory_gib

    def _left_gib(self, *, sleeps: bool) -> float:
        """Return the memory that is left for vLLM while it generates, in GiB."""
        return self._memory_gib - RUNTIME_GIB - (self._kept_gib if sleeps else self._step_gib)

    def fits(self, *, sleeps: bool) -> bool:
        """Return whether there is room for both."""
        has_slept = not sleeps or self._step_gib + ASLEEP_GIB + RUNTIME_GIB <= self._memory_gib
        return has_slept and self._left_gib(sleeps=sleeps) >= self.engine_gib

    def share(self, *, sleeps: bool) -> float:
        """Return vLLM's part of the GPU."""
        part = MOST_OF_GPU if sleeps else max(gpus.SHARED_UTILIZATION, self.engine_gib / self._memory_gib)
        return math.floor(min(part, self._left_gib(sleeps=sleeps) / self._memory_gib) * 100) / 100

    def describe(self, *, sleeps: bool) -> str:
        """Return a text with the memory that each service needs."""
        step, engine = f"a step takes {self._step_gib:.1f} GiB", f"vLLM {self.engine_gib:.1f} GiB at least"
        if not sleeps:
            return f"{step}, {engine}"
        return (
            f"{step} beside {ASLEEP_GIB:.0f} GiB of a sleeping vLLM, {engine} beside {self._kept_gib:.1f} GiB of a "
            "trainer that waits"
        )


def flags_on_shared_gpu(flags: str) -> str:
    """Return `MILLRACE_VLLM_FLAGS` with `SHARED_UTILIZATION` added, for a stack whose runs and models are not known
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
    return json.dumps({**found, "inference.gpu_memory_utilization": gpus.SHARED_UTILIZATION})


def _advice(tried: dict[str, Any] | str) -> str:
    """Return a text with the keys that make it fit, if the estimate found any; else ""."""
    remedy = () if isinstance(tried, str) else tried["remedy"] or ()
    keys = [key for key in remedy if not key.startswith("--")]
    return f"set {' and '.join(keys)}, " if keys else ""


async def _estimate(config: RLConfig, *, num_gpus: int, memory_gib: float, reserve_gib: float) -> dict[str, Any] | str:
    """Return the result of `millrace estimate` for the run's step; if it fails, a line with the reason."""
    with TemporaryDirectory(prefix="millrace-gpu-") as directory:
        path = Path(directory) / "run.json"
        path.write_text(config.resolved_json())
        asked = ["estimate", "@", str(path), "--gpus", str(num_gpus), "--gpu-memory", f"{memory_gib:.2f}"]
        asked += ["--reserve", f"{reserve_gib:.2f}", "--format", "json"]
        argv = [sys.executable, "-m", "millrace.cli", *asked]
        process = await sessions.start(argv, env=None, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                output, errors = await process.communicate()
        except TimeoutError:
            return f"it took more than {_TIMEOUT_S:.0f} s"
        finally:
            if process.returncode is None:  # out of time, or the command was interrupted
                sessions.kill_group(process.pid)
                async with asyncio.timeout(_KILLED_S):
                    await process.wait()
    if process.returncode in (0, 1) and output.startswith(b"{"):
        return json.loads(output)
    return next((line for line in errors.decode(errors="replace").splitlines() if "Error" in line), "no reason given")
