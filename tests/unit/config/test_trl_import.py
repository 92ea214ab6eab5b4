"""Configs of TRL's GRPO and SFT trainers, translated with the values that TRL takes where they are silent."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from millrace.cli.main import main

GRPO = {"model_name_or_path": "Qwen/Qwen3-0.6B", "num_generations": 8, "max_steps": 100}
SFT = {"model_name_or_path": "Qwen/Qwen3-0.6B", "dataset_name": "rows.jsonl", "max_length": 256, "max_steps": 30}


def translated(tmp_path: Path, keys: dict[str, Any], *words: str) -> dict[str, Any]:
    source, out = tmp_path / "trl.json", tmp_path / "out.toml"
    source.write_text(json.dumps(keys))
    out.unlink(missing_ok=True)
    assert main(["config", "import", str(source), "--out", str(out), *words]) == 0
    return tomllib.loads(out.read_text())


def refused(tmp_path: Path, keys: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    (tmp_path / "trl.json").write_text(json.dumps(keys))
    assert main(["config", "import", str(tmp_path / "trl.json")]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and "remedy: " in shown.err
    return shown.err


def test_a_file_that_does_not_exist_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "grpo.yaml").touch()
    assert main(["config", "import", "gpro.yaml"]) == 2
    assert capsys.readouterr().err == f"Error: gpro.yaml: no such file in {tmp_path}; did you mean grpo.yaml?\n"
    assert main(["config", "import", "grpo.yaml", "other.toml", "third.json"]) == 2
    said = capsys.readouterr().err
    assert f"2 things are wrong:\n  - other.toml: no such file in {tmp_path}; check the path\n" in said
    assert "@" not in said


def test_what_grpo_takes_by_default_is_written_out(tmp_path: Path) -> None:
    found = translated(tmp_path, GRPO)
    assert (found["async_level"], found["max_steps"], found["seed"]) == (0, 100, 42)
    orchestrator = found["orchestrator"]
    assert (orchestrator["batch_size"], orchestrator["rollouts_per_example"]) == (8, 8)
    assert orchestrator["filter_zero_advantages"] is False and orchestrator["algo"] == {"std_norm": "group"}
    assert orchestrator["sampling"] == {"max_tokens": 512, "temperature": 1.0}
    trainer = found["trainer"]
    assert trainer["loss"] == {"type": "ppo", "clip_low": 0.2, "clip_high": 0.2, "aggregation": "token"}
    assert trainer["optim"] == {"lr": 1e-6, "weight_decay": 0.0, "betas1": 0.9, "betas2": 0.999, "max_norm": 1.0}
    assert trainer["scheduler"] == {"type": "linear", "warmup_steps": 0, "decay_steps": 100}
    assert found["ckpt"] == {"interval": 500} and found["orchestrator"]["env"] == [{"id": "your-environment"}]


def test_what_sft_takes_by_default_is_written_out(tmp_path: Path) -> None:
    found = translated(tmp_path, SFT)
    data = {"batch_size": 8, "name": "rows.jsonl", "seq_len": 256, "pack_function": "stack"}
    assert found["data"] == data and found["optim"]["lr"] == 2e-5 and found["optim"]["weight_decay"] == 0.0
    assert translated(tmp_path, SFT | {"packing": True})["data"]["pack_function"] == "cat"


@pytest.mark.parametrize(
    ("keys", "path", "value"),
    [
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}, "orchestrator.batch_size", 24),
        ({"steps_per_generation": 4}, "orchestrator.batch_size", 32),
        ({"steps_per_generation": 4}, "trainer.minibatches", 4),
        ({"steps_per_generation": 4}, "max_steps", 25),
        ({"generation_batch_size": 16}, "trainer.minibatches", 2),
        ({"max_completion_length": 64, "max_prompt_length": 100}, "seq_len", 164),
        ({"vllm_max_model_length": 4096}, "seq_len", 4096),
        ({"beta": 0.04}, "trainer.loss.kl.coef", 0.04),
        ({"epsilon": 0.1}, "trainer.loss.clip_high", 0.1),
        ({"epsilon_high": 0.28}, "trainer.loss.clip_high", 0.28),
        ({"delta": 4.0}, "trainer.loss.max_importance_ratio", 4.0),
        ({"learning_rate": "5e-6"}, "trainer.optim.lr", 5e-6),
        ({"loss_type": "grpo"}, "trainer.loss.aggregation", "sequence"),
        ({"loss_type": "dr_grpo"}, "trainer.loss.constant_tokens", 512),
        ({"loss_type": "cispo", "epsilon_high": 5.0}, "trainer.loss.clip_high", 4.0),
        ({"importance_sampling_level": "sequence"}, "trainer.loss.type", "gspo"),
        ({"scale_rewards": False}, "orchestrator.algo.std_norm", "none"),
        ({"scale_rewards": "batch"}, "orchestrator.algo.std_norm", "batch"),
        ({"warmup_ratio": 0.1}, "trainer.scheduler.warmup_steps", 10),
        ({"warmup_ratio": 0.1}, "trainer.scheduler.decay_steps", 90),
        ({"warmup_steps": 0.05}, "trainer.scheduler.warmup_steps", 5),
        ({"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 7}, "trainer.scheduler.warmup_steps", 7),
        ({"use_peft": True, "lora_r": 4}, "trainer.model.lora.rank", 4),
        ({"use_peft": True}, "trainer.model.lora.dropout", 0.05),
        ({"save_steps": 20, "save_total_limit": 2}, "ckpt.keep_last", 2),
        ({"report_to": ["wandb"]}, "wandb.project", "huggingface"),
        ({"run_name": "first"}, "run.name", "first"),
    ],
)
def test_an_argument_becomes_a_value_of_ours(tmp_path: Path, keys: dict[str, Any], path: str, value: object) -> None:
    found: Any = translated(tmp_path, GRPO | keys)
    for part in path.split("."):
        found = found[part]
    assert found == value


def test_without_checkpoints_there_are_none(tmp_path: Path) -> None:
    assert "ckpt" not in translated(tmp_path, GRPO | {"save_strategy": "no"})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"max_steps": -1}, "3.0 epochs are as many steps as the data makes of them: write `max_steps` into the file"),
        ({"num_generations": 3}, "num_generations: a batch of 8 rollouts must be whole groups"),
        ({"num_iterations": 2}, "num_iterations: must be 1: a batch is learned from once here"),
        ({"loss_type": "sapo"}, "loss_type: is not here: take one of dapo"),
        ({"loss_type": "cispo"}, "epsilon_high: must be at least 1 with cispo"),
        ({"lr_scheduler_type": "polynomial"}, "lr_scheduler_type: must be linear, cosine"),
        ({"optim": "adafactor"}, "optim: must be one of the adamw kinds"),
        ({"save_strategy": "epoch"}, "save_steps: must be a whole number of steps"),
        ({"learning_rate": "fast"}, "learning_rate: must be a number of at least 0"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size: must be a whole number of at least 1"),
        ({"sync_ref_model": True}, "sync_ref_model: is none of the arguments of TRL that are translated; take it out"),
    ],
)
def test_what_means_something_else_here_is_refused(
    tmp_path: Path, keys: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(tmp_path, GRPO | keys, capsys)


def test_yaml_and_scripts_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "grpo.yaml").write_text("num_generations: 4\nlearning_rate: 1e-5 # text in YAML\nmax_steps: 10\n")
    assert main(["config", "import", str(tmp_path / "grpo.yaml")]) == 0
    assert tomllib.loads(capsys.readouterr().out)["trainer"]["optim"]["lr"] == 1e-5
    script = tmp_path / "train.py"
    script.write_text(
        "raise SystemExit('not to be run')\n"
        "args = trl.GRPOConfig(output_dir='out', num_generations=4, max_steps=10)\n"
        "GRPOTrainer(model='M', reward_funcs=[reward], args=args, peft_config=LoraConfig(r=4))\n"
    )
    assert main(["config", "import", str(script)]) == 0
    found = tomllib.loads(capsys.readouterr().out)
    assert found["model"]["name"] == "M" and found["trainer"]["model"]["lora"]["rank"] == 4
    script.write_text("args = GRPOConfig(max_steps=STEPS, num_generations=4)\n")
    assert main(["config", "import", str(script)]) == 2
    assert f"max_steps: is computed in the script: write its value there (got STEPS)  [{script}:1]" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.yaml", "a: [", "malformed YAML"),
        ("a.yaml", "model: x\n", "no arguments of TRL are in it"),
        ("a.yaml", "- 1\n", "no arguments of TRL are in it"),
        ("a.py", "def", "malformed Python"),
        ("a.py", "print(1)", "no arguments of TRL are in it"),
        ("a.json", '{"learning_rate": 1e-5, "save_steps": 3}', "say it: --as rl, or sft"),
    ],
)
def test_a_file_that_is_none_of_these_is_told(
    tmp_path: Path, name: str, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["config", "import", str(tmp_path / name)]) == 2
    assert said in capsys.readouterr().err
