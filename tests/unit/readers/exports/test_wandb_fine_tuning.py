"""`[wandb]` of `millrace sft`: every line of its metrics is in W&B once, whatever dies and whenever it goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.readers.exports import fine_tuning
from millrace.readers.exports.fine_tuning import FineTuningExport, read_lines
from millrace.readers.exports.metrics import MetricRow
from millrace_testing import wandb_files
from millrace_testing.polling import block_until

pytestmark = [pytest.mark.computes, wandb_files.NEEDS_WANDB]

# Stands in for the trainer: writes lines until a file says to end.
TRAINER = """
import json, pathlib, sys, time
config = json.load(open(sys.argv[-1]))
place = pathlib.Path(sys.argv[-1]).parent
with (place / "metrics.jsonl").open("a") as file:
    for step in range(config["max_steps"] - 3, config["max_steps"]):
        file.write(json.dumps({"step": step, "loss/mean": step / 2, "optim/grad_norm": None}) + "\\n")
        file.flush()
while not (place / "end").exists():
    time.sleep(0.05)
"""
COMMAND = """
import sys
from millrace.cli.session import fine_tune
from millrace.cli.main import main
fine_tune.TRAINER = ("-c", {trainer!r}, "sft", "--config")
sys.exit(main(["sft", "--model.name", "gpt2", "--run.name", "warm", *sys.argv[1:]]))
"""


@contextlib.contextmanager
def start(cwd: Path, *arguments: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """`millrace sft` in a directory; whatever the test does, it has ended afterwards."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(trainer=TRAINER), *arguments],
        cwd=cwd,
        env={**clean, **variables},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()  # its reaper ends what it has started
        process.communicate(timeout=60)


def values(directory: Path) -> dict[tuple[str, int], float]:
    """Return what every session has written; a repetition says the same."""
    seen: dict[tuple[str, int], float] = {}
    for row in wandb_files.history(directory):
        for name, value in row.items():
            if name not in ("step",) and name[0] != "_":
                assert seen.setdefault((name, row["step"]), value) == value
    return seen


@pytest.mark.long
def test_each_value_is_there_once_though_the_exporter_was_killed_and_the_run_went_on(tmp_path: Path) -> None:
    home = tmp_path / "outputs" / "warm"
    with start(tmp_path, "--wandb.offline", "--max-steps", "3") as process:
        block_until(lambda: list(home.glob("wandb/offline-run-*/run-*.wandb")), what="a session")
        children = psutil.Process(process.pid).children(recursive=True)
        (exporter,) = (each for each in children if each.cmdline()[-1:] == ["millrace.readers.exports.fine_tuning"])
        os.killpg(exporter.pid, signal.SIGKILL)
        block_until(lambda: len(list(home.glob("wandb/offline-run-*/run-*.wandb"))) == 2, what="a second session")
        (home / "end").touch()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "warning: the process that writes to W&B died; it is started again [WANDB_EXPORTER_DIED]" in err
    assert values(home) == {("loss/mean", step): step / 2 for step in range(3)}
    with start(tmp_path, "--wandb.offline", "--max-steps", "6") as process:  # it goes on after step 2
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err == ""
    assert values(home) == {("loss/mean", step): step / 2 for step in range(6)}
    (run_id,) = {path.stem.removeprefix("run-") for path in home.glob("wandb/offline-run-*/run-*.wandb")}
    assert run_id == (home / "wandb-id").read_text()


@pytest.mark.long
def test_a_wandb_that_is_down_is_said_and_the_run_ends_well(tmp_path: Path) -> None:
    down = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0123456789" * 4, "WANDB_INIT_TIMEOUT": "3"}
    home = tmp_path / "outputs" / "warm"
    with start(tmp_path, "--wandb.project", "p", "--max-steps", "3", **down) as process:
        block_until(lambda: (home / "metrics.jsonl").exists(), what="the start")
        assert process.stderr is not None
        assert "nothing reaches W&B, the run goes on without it" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 130 and len(read_lines(home / "metrics.jsonl")) == 3


def test_a_torn_line_is_not_read_yet(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_lines(path) == []
    path.write_text(json.dumps({"step": 4, "loss/mean": 1, "optim/grad_norm": None}) + '\n{"step": 5')
    ((_, row),) = read_lines(path)
    assert (row.step, row.values) == (4, {"loss/mean": 1.0})
    path.write_text('{"step": "x"}\n{"step": 1, "a": 2}\n')
    assert read_lines(path) == []


class Rows:
    """Stands in for the run in W&B: keeps the first `len` of its rows when the exporter is killed."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []

    @property
    def next_row(self) -> int:
        return len(self.rows)

    def write(self, index: int, row: MetricRow) -> None:
        if index >= self.next_row:
            assert index == self.next_row
            self.rows.append((row.step, row.values))


def step(at: int) -> dict[str, float]:
    return {"step": at, "loss/mean": at / 2}


def evaluation(at: int, env: str = "org/a") -> dict[str, float]:
    return {"step": at, f"eval/{env}/reward/mean": 1.0 + at}


@pytest.mark.parametrize("arrived", [5, 4, 0])
def test_lines_in_another_order_behind_a_kill_are_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrived: int
) -> None:
    """Steps are made again from a checkpoint while the evaluation of one of them comes earlier than it had."""
    path, there = tmp_path / "metrics.jsonl", Rows()
    monkeypatch.setattr(fine_tuning, "open_run", lambda *_, **__: there)

    def look(lines: list[dict[str, float]]) -> None:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        export = FineTuningExport({"metrics": str(path)})
        export.look()
        export.look()

    look([step(0), evaluation(0), step(1), step(2), step(3)])
    assert there.next_row == 5
    del there.rows[arrived:]  # what was on its way to W&B, or all of it: a session offline begins at the first row
    kept = path.with_name(fine_tuning.ORDER)
    with kept.open("a") as file:
        file.write('{"step": 7')  # the kill came in the middle of a line
    look([step(0), evaluation(0), step(1), evaluation(2), step(2), {"step": 3, "val/loss": 0.5}, evaluation(2, "b")])
    seen = [(at, name) for at, values in there.rows for name in values]
    expected = [(at, "loss/mean") for at in range(4)] + [(at, "eval/org/a/reward/mean") for at in (0, 2)]
    assert sorted(seen) == sorted([*expected, (2, "eval/b/reward/mean"), (3, "val/loss")])
