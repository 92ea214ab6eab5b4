"""The demo, measured: wall time by phase, held-out reward before and after, and the reward curves of three seeds.

    python benchmarks/demo.py [--quick] [--seeds 0 1 2] [--plot FILE]

For each seed, in a temporary directory: `examples/reverse_text/make_model.py`, `millrace sft`, `millrace rl`, with the
files of examples/reverse_text and the seed for all three. Nothing else runs meanwhile. What `make demo` does besides,
setting up the virtual environment, is not measured here. Writes one PNG with the training reward over the steps.
The full run takes one and a half to two minutes per seed on two cores; --quick (seed 0, three steps) 40 seconds.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from report import REPOSITORY, end_like_interrupt, progress, table
from workplace import RunResult, Workplace, short_run

DEFAULT_PLOT = REPOSITORY / "outputs" / "benchmarks" / "reward_curves.png"
QUICK_STEPS = 3

PHASES = {
    "stack_s": "RL: start the processes, s",
    "start_s": "RL: load, publish, open environments, s",
    "train_s": "RL: all steps, both evaluations, s",
    "finish_s": "RL: score, last checkpoint, s",
    "collect_s": "RL: policy, plot, s",
    "stop_s": "RL: stop the processes, s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """One seed: wall seconds of the first two commands, and the run."""

    seed: int
    model_s: float
    fine_tune_s: float
    run: RunResult

    @property
    def total_s(self) -> float:
        return self.model_s + self.fine_tune_s + self.run.command_s


def run_demo(seed: int, *, quick: bool) -> DemoResult:
    """The three commands of the demo in a new directory."""
    with tempfile.TemporaryDirectory(prefix="millrace-demo-") as directory:
        workplace = Workplace(Path(directory))
        progress(f"demo, seed {seed}: model and SFT")
        model_s = workplace.make_model(seed=seed)
        fine_tune_s = workplace.fine_tune("--seed", str(seed))
        progress(f"demo, seed {seed}: RL")
        run = workplace.train("--seed", str(seed), *(short_run(QUICK_STEPS) if quick else []))
    return DemoResult(seed=seed, model_s=model_s, fine_tune_s=fine_tune_s, run=run)


def row(label: str, results: list[DemoResult], value: Callable[[DemoResult], float | None], form: str) -> list[str]:
    """One line of the table; what a run did not report stays a dash."""
    numbers = [value(result) for result in results]
    return [label, *("–" if number is None else format(number, form) for number in numbers)]


def render(results: list[DemoResult]) -> str:
    """The table, one column per seed."""
    rows = [
        row("make the model, s", results, lambda r: r.model_s, ".1f"),
        row("SFT, s", results, lambda r: r.fine_tune_s, ".1f"),
    ]
    for key, label in PHASES.items():
        rows.append(row(label, results, lambda r, key=key: r.run.summary["phases"].get(key), ".1f"))
    rows += [
        row("RL: whole command, s", results, lambda r: r.run.command_s, ".1f"),
        row("all three commands, s", results, lambda r: r.total_s, ".1f"),
        row("steps", results, lambda r: r.run.summary["steps"], "d"),
        row("training tokens/s", results, lambda r: r.run.tokens_per_s, ".0f"),
        row("trainer waited, whole run", results, lambda r: r.run.summary["trainer_wait_ratio"], ".1%"),
        row("trainer waited, after the first step", results, lambda r: r.run.steady_wait_ratio, ".1%"),
        row("mean staleness, steps", results, lambda r: r.run.mean_staleness, ".2f"),
        row("held-out reward before", results, lambda r: r.run.summary["reward_before"], ".3f"),
        row("held-out reward after", results, lambda r: r.run.summary["reward_after"], ".3f"),
        row("gain", results, _gain, "+.3f"),
        row("mismatch_kl", results, lambda r: r.run.summary["mismatch_kl"], ".1e"),
    ]
    return table(["", *(f"seed {result.seed}" for result in results)], rows)


def draw(results: list[DemoResult], path: Path) -> None:
    """Training reward per step, and the two held-out evaluations, one colour per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for result in results:
        (line,) = axes.plot(result.run.rewards, linewidth=1.2, label=f"seed {result.seed}, training batch")
        evals = sorted(result.run.summary["evals"], key=lambda point: point["policy_version"])
        versions = [point["policy_version"] for point in evals]
        rewards = [point["reward"] for point in evals]
        label = f"seed {result.seed}, held-out"
        axes.plot(versions, rewards, "o--", color=line.get_color(), linewidth=0.8, label=label)
    axes.set_xlabel("step (policy version)")
    axes.set_ylabel("mean reward")
    axes.set_title("reverse-text, tiny model")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def measure(seeds: list[int], *, quick: bool, plot: Path) -> str:
    """The report as Markdown; draws the plot."""
    results = [run_demo(seed, quick=quick) for seed in seeds]
    draw(results, plot)
    progress(f"reward curves: {plot}")
    return f"## Demo by phase and seed\n\n{render(results)}\n\n![Reward curves]({plot.name})\n"


def _gain(result: DemoResult) -> float | None:
    before, after = result.run.summary["reward_before"], result.run.summary["reward_after"]
    return None if before is None or after is None else after - before


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"seed 0 and {QUICK_STEPS} steps unless --seeds says more")
    parser.add_argument("--seeds", type=int, nargs="+", default=None, metavar="SEED")
    parser.add_argument("--plot", type=Path, default=DEFAULT_PLOT, metavar="FILE", help="the PNG to write")
    options = parser.parse_args()
    seeds = options.seeds or ([0] if options.quick else [0, 1, 2])
    print(measure(seeds, quick=options.quick, plot=options.plot))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
