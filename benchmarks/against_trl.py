"""The demo against TRL's synchronous GRPOTrainer: same machine, model, tasks, batch, optimizer and number of steps.

    python benchmarks/against_trl.py --peers-python .venv-peers/bin/python [--quick] [--steps 80] [--rounds 2]
        [--tasks instant late two-turns] [--async-levels 1 0] [--model DIR]

    python -m venv .venv-peers
    .venv-peers/bin/pip install trl==1.16.0 torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0 \\
        verifiers==0.3.1 renderers==0.1.10

Three tasks: `instant` is examples/reverse_text, `late` the same with a reward that takes 0.5 s
(`environments/late_reverse_text.py`; TRL awaits those of a batch at once), `two-turns` is environments/code_lookup,
whose tool answers between two turns. Each step has 256 rollouts, each run an evaluation of 256 held-out ones before the
first step and after the last. Contenders take turns: Millrace, TRL, Millrace, TRL. `millrace rl` starts a stack of its
own with every process; `against_trl_peer.py` is one process, whose settings are those of the example's rl.toml, but for
one: at async level 1 Millrace samples with the policy before, while TRL always samples with the newest. Millrace runs
at level 1, which users have, and at 0, the only one at which rewards after the same number of steps compare like with
like. A step's cost leaves start and evaluations out: it is taken between the end of step 10 (of the quarter in short
runs) and that of the last but one. CPU seconds, user and system, are those of all processes.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpu_seconds import cpu_by_process
from report import REPOSITORY, end_like_interrupt, machine, mean, progress, table
from rollout_cost import steps_done
from workplace import EXAMPLE, STOP_TIMEOUT_S, Workplace

HERE = Path(__file__).parent
ROLLOUTS = 256
FIRST = 10
POLL_S = 0.05
LONGEST_S = 1800.0
LATENCY_S = 0.5
PEER = "TRL"
ENVIRONMENTS = [REPOSITORY / "environments" / name for name in ("reverse_text", "code_lookup")]
ENVIRONMENTS.append(HERE / "environments")
EXAMPLE_ENV = 'id = "reverse-text"\nargs = { num_train = 2000, num_eval = 64 }'


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained."""

    title: str
    env: str
    """Lines of the run's configuration."""
    seq_len: int
    peer: tuple[str, ...]
    """Options of the peer's script."""


