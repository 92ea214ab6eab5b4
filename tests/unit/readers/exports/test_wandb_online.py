"""A run in W&B that is opened again, on a W&B server of this machine."""

import os
from pathlib import Path

import pytest

from millrace.readers.exports.metrics import MetricRow
from millrace.readers.exports.wandb_run import WandbRun, WandbTarget
from millrace_testing import wandb_files
from millrace_testing.wandb_server import WandbServer, serving

pytestmark = [pytest.mark.computes, wandb_files.NEEDS_WANDB]


def test_a_run_that_is_opened_again_goes_on_behind_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    rows = [MetricRow(key=f"step/{n}", step=n, time=1e9 + n, values={"loss/mean": n / 8}) for n in range(5)]
    target = WandbTarget(project="letters", id="again", name="letters-1", directory=tmp_path, config={"seed": 1})
    with serving(WandbServer()) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for number, begins in ((3, 0), (5, 3)):
            run = WandbRun(target, samples_of=lambda step: [])
            assert run.next_row == begins
            for index, row in enumerate(rows[:number]):
                run.write(index, row)
            run.finish()
    stored = server.runs["again"]
    assert [(row["_step"], row["step"], row["loss/mean"]) for row in stored.rows()] == [(n, n, n / 8) for n in range(5)]
    assert (stored.num_repeated, stored.name, server.unknown) == (0, "letters-1", [])
