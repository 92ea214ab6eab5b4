"""One process computes what a gang computes: bit for bit, in either format."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from millrace.config.sections.rl import RLConfig
from millrace.local.ports import free_port

LORA = {"lora": {"rank": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.0}}
SAVED = {"lora": {**LORA["lora"], "modules_to_save": ["norm"]}}


def _computed(config: RLConfig, directory: Path, *, world_size: int) -> list[dict[str, torch.Tensor]]:
    """What each rank of a gang of so many computed."""
    directory.mkdir()
    path = directory / "config.json"
    path.write_text(config.resolved_json())
    command = ["-m", "millrace_testing.trainer.numerics_rank", str(path), str(directory)]
    if world_size > 1:
        gang = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", "--master-addr=127.0.0.1"]
        command = [*gang, f"--master-port={free_port()}", *command]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return [load_file(directory / f"rank-{rank}.safetensors") for rank in range(world_size)]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "model",
    [
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"dtype": "float32"}, id="float32"),
        pytest.param({"dtype": "bfloat16", **LORA}, id="lora-bfloat16"),
        pytest.param({"dtype": "bfloat16", **SAVED}, id="lora-saved-bfloat16"),
    ],
)
def test_one_process_equals_two(model: dict[str, Any], make_config: Callable[..., RLConfig], tmp_path: Path) -> None:
    config = make_config(model={"seq_len": 32, **model}, optim={"lr": 1e-3, "max_norm": 1e6})
    (one,) = _computed(config, tmp_path / "one", world_size=1)
    first, second = _computed(config, tmp_path / "two", world_size=2)
    assert first.keys() | second.keys() == one.keys()
    for name, tensor in one.items():
        for rank in (rank for rank in (first, second) if name in rank):
            if name in ("loss", "grad_norm"):  # sums of all samples, or of all weights, in another order
                assert float(rank[name]) == pytest.approx(float(tensor), rel=1e-6), name
            else:
                assert torch.equal(rank[name], tensor), name
