"""Two processes fine-tune one model: by one flag or by torchrun, killed and continued."""

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.sft import SFTConfig
from millrace.local.directory import free_port
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.sft.fine_tune import run_sft

MAKE_MODEL = Path(__file__).parents[3] / "examples" / "reverse_text" / "make_model.py"


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("reverse-text")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_model.py", "--output", str(directory)])
        runpy.run_path(str(MAKE_MODEL), run_name="__main__")
    return directory


def make_config(example: Path, output: Path, **changes: Any) -> SFTConfig:
    document: dict[str, Any] = {
        "model": {"name": str(example / "base")},
        "data": {"name": str(example / "sft.jsonl"), "batch_size": 16, "seq_len": 64},
        "optim": {"lr": 4e-3},
        "max_steps": 6,
        "output_dir": str(output),
        "run": {"name": "sft"},
        "ckpt": {"interval": 2},
        "micro_batch_tokens": 512,
    }
    return SFTConfig.model_validate({**document, **changes})


def start(config: SFTConfig, *command: str) -> subprocess.Popen[str]:
    """Return a command with the config in a file behind it."""
    path = Path(config.output_dir).with_suffix(".json")
    path.write_text(config.resolved_json())
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, *command, str(path)], env=environ, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def losses(output: Path) -> list[float]:
    lines = (output / "sft" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss/mean"] for line in lines]


FLAG = ("-m", "millrace.cli.main", "sft", "--nproc-per-node", "2", "@")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1")
TRAINER = ("-m", "millrace.trainer.main", "sft", "--config")


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_ranks_equal_one_also_after_a_kill(example: Path, tmp_path: Path) -> None:
    run_sft(make_config(example, tmp_path / "one"), gang=Gang(), on_step=lambda _: None)
    process = start(make_config(example, tmp_path / "two"), *FLAG)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step 5/"):  # the checkpoint of step 2 is durable: that of step 4 waited for it
            break
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    ranks = [pid for pid in children if b"--config" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    rest = process.communicate(timeout=120)[1]
    assert process.returncode != 0 and "rank 1 died: signal SIGKILL" in rest
    assert not (tmp_path / "two" / "sft" / "model").exists()

    began = time.monotonic()
    again = start(make_config(example, tmp_path / "two"), *FLAG)
    out, err = again.communicate(timeout=300)
    assert again.returncode == 0, err
    assert out.splitlines() == [str(tmp_path / "two" / "sft" / "model")], time.monotonic() - began
    assert "step 6/6" in err and "step 2/6" not in err and "eta 0:00:00" in err
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchrun_does_the_same(example: Path, tmp_path: Path) -> None:
    run_sft(make_config(example, tmp_path / "one", max_steps=2), gang=Gang(), on_step=lambda _: None)
    lora = {"name": str(example / "base"), "lora": {"rank": 4}}
    for name, changes in (("two", {}), ("lora", {"model": lora})):
        config = make_config(example, tmp_path / name, max_steps=2, **changes)
        process = start(config, *TORCHRUN, f"--master-port={free_port()}", *TRAINER)
        _, err = process.communicate(timeout=300)
        assert process.returncode == 0, err
        assert (tmp_path / name / "sft" / "model" / "model.safetensors").is_file()
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    assert (tmp_path / "lora" / "sft" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_two_ranks_learn_preference_pairs_as_one_does(
    example: Path, tmp_path: Path, lora: dict[str, int] | None
) -> None:
    words = ["toma", "vo", "povi", "lan", "es", "nar", "kelu"]
    rows = [{"prompt": a + b, "chosen": (a + b)[::-1], "rejected": b} for a in words for b in words if a != b]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "model": {"name": str(example / "base")} | ({} if lora is None else {"lora": lora}),
        "data": {"name": str(pairs), "batch_size": 7, "seq_len": 64},
        "dpo": {"label_smoothing": 0.1},
    }
    run_sft(make_config(example, tmp_path / "one", **changes), gang=Gang(), on_step=lambda _: None)
    process = start(make_config(example, tmp_path / "two", **changes), *FLAG)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    lines = [
        [json.loads(line) for line in (tmp_path / name / "sft" / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    ]
    assert len(lines[0]) == 6
    for one, two in zip(*lines, strict=True):
        for name in ("loss/mean", "optim/grad_norm", "rewards/chosen", "rewards/rejected", "rewards/accuracies"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5), name
