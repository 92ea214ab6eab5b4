"""vLLM's worker for GPUs with our extension, on CPU tensors: no name hides another, and both model runners serve it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace_testing.inference import published, vllm_programs

RUNNERS = {
    "1": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
    "2": "vllm.v1.worker.gpu.model_runner.GPUModelRunner",
}
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_extension_works_in_the_worker_that_vllm_builds_for_gpus(
    runner: str, vllm_python: str, tmp_path: Path
) -> None:
    found = run(vllm_python, runner, tmp_path)
    assert found["runner"] == RUNNERS[runner]
    assert found["mro"][:3] == [
        "vllm.v1.worker.gpu_worker.Worker",
        "vllm.v1.worker.worker_base.WorkerBase",
        "millrace.inference.vllm.workers.extension.PolicyExtension",
    ]
    assert {"millrace_call", "millrace_ping", "millrace_reload", "millrace_activate"} <= set(found["members"])
    assert (found["clashes"], found["hidden"], found["unreachable"]) == ([], [], [])
    assert found["last"] == found["fresh"], "the delta left what vLLM's own load leaves"
    assert found["first"] != found["last"] and found["verified"] == [0, "", True]


def run(python: str, runner: str, directory: Path) -> dict[str, Any]:
    """Return what the worker says that took version 0, and 1 as a delta, and then loaded the files of version 1."""
    first = published.model(0).to(torch.bfloat16)
    second = published.nudged(first, 1).to(torch.bfloat16)
    for name, model in (("first", first), ("second", second)):
        model.config.architectures = [type(model).__name__]
        model.save_pretrained(directory / name)
    orders, out = directory / "orders.json", directory / "found.json"
    orders.write_text(json.dumps(vllm_programs.orders(directory, first, second)))
    arguments = [str(directory / "first"), str(orders), str(out), runner, str(directory / "second")]
    ended = vllm_programs.run(python, "vllm_gpu_worker.py", arguments)
    assert ended.returncode == 0, ended.stderr[-6000:] + ended.stdout[-3000:]
    return json.loads(out.read_text())
