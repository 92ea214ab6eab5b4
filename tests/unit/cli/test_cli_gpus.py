"""From what the driver shows to what each process sees: no GPU twice where there are enough, and a rank for each."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main
from millrace.errors import UnavailableError
from millrace.local import stack as stack_module
from millrace.processes.supervisor import ProcessSpec
from millrace_testing.nvidia import fake_gpus

RL = """
max_steps = 2
seq_len = 64
[model]
name = "model"
[inference]
engine = "vllm"
[orchestrator]
batch_size = 8
rollouts_per_example = 4
[[orchestrator.env]]
id = "reverse-text"
"""
MODEL = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32_000,
}
NAMES = ("orchestrator", "env-server", "inference", "trainer")


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ProcessSpec]:
    """Return how the processes of a stack are started, which is not started."""
    found: dict[str, ProcessSpec] = {}

    class Stack(stack_module.LocalStack):
        async def start(self) -> None:
            addresses = dict.fromkeys(NAMES, "127.0.0.1:1")
            for name in NAMES:
                found[name] = self.service_spec(name, addresses, "127.0.0.1:2", {}, "redis://x", "file:///x")
            raise UnavailableError("only asked how", reason="SERVICE_NOT_READY")

    monkeypatch.setattr(stack_module, "LocalStack", Stack)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "rl.toml").write_text(RL)
    return found


def visible(spec: ProcessSpec) -> list[str]:
    """Return the GPUs that a process sees."""
    return [name for name in spec.env["CUDA_VISIBLE_DEVICES"].split(",") if name]


def ranks(argv: Sequence[str]) -> int:
    """Return the processes that a command line of torchrun starts; 1 for another one."""
    return int(next((word for word in argv if word.startswith("--nproc-per-node=")), "=1").partition("=")[2])


@pytest.mark.parametrize(
    ("command", "count", "inference", "trainer"),
    [
        ("rl @ rl.toml --plain", 2, "0", "1"),
        ("rl @ rl.toml --plain", 8, "0", "1 2 3 4 5 6 7"),
        ("rl @ rl.toml --plain --inference.parallel.tp 4", 8, "0 1 2 3", "4 5 6 7"),
        ("rl @ rl.toml --plain --trainer-gpu-ids [0,1,2]", 8, "3", "0 1 2"),
        ("up --engine vllm --dir stack", 2, "0", "1"),
        ("up --engine vllm --dir stack", 8, "0", "1 2 3 4 5 6 7"),
    ],
)
def test_engine_and_trainer_of_a_stack_see_different_gpus(
    command: str,
    count: int,
    inference: str,
    trainer: str,
    specs: Mapping[str, ProcessSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_gpus(monkeypatch, tmp_path, count)
    assert main(command.split()) != 0
    assert (visible(specs["inference"]), visible(specs["trainer"])) == (inference.split(), trainer.split())
    assert ranks(specs["trainer"].argv) == len(trainer.split())
    assert specs["trainer"].env["MILLRACE_TRAINER_DEVICE"] == "cuda"
    for name in ("orchestrator", "env-server"):
        assert "CUDA_VISIBLE_DEVICES" not in specs[name].env
    assert '"gpu_memory_utilization"' not in specs["inference"].env.get("MILLRACE_VLLM_FLAGS", ""), "nothing is shared"


@pytest.mark.computes
def test_one_gpu_is_shared_and_vllm_leaves_the_trainer_its_part(
    specs: Mapping[str, ProcessSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpus(monkeypatch, tmp_path, 1, mib=11_264)
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    assert main(["rl", "@", "rl.toml", "--plain"]) != 0
    assert (visible(specs["inference"]), visible(specs["trainer"])) == (["0"], ["0"])
    assert ranks(specs["trainer"].argv) == 1
    flags = json.loads(specs["inference"].env["MILLRACE_VLLM_FLAGS"])
    assert 0.2 < flags["inference.gpu_memory_utilization"] < 0.4, "a step takes 4.4 of 11 GiB, the runtime 4"


def test_a_sleep_that_gains_nothing_is_told(
    specs: Mapping[str, ProcessSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_gpus(monkeypatch, tmp_path, 2)
    sleep = ["--inference.sleep-while-training", "true", "--async-level", "0"]
    assert main(["rl", "@", "rl.toml", "--plain", *sleep]) != 0
    said = "".join(capsys.readouterr())
    assert "inference.sleep_while_training gains nothing here: vLLM and the trainer have GPUs of their own" in said
    assert json.loads(specs["inference"].env["MILLRACE_VLLM_FLAGS"])["inference.sleep_while_training"] is True


def test_a_stack_that_stands_gives_vllm_its_part_of_a_shared_gpu(
    specs: Mapping[str, ProcessSpec], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MILLRACE_VLLM_FLAGS", raising=False)
    fake_gpus(monkeypatch, tmp_path, 1)
    assert main(["up", "--engine", "vllm", "--dir", "stack"]) != 0
    assert json.loads(specs["inference"].env["MILLRACE_VLLM_FLAGS"]) == {"inference.gpu_memory_utilization": 0.4}


@pytest.mark.parametrize(("count", "version", "expected"), [(0, "2.13.0", 1), (8, "2.13.0", 8), (8, "2.13.0+cpu", 1)])
def test_supervised_fine_tuning_has_a_rank_on_each_gpu(
    count: int, version: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[ProcessSpec] = []

    async def refuse(supervisor: Any, spec: ProcessSpec) -> None:
        started.append(spec)
        if int(spec.env.get("WORLD_SIZE", "1")) == len(started):
            raise UnavailableError("only asked how", reason="SERVICE_NOT_READY")

    monkeypatch.setattr("millrace.processes.supervisor.Supervisor.start", refuse)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    fake_gpus(monkeypatch, tmp_path, count, torch_version=version)
    assert main(["sft", "--model.name", "model", "--data.name", "data.jsonl"]) != 0
    assert len(started) == expected
    assert [spec.env.get("LOCAL_RANK", "0") for spec in started] == [str(rank) for rank in range(expected)]
    assert all(spec.env.get("CUDA_VISIBLE_DEVICES") == os.environ.get("CUDA_VISIBLE_DEVICES") for spec in started)
