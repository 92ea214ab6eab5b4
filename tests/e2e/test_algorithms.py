"""`millrace rl` with every preset from the example's file, and the training guide's file with a buffer."""

import json
from pathlib import Path

import pytest

from millrace.config.filling import PRESETS
from millrace_testing import teachers
from millrace_testing.workplaces import Workplace

WITHIN_S = 560.0
STEPS = 3
GUIDE = """
max_steps = 4
seq_len = 64
[model]
name = "{model}"
[trainer.optim]
lr = 1e-3
weight_decay = 0.0
[trainer.tokenizer]
name = "{model}"
[trainer.model.ac]
freq = 1
[trainer.model.lora]
rank = 4
alpha = 4
dropout = 0.05
target_modules = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
[orchestrator]
batch_size = 32
rollouts_per_example = 16
oversampling_factor = 2.0
trajectory_strategy = "branching"
[orchestrator.sampling]
max_tokens = 12
temperature = 0.5
[orchestrator.buffer]
online_difficulty_filtering = true
[[orchestrator.env]]
id = "reverse-text"
args = {{ num_train = 64, num_eval = 8 }}
[inference.model]
name = "{model}"
max_model_len = 64
"""
"""The guide's file for prime-rl with the model, the task and the sizes of the tiny example.

Its `[wandb]` and the flags that only vLLM knows are left out.
"""


@pytest.mark.presets
@pytest.mark.timeout(600)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_example_runs_with_every_preset(warm: Workplace, tmp_path: Path, preset: str) -> None:
    name = preset.replace("_", "-")
    argv = ["--algo.preset", preset, "--max-steps", str(STEPS), "--name", name]
    if preset == "opd":
        with teachers.serving(warm, tmp_path, model="base") as url:
            summary, output = warm.train(*argv, *teachers.flags(url), timeout_s=WITHIN_S)
    else:
        short = ["--orchestrator.algo.template", "{demonstration}"]  # the example's model reads 64 bytes
        told = ["--orchestrator.algo.demo-key", "answer", *short] if preset == "opsd" else []
        summary, output = warm.train(*argv, *told, timeout_s=WITHIN_S)
    print(f"{preset}: reward {summary['reward_before']:.3f} to {summary['reward_after']:.3f}")
    assert summary["steps"] == STEPS and output.count("\nstep ") == STEPS
    assert 0 <= summary["mismatch_kl"] <= 1e-4
    lines = (warm.path / "outputs" / name / "metrics.jsonl").read_text().splitlines()
    steps = [line["metrics"] for line in map(json.loads, lines) if line["kind"] == "step"]
    assert all(step["advantage/std"] > 0 and step["optim/grad_norm"] > 0 for step in steps)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_training_guides_file_with_a_buffer_runs(warm: Workplace) -> None:
    toml = warm.path / "guide.toml"
    toml.write_text(GUIDE.format(model=warm.path / teachers.MODELS / "sft" / "model"))
    output = warm.millrace("rl", "@", str(toml), timeout_s=WITHIN_S)
    summary = json.loads((warm.path / output.strip().splitlines()[-1]).read_text())
    assert summary["steps"] == 4, output[-3000:]
    events = (toml.parent / output.strip().splitlines()[-1]).with_name("metrics.jsonl").read_text().splitlines()
    steps = [event for event in map(json.loads, events) if event["kind"] == "step"]
    assert [step["num_rollouts"] for step in steps] == [32] * 4, "what is filtered is replaced"
