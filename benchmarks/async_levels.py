"""RL at async_level 0, 1 and 2: how long the trainer waits, how fast the run is, how stale its data, what it learns.

    python benchmarks/async_levels.py [--quick] [--levels 0 1 2] [--steps 30] [--repeats 2]

One warmed-up model (seed 0) for all runs, each on a local stack of its own, with the example's file and only
`async_level`, the number of steps and the run's name changed. Repetitions are interleaved (0, 1, 2, 0, 1, 2) so that a
drift of the machine touches all levels; cells give the value of each repetition. On two cores trainer and engine share
the processor: overlapping them can only win what one of them leaves idle.
The full run takes about five minutes on two cores; --quick (three steps, one repetition) one and a half.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from report import end_like_interrupt, progress, table
from workplace import RunResult, Workplace, short_run

QUICK_STEPS = 3

FIGURES: list[tuple[str, Callable[[RunResult], float | None], str]] = [
    ("trainer_wait_ratio, whole run", lambda r: r.summary["trainer_wait_ratio"], ".1%"),
    ("trainer_wait_ratio, after the first step", lambda r: r.steady_wait_ratio, ".1%"),
    ("training tokens/s", lambda r: r.tokens_per_s, ".0f"),
    ("all steps and both evaluations, s", lambda r: r.summary["phases"].get("train_s"), ".1f"),
    ("whole command, s", lambda r: r.command_s, ".1f"),
    ("mean staleness, steps", lambda r: r.mean_staleness, ".2f"),
    ("largest staleness, steps", lambda r: r.summary["staleness_max"], "d"),
    ("held-out reward before", lambda r: r.summary["reward_before"], ".3f"),
    ("held-out reward after", lambda r: r.summary["reward_after"], ".3f"),
    ("mismatch_kl", lambda r: r.summary["mismatch_kl"], ".1e"),
]


def run_levels(levels: list[int], *, steps: int, repeats: int) -> dict[int, list[RunResult]]:
    """Every level `repeats` times, interleaved, from one model."""
    results: dict[int, list[RunResult]] = {level: [] for level in levels}
    with tempfile.TemporaryDirectory(prefix="millrace-async-") as directory:
        workplace = Workplace(Path(directory))
        progress("async levels: model and SFT")
        workplace.make_model(seed=0)
        workplace.fine_tune("--seed", "0")
        for repeat in range(repeats):
            for level in levels:
                progress(f"async levels: level {level}, repetition {repeat + 1} of {repeats}")
                name = f"level-{level}-{repeat}"
                options = ["--async-level", str(level), "--run.name", name, *short_run(steps)]
                results[level].append(workplace.train(*options))
    return results


def render(results: dict[int, list[RunResult]]) -> str:
    """The table, one column per level."""

    def cell(runs: list[RunResult], value: Callable[[RunResult], float | None], form: str) -> str:
        numbers = [value(run) for run in runs]
        return " / ".join("–" if number is None else format(number, form) for number in numbers)

    rows = [[label, *(cell(runs, value, form) for runs in results.values())] for label, value, form in FIGURES]
    return table(["", *(f"async_level {level}" for level in results)], rows)


def measure(levels: list[int], *, steps: int, repeats: int) -> str:
    """The report as Markdown."""
    results = run_levels(levels, steps=steps, repeats=repeats)
    return f"## Async levels: {steps} steps, {repeats} interleaved repetition(s)\n\n{render(results)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_STEPS} steps and one repetition")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 1, 2], metavar="LEVEL")
    parser.add_argument("--steps", type=int, default=None, help=f"default 30, {QUICK_STEPS} with --quick")
    parser.add_argument("--repeats", type=int, default=None, help="default 2, 1 with --quick")
    options = parser.parse_args()
    steps = options.steps or (QUICK_STEPS if options.quick else 30)
    print(measure(options.levels, steps=steps, repeats=options.repeats or (1 if options.quick else 2)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
