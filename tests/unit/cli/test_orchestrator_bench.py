"""`--bench` of the orchestrator without its stack: the run that it measures, the table, what processes use."""

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.cli.main import main
from millrace.cli.session.orchestrator_bench import MeasuredBatch, ProcessUse, bench_config, lines, summary
from millrace.config import RLConfig
from millrace_testing.polling import block_until

CONFIG = RLConfig.model_validate(
    {
        "model": {"name": "m"},
        "max_steps": 3,
        "ckpt": {"interval": 1},
        "wandb": {"offline": True},
        "orchestrator": {
            "batch_size": 32,
            "rollouts_per_example": 4,
            "env": [{"id": "a"}],
            "eval": {"interval": 1},
            "filter_zero_advantages": "refill",
        },
    }
)


def batch(step: int, seconds: float, *, num_failed: int = 0) -> MeasuredBatch:
    return MeasuredBatch(
        step=step,
        seconds=seconds,
        num_rollouts=32,
        num_failed=num_failed,
        num_tokens=6400,
        num_sampled=3200,
        rollout_s=2.0,
        model_s=1.5,
    )


def test_the_run_has_no_end_and_nothing_beside_its_batches_and_is_one_that_can_be_submitted():
    config = RLConfig.model_validate_json(bench_config(CONFIG).resolved_json())
    assert (config.max_steps, config.ckpt, config.wandb, config.trainer.ckpt) == (None, None, None, None)
    assert (config.orchestrator.eval, config.orchestrator.filter_zero_advantages) == (None, False)
    assert (config.orchestrator.batch_size, config.orchestrator.env[0].id) == (32, "a")


def test_the_table_has_medians_over_steps_and_what_each_process_used_per_step():
    batches = [batch(2, 1.0), batch(3, 4.0, num_failed=2), batch(4, 2.0)]
    found = summary(batches, cpu_s={"orchestrator": 0.6, "inference": 3.0}, peak={"inference": 2**30})
    assert (found["step_s"], found["tokens_per_s"], found["rollouts_per_s"]) == (2.0, 3200.0, 16.0)
    assert found["cpu_s"] == {"orchestrator": pytest.approx(0.2), "inference": 1.0} and found["num_failed"] == 2
    table = "\n".join(lines(CONFIG, found, engine="embedded"))
    assert "8 × 4 rollouts a step, async level 1, embedded engine; medians of 3 steps after 2 that warm up" in table
    for row in ("tokens/s           3,200", "sampled tokens/s   1,600", "failed rollouts    2", "inference 1.00 GiB"):
        assert row in table
    assert "  engine           1.500 s   75%" in table and "  environment      0.500 s   25%" in table


def test_memory_and_time_of_a_process_and_of_what_it_has_started_count():
    busy = "import time; b = b'1' * 2**26\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    process = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE)
    try:
        usage = ProcessUse(lambda: {"service": process.pid, "gone": 2**30})
        usage.begin()
        assert process.stdout is not None
        process.stdout.readline()
        usage.end()
        (child,) = psutil.Process(process.pid).children()
        own = child.cpu_times()
        assert usage.peak["service"] > 2**26 and usage.peak["gone"] == 0
        assert usage.cpu_s["service"] == pytest.approx(own.user + own.system, abs=2.0) and usage.cpu_s["service"] > 0.3
        child.kill()
        block_until(lambda: process.poll() is not None, what="the end of the parent")
        usage.end()
        assert usage.peak["service"] > 2**26, "the peak stays"
    finally:
        process.kill()
        process.communicate(timeout=30)


@pytest.mark.parametrize("above", ["", "[orchestrator]\n"])
def test_a_part_of_a_run_and_a_whole_one_are_read(above: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As `orch.toml` with the keys at the top, and as `rl.toml`, with a section of another service."""
    path = tmp_path / "orch.toml"
    other = "[trainer.optim]\nlr = 2e-5\n" if above else ""
    path.write_text(f'{other}{above}batch_size = 32\nrollouts_per_example = 4\n\nenv = [{{ id = "a" }}]\n')
    assert main(["orchestrator", "@", str(path), "--bench", "--dry-run", "--bench.steps", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["orchestrator"]["batch_size"] == 32
    assert found["trainer"]["optim"]["lr"] == (2e-5 if above else 1e-6)


def test_a_file_is_needed_and_flags_of_a_bench_need_one(capsys: pytest.CaptureFixture[str]):
    assert main(["orchestrator", "--bench"]) == 2
    assert "millrace orchestrator --bench @ examples/reverse_text/rl.toml" in capsys.readouterr().err
    assert main(["orchestrator", "--bench.steps", "2"]) == 2
    assert "is a flag of --bench" in capsys.readouterr().err
