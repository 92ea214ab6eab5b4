"""`--bench` from the command line, with its steps in W&B (offline) as they are in the files."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace_testing import wandb_files
from millrace_testing.workplaces import EXAMPLES, Workplace

pytest.importorskip("wandb", reason="needs millrace[wandb]")

pytestmark = pytest.mark.long

MODEL = "outputs/reverse-text/base"


def found_in(directory: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the summary, and the lines of the metrics; W&B has the same ones."""
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    sent = [{name: value for name, value in row.items() if name[0] != "_"} for row in wandb_files.history(directory)]
    assert sent == [{name: pytest.approx(value) for name, value in row.items()} for row in rows]
    return json.loads((directory / "bench.json").read_text())["summary"], rows


def test_an_orchestrator_plays_batches_with_its_environments_and_engine(make_workplace) -> None:
    place: Workplace = make_workplace("bench-orchestrator")
    place.run(str(EXAMPLES / "make_model.py"))
    (place.path / "orch.toml").write_text(
        f'model = {{ name = "{MODEL}" }}\nseq_len = 64\nasync_level = 1\n[orchestrator]\nbatch_size = 16\n'
        "rollouts_per_example = 4\nsampling = { max_tokens = 6 }\n[[orchestrator.env]]\n"
        'id = "reverse-text"\n'
    )
    output = place.millrace("orchestrator", "@", "orch.toml", "--bench", "--bench.steps", "3", "--wandb.offline")
    assert "4 × 4 rollouts a step, async level 1, embedded engine; medians of 3 steps after 2 that warm up" in output
    (directory,) = (place.path / "outputs").glob("bench-*")
    summary, rows = found_in(directory)
    assert [row["step"] for row in rows] == [2, 3, 4]
    # A random model's rewards are equal, or not: its batches are whole all the same.
    assert all(row["progress/samples"] == 16 and row["progress/failed_rollouts"] == 0 for row in rows)
    assert all(0 < row["time/rollout/model"] < row["time/rollout"] for row in rows)
    assert all(16 * 6 >= row["perf/sampled_throughput"] * row["time/step"] > 0 for row in rows)
    assert set(summary["cpu_s"]) == {"redis", "orchestrator", "env-server", "inference", "trainer"}
    assert summary["cpu_s"]["orchestrator"] > 0 and summary["peak_bytes"]["inference"] > 2**26
    published = sorted(path.name for path in directory.glob("store/millrace/runs/*/policies/*"))
    assert published, "each version was published, as in a run"


@pytest.mark.timeout(300)  # the trainer, the engine and a stack, one after the other
def test_the_engine_and_the_trainer_of_a_whole_run_are_measured_and_in_wandb(make_workplace) -> None:
    place: Workplace = make_workplace("bench-all")
    place.run(str(EXAMPLES / "make_model.py"))
    sizes = ["--orchestrator.batch-size", "16", "--orchestrator.rollouts-per-example", "4", "--max-steps", "9"]
    sizes += ["--trainer.scheduler.warmup-steps", "0", "--inference.max-num-seqs", "16"]
    output = place.millrace(
        *("rl", "@", place.rl_toml, "--model.name", MODEL, "--bench", "--bench.steps", "1", "--wandb.offline", *sizes)
    )
    kinds = {}
    for directory in (place.path / "outputs").glob("bench-*"):
        summary, rows = found_in(directory)
        kinds["engine" if "prompt_s" in summary else "loop" if "rollout_s" in summary else "trainer"] = rows
    assert {kind: [row["step"] for row in rows] for kind, rows in kinds.items()} == {
        "trainer": [0, 1],
        "engine": [1],
        "loop": [2],
    }
    assert all(word in output for word in ("MFU", "prompt tokens/s", "rollouts/s"))
