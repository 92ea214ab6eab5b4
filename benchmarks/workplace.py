"""Runs the commands of the example as a user does, in a directory of their own, and reads what they leave behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from report import REPOSITORY, mean

EXAMPLE = REPOSITORY / "examples" / "reverse_text"
COMMAND_TIMEOUT_S = 900  # the demo's RL takes one to two minutes on two cores
STOP_TIMEOUT_S = 60  # the stack's own drain deadlines are below it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """One RL run: its `summary.json`, and the step events of its `metrics.jsonl`."""

    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    command_s: float
    """Wall time of the command, interpreter start included."""

    @property
    def steady(self) -> list[dict[str, Any]]:
        """The steps after the first; the first waits for engines and the evaluation before training."""
        return self.steps[1:]

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained on, per second of wall time between the end of the first and of the last step."""
        if not self.steady:
            return float("nan")
        seconds = (_time(self.steps[-1]) - _time(self.steps[0])).total_seconds()
        return sum(step["num_tokens"] for step in self.steady) / seconds

    @property
    def steady_wait_ratio(self) -> float:
        """Share of the step time that the trainer waited for a batch, first step left out."""
        total = sum(step["step_seconds"] for step in self.steady)
        return sum(step.get("wait_seconds", 0.0) for step in self.steady) / total if total else float("nan")

    @property
    def mean_staleness(self) -> float:
        """Mean over the steps of the mean number of versions that a batch's tokens were behind."""
        return mean([step.get("staleness_mean", 0.0) for step in self.steps])

    @property
    def rewards(self) -> list[float]:
        """Mean training reward per step."""
        return [step.get("reward_mean", 0.0) for step in self.steps]


class Workplace:
    """A directory for the example's relative paths (`outputs/…`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def command(self, *argv: str) -> tuple[str, float]:
        """Run `python argv…` here; returns its output and its seconds. RuntimeError with its last lines if it fails."""
        # What places or configures a run must come from the command line alone.
        env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        env |= {"OMP_NUM_THREADS": env.get("OMP_NUM_THREADS", "1")}
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, *argv],
            cwd=self.path,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=COMMAND_TIMEOUT_S)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                _stop(process)
                raise
        seconds = time.monotonic() - began
        if process.returncode != 0:
            raise RuntimeError(f"{' '.join(argv)} ended with {process.returncode}:\n{output[-3000:]}")
        return output, seconds

    def make_model(self, *, seed: int) -> float:
        """The tiny model and its warm-up data; returns seconds."""
        return self.command(str(EXAMPLE / "make_model.py"), "--seed", str(seed))[1]

    def fine_tune(self, *options: str) -> float:
        """`millrace sft` with the example's file; returns seconds."""
        return self.command("-m", "millrace.cli", "sft", "@", str(EXAMPLE / "sft.toml"), *options)[1]

    def train(self, *options: str) -> RunResult:
        """`millrace rl` with the example's file, on a local stack of its own."""
        output, seconds = self.command("-m", "millrace.cli", "rl", "@", str(EXAMPLE / "rl.toml"), *options)
        path = self.path / output.strip().splitlines()[-1]  # the command's promise: the summary's path comes last
        events = [json.loads(line) for line in (path.parent / "metrics.jsonl").read_text().splitlines()]
        return RunResult(
            summary=json.loads(path.read_text()),
            steps=[event for event in events if event["kind"] == "step"],
            command_s=seconds,
        )


def short_run(steps: int) -> list[str]:
    """Options for `steps` steps, with an evaluation before the first and after the last."""
    return ["--max-steps", str(steps), "--orchestrator.eval.interval", str(steps)]


def _time(event: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(event["time"])


def _stop(process: subprocess.Popen[str]) -> None:
    """Ctrl-C for the command, which stops its stack; its whole session is killed if that takes too long."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