TASKS = {
    "instant": Task(title="zero latency", env=EXAMPLE_ENV, seq_len=64, peer=()),
    "late": Task(
        title=f"rewards take {LATENCY_S} s",
        env=f'id = "late-reverse-text"\nargs = {{ num_train = 2000, num_eval = 64, latency_s = {LATENCY_S} }}',
        seq_len=64,
        peer=("--latency", str(LATENCY_S)),
    ),
    "two-turns": Task(
        title="two turns and a tool",
        env='id = "code-lookup"\nargs = { num_train = 1000, num_eval = 64 }',
        seq_len=128,
        peer=("--task", "two-turns"),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a contender."""

    wall_s: float
    """Of the whole command."""
    cpu_s: float
    step_s: float
    """Wall time of a step."""
    rollout_cpu_ms: float
    before: float
    """Mean reward of the held-out tasks."""
    after: float
    last_reward: float
    """Mean training reward of the last five steps."""


class Command:
    """A process in a session of its own, with its output in a file; what it used is known when it has ended."""

    def __init__(self, words: Sequence[str], place: Path, env: dict[str, str]) -> None:
        self.output = place / "output.log"
        self._began = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                words, cwd=place, env=env, stdout=output, stderr=output, start_new_session=True
            )

    def wait_for(self, what: str, is_there: Callable[[], bool]) -> None:
        """Return as soon as `is_there`; RuntimeError if the process ends before or takes too long."""
        while not is_there():
            if self.process.poll() is not None or time.monotonic() - self._began > LONGEST_S:
                raise RuntimeError(f"{what} does not come:\n{self.output.read_text()[-3000:]}")
            time.sleep(POLL_S)

    def end(self) -> tuple[float, float]:
        """Wait for its end; wall and CPU seconds of its life, those of its children included."""
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if self.process.returncode:
            raise RuntimeError(f"exit status {self.process.returncode}:\n{self.output.read_text()[-3000:]}")
        return time.monotonic() - self._began, used.ru_utime + used.ru_stime

    def stop(self) -> None:
        """End it if it still runs, as Ctrl-C does."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def first_of(steps: int) -> int:
    """The step from whose end on the cost counts."""
    return min(FIRST, steps // 4)


def environ(**more: str) -> dict[str, str]:
    """Of both contenders: one thread per process, nothing from a network, no variable of a deployment."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    return kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", **more}


def run_ours(task: Task, place: Path, model: Path, steps: int, async_level: int) -> Run:
    """`millrace rl` with the example's file, its environment replaced."""
    text = (EXAMPLE / "rl.toml").read_text()
    assert EXAMPLE_ENV in text, "the example names another environment"
    config = place / "rl.toml"
    config.write_text(text.replace(EXAMPLE_ENV, task.env))
    words = [sys.executable, "-m", "millrace.cli", "rl", "@", str(config), "--model.name", str(model), "--plain"]
    words += ["--max-steps", str(steps), "--orchestrator.eval.interval", str(steps), "--seq-len", str(task.seq_len)]
    words += ["--async-level", str(async_level)]
    paths = os.pathsep.join(map(str, [REPOSITORY / "services", HERE / "environments"]))
    command = Command([*words, "--name", "peer"], place, environ(PYTHONPATH=paths))
    metrics = place / "outputs" / "peer" / "metrics.jsonl"
    seen = []
    try:
        for wanted in (first_of(steps), steps - 1):
            command.wait_for(f"step {wanted}", lambda wanted=wanted: steps_done(metrics) >= wanted)
            used = sum(cpu_by_process(command.process.pid).values())
            seen.append((steps_done(metrics), time.monotonic(), used))
        wall_s, cpu_s = command.end()
    finally:
        command.stop()
    (begun, since, before), (done, now, used) = seen
    summary = json.loads((place / "outputs" / "peer" / "summary.json").read_text())
    events = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [event.get("reward_mean", 0.0) for event in events if event["kind"] == "step"]
    held_out = [each["reward"] for each in sorted(summary["evals"], key=lambda each: each["policy_version"])]
    return Run(
        wall_s=wall_s,
        cpu_s=cpu_s,
        step_s=(now - since) / (done - begun),
        rollout_cpu_ms=(used - before) * 1000 / ((done - begun) * ROLLOUTS),
        before=held_out[0],
        after=held_out[-1],
        last_reward=mean(rewards[-5:]),
    )


def run_theirs(task: Task, place: Path, model: Path, steps: int, python: str) -> Run:
    """The peer's script."""
    words = [python, "-W", "ignore", str(HERE / "against_trl_peer.py"), "--model", str(model), "--steps", str(steps)]
    words += ["--output", str(place / "trl"), *task.peer, "--environments", *map(str, ENVIRONMENTS)]
    command = Command(words, place, environ())
    try:
        wall_s, cpu_s = command.end()
    finally:
        command.stop()
    lines = [json.loads(line) for line in command.output.read_text().splitlines() if line.startswith('{"kind"')]
    marks = {line["step"]: line for line in lines if line["kind"] == "cpu"}
    begun = first_of(steps)
    first, last = marks[begun], marks[steps - 1]
    end = next(line for line in lines if line["kind"] == "end")
    return Run(
        wall_s=wall_s,
        cpu_s=cpu_s,
        step_s=(last["at_s"] - first["at_s"]) / (steps - 1 - begun),
        rollout_cpu_ms=(last["cpu_s"] - first["cpu_s"]) * 1000 / ((steps - 1 - begun) * ROLLOUTS),
        before=end["before"],
        after=end["after"],
        last_reward=mean([line["reward"] for line in lines if line["kind"] == "step"][-5:]),
    )


def render(found: dict[str, dict[str, list[Run]]], steps: int) -> str:
    """Medians of the rounds, and their ratios."""
    rows = []
    for task, runs in found.items():
        medians = {name: _medians(each) for name, each in runs.items()}
        for name, median in medians.items():
            cells = [f"{median.step_s:.2f}", f"{median.rollout_cpu_ms:.2f}", f"{median.wall_s:.0f}"]
            cells += [f"{median.cpu_s:.0f}", f"{median.before:.3f} → {median.after:.3f}", f"{median.last_reward:.3f}"]
            rows.append([f"{TASKS[task].title}: {name}", *cells])
        theirs = medians[PEER]
        for name, ours in medians.items():
            if name == PEER:
                continue
            ratios = [
                f"{getattr(theirs, field) / getattr(ours, field):.2f}"
                for field in ("step_s", "rollout_cpu_ms", "wall_s", "cpu_s")
            ]
            rows.append([f"… TRL's to that of {name}", *ratios, "", ""])
    header = ["", "a step, s", "a rollout, CPU ms", f"{steps} steps, s", "CPU s", "held-out reward", "last five steps"]
    return table(header, rows)


def render_runs(found: dict[str, dict[str, list[Run]]]) -> str:
    """Every run, in the order in which they took turns."""
    rows = []
    for task, runs in found.items():
        for pair in zip(*runs.values(), strict=True):
            for name, run in zip(runs, pair, strict=True):
                cells = [f"{run.step_s:.2f}", f"{run.rollout_cpu_ms:.2f}", f"{run.wall_s:.0f}", f"{run.cpu_s:.0f}"]
                rows.append([f"{task}, {name}", *cells, f"{run.after:.3f}"])
    return table(["run", "a step, s", "a rollout, CPU ms", "wall, s", "CPU s", "held-out after"], rows)


def _medians(runs: Sequence[Run]) -> Run:
    names: Any = Run.__dataclass_fields__
    return Run(**{name: statistics.median(getattr(run, name) for run in runs) for name in names})


def measure(options: argparse.Namespace) -> str:
    """The report as Markdown."""
    found: dict[str, dict[str, list[Run]]] = {}
    with tempfile.TemporaryDirectory(prefix="millrace-against-trl-") as directory:
        place = Path(directory)
        model = options.model
        if model is None:
            progress("model and SFT")
            workplace = Workplace(place)
            workplace.make_model(seed=0)
            workplace.fine_tune()
            model = place / "outputs" / "reverse-text" / "sft" / "model"
        model = model.resolve()
        for name in options.tasks:
            task = TASKS[name]
            levels = {f"Millrace at level {level}": level for level in options.async_levels}
            found[name] = {contender: [] for contender in (*levels, PEER)}
            for number in range(options.rounds):
                for contender, runs in found[name].items():
                    own = place / f"{name}-{levels.get(contender, PEER)}-{number}"
                    own.mkdir()
                    progress(f"{name}, round {number + 1} of {options.rounds}: {contender}, {options.steps} steps")
                    if contender == PEER:
                        run = run_theirs(task, own, model, options.steps, options.peers_python)
                    else:
                        run = run_ours(task, own, model, options.steps, levels[contender])
                    runs.append(run)
                    progress(str(run))
    title = f"## The demo against TRL's GRPOTrainer, {options.steps} steps of {ROLLOUTS} rollouts"
    title += f", medians of {options.rounds}"
    return f"{title}\n\n{machine()}\n\n{render(found, options.steps)}\n\n{render_runs(found)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers-python", required=True, help="an interpreter that has TRL")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--async-levels", type=int, nargs="+", default=[1, 0])
    parser.add_argument("--model", type=Path, help="a model that is there, instead of making one")
    parser.add_argument("--quick", action="store_true", help="one round of 8 steps")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.steps = 1, 8
    print(measure(options))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
