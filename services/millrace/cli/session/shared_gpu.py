"""How much of a GPU vLLM may take where the trainer uses it, too: what the trainer's estimate leaves."""

import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.config import RLConfig
from millrace.errors import InvalidStateError
from millrace.inference.launch_env import is_given
from millrace.local import gpus

RUNTIME_GIB = 4.0
"""For what is in no estimate: CUDA's contexts and what the allocators cannot use."""
ENGINE_GIB = 2.0
"""What vLLM needs beside its weights to serve at all: its activations, its graphs and a small cache."""
WEIGHT_BYTES = 2
"""Of a parameter, in bfloat16."""
_TIMEOUT_S = 180.0
_GIB = 2**30


def engine_share(config: RLConfig, assigned: Mapping[str, Sequence[int]]) -> float:
    """The part of a shared GPU that vLLM gets: `SHARED_UTILIZATION`, or less where the trainer's step needs more.

    The step is computed as `millrace estimate` does it, in a process of its own. Where that or the driver has no
    answer, it is `SHARED_UTILIZATION`. InvalidStateError (GPU_TOO_SMALL) if both have no room.
    """
    trainer = assigned["trainer"]
    memory_gib = gpus.memory_gib([index for index in trainer if index in assigned["inference"]])
    if memory_gib is None or (found := _estimated(config, num_gpus=len(trainer), memory_gib=memory_gib)) is None:
        return gpus.SHARED_UTILIZATION
    ranks = config.inference.parallel.tp
    engine_gib = ENGINE_GIB + found["parameters"] * WEIGHT_BYTES / ranks / _GIB
    step_gib = found["bytes_per_rank"]["peak"] / _GIB
    left_gib = memory_gib - RUNTIME_GIB - step_gib
    if left_gib < engine_gib:
        raise InvalidStateError(
            f"trainer and vLLM do not fit onto one GPU of {memory_gib:.0f} GiB: a step takes {step_gib:.1f} GiB, vLLM "
            f"{engine_gib:.1f} GiB at least, and {RUNTIME_GIB:.0f} GiB are left for the runtime",
            reason="GPU_TOO_SMALL",
            remedy=f"{_advice(found)}; or give them GPUs of their own (inference_gpu_ids, trainer_gpu_ids), or set "
            "inference.gpu_memory_utilization, which is taken as it is",
        )
    return min(gpus.SHARED_UTILIZATION, math.floor(left_gib / memory_gib * 100) / 100)


def flags_on_shared_gpu(flags: str) -> str:
    """`MILLRACE_VLLM_FLAGS` of a stack that outlives its runs, whose models nobody knows: with `SHARED_UTILIZATION`.

    Unless they say how much. What is no JSON object stays as it is: the replica says what is wrong with it.
    """
    try:
        found = json.loads(flags or "{}")
    except ValueError:
        return flags
    if not isinstance(found, dict) or is_given("gpu_memory_utilization", found):
        return flags
    return json.dumps({**found, "inference.gpu_memory_utilization": gpus.SHARED_UTILIZATION})


def _advice(found: Mapping[str, Any]) -> str:
    keys = found["remedy"] or ["trainer.micro_batch_tokens=2048", "trainer.model.ac.freq=1"]
    return f"set {' and '.join(keys)} (`millrace estimate` says what each saves)"


def _estimated(config: RLConfig, *, num_gpus: int, memory_gib: float) -> dict[str, Any] | None:
    """What `millrace estimate` says of the run's step; None where it says nothing, as of a model that is not there."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "run.json"
        path.write_text(config.resolved_json())
        asked = ["estimate", "@", str(path), "--gpus", str(num_gpus), "--gpu-memory", f"{memory_gib:.1f}"]
        asked += ["--reserve", f"{RUNTIME_GIB + ENGINE_GIB:g}", "--format", "json"]
        command = [sys.executable, "-m", "millrace.cli", *asked]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
    return json.loads(done.stdout) if done.returncode in (0, 1) and done.stdout.startswith("{") else None
