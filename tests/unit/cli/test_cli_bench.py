"""`millrace trainer --bench` and `millrace inference --bench` as a user gives them: the table, and what it says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from millrace.cli.main import main

pytestmark = pytest.mark.computes

MIB = 2**20


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a directory with a tiny model, in which the command is given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=272, num_attention_heads=2, num_key_value_heads=1, **shape)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path


def bench(place: Path, capfd: pytest.CaptureFixture[str], command: str) -> tuple[str, dict[str, float], dict[str, Any]]:
    """Return the first line of what it prints, the first figure of each row behind it, and the summary that is kept."""
    capfd.readouterr()
    assert main(command.split()) == 0
    title, *rows = capfd.readouterr().out.strip().splitlines()
    matches = [re.fullmatch(r" *(\S.*?)  +([\d,.]+).*", row) for row in rows]
    figures = {match[1]: float(match[2].replace(",", "")) for match in matches if match}
    (path,) = (place / "outputs").glob("bench-*/bench.json")
    return title, figures, json.loads(path.read_text())["summary"]


def test_the_trainer_prints_tokens_memory_and_the_phases_of_a_step(
    place: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = "--model.name model --peak-tflops 0.1 --data.fake.batch-size 4 --data.fake.seq-len 64 --bench.steps 3"
    title, figures, found = bench(place, capfd, f"trainer --bench {flags}")
    what = "4 samples of 64 tokens, micro-batches of 8192 tokens, 1 rank"
    assert title == f"model: {what}; medians of 3 steps after one that warms up"
    assert list(figures) == ["tokens/s", "MFU", "peak memory", "step", "data", "forward", "backward", "optimizer"]
    assert found["tokens_per_step"] == 4 * 64
    assert figures["tokens/s"] == pytest.approx(found["tokens_per_s"], abs=1)
    assert found["tokens_per_s"] * found["step_s"] == pytest.approx(256, rel=1e-3)  # both of the step in the middle
    assert 0 < figures["MFU"] < 100 and figures["MFU"] == pytest.approx(100 * found["mfu"], abs=0.06)
    assert 100 * MIB < found["peak_bytes"] < 4096 * MIB
    assert figures["peak memory"] == pytest.approx(found["peak_bytes"] / 2**30, abs=0.006)
    phases = ("data", "forward", "backward", "optimizer")
    assert all(figures[name] == pytest.approx(found[f"{name}_s"], abs=0.0006) for name in (*phases, "step"))
    # Each phase is that of the step in which it was in the middle: a stall of one of three moves none of them far.
    assert 0.5 * found["step_s"] <= sum(found[f"{name}_s"] for name in phases) <= 1.5 * found["step_s"]


@pytest.mark.long
def test_the_engine_prints_tokens_of_prompts_and_completions(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = "--model.name model --max-num-seqs 4 --bench.steps 2"
    title, figures, found = bench(place, capfd, f"inference --bench {flags}")
    assert title == "model: 4 sequences at once, 128 tokens of prompt and 128 sampled; medians of 2 steps"
    assert list(figures) == [
        "prompt tokens/s", "sampled tokens/s", "peak memory", "step", "prompts", "completions",
    ]  # fmt: skip
    assert figures["prompt tokens/s"] == pytest.approx(4 * 128 / found["prompt_s"], abs=1)
    assert figures["sampled tokens/s"] == pytest.approx(4 * 128 / found["step_s"], abs=1)
    assert 100 * MIB < found["peak_bytes"] < 4096 * MIB
    assert figures["peak memory"] == pytest.approx(found["peak_bytes"] / 2**30, abs=0.006)
    assert 0 < found["prompt_s"] < found["step_s"]
    assert figures["prompts"] + figures["completions"] == pytest.approx(figures["step"], abs=0.0016)
