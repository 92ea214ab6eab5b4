"""Reward curves of every preset on the demo's task: three seeds at async_level 1, one at levels 0 and 4.

    python benchmarks/algorithms.py [--quick] [--presets grpo gspo …] [--steps 40] [--minutes M] [--draw-only]

A cell is one preset, level and seed: `millrace rl` with the example's file and `--algo.preset`, from the model of
its seed, warmed up to the same loss; opd's teacher is the demo's trained policy, served by an engine of its own. What a
cell gave stands in results/algorithms.json as soon as it is over; one that stands there with as many steps is not
run again: stop and start as you like; --minutes begins no cell after so long. First come seed 0 and level 1 of all
presets. The picture is drawn from all that is there. A cell takes about a minute on two idle cores, all 50 an hour.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from report import REPOSITORY, end_like_interrupt, machine, progress, table
from workplace import RunResult, Workplace, short_run

from millrace.config.filling import PRESETS
from millrace.local.directory import free_ports

RESULTS = REPOSITORY / "benchmarks" / "results" / "algorithms.json"
PLOT = REPOSITORY / "docs" / "algorithms.png"
STEPS, QUICK_STEPS = 40, 3
PLANS = ((1, 0), (0, 0), (4, 0), (1, 1), (1, 2))
"""(async level, seed) of every preset's cells, in the order in which they are run."""
WARM_UP_STEPS = range(60, 121, 15)
"""SFT steps, as many as a seed needs to be as warm as the demo's model: cells compare algorithms, not warm-ups."""
WARM_LOSS = 0.61
"""Mean loss of the last five SFT steps up to which a model is warm: seeds 0 and 1 after 60, seed 2 after 75."""
TEACHER_STARTS_WITHIN_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of a preset."""

    preset: str
    level: int
    seed: int
    steps: int

    @property
    def key(self) -> str:
        return f"{self.preset}/level-{self.level}/seed-{self.seed}/{self.steps}-steps"


class Bench:
    """The warmed-up models by seed, and the teacher, each made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._places: dict[int, Workplace] = {}
        self._trained: Path | None = None

    def place(self, seed: int) -> Workplace:
        """A directory with the warmed-up model of a seed."""
        if seed not in self._places:
            path = self._directory / f"seed-{seed}"
            path.mkdir()
            place = self._places[seed] = Workplace(path)
            progress(f"seed {seed}: model and SFT")
            place.make_model(seed=seed)
            for steps in WARM_UP_STEPS:
                place.fine_tune("--seed", str(seed), "--max-steps", str(steps))
                if warm_up_loss(path) <= WARM_LOSS:
                    break
        return self._places[seed]

    def run(self, cell: Cell) -> dict[str, Any]:
        """Run a cell; what of it is kept."""
        name = cell.key.replace("/", "-").replace("_", "-")
        options = ["--algo.preset", cell.preset, "--async-level", str(cell.level), "--seed", str(cell.seed)]
        options += ["--run.name", name, *short_run(cell.steps)]
        place = self.place(cell.seed)
        with contextlib.ExitStack() as stack:
            if cell.preset == "opd":
                url = stack.enter_context(serving(self.trained_policy(), self._directory / "teacher.log"))
                options += ["--orchestrator.algo.teacher.name", "teacher"]
                options += ["--orchestrator.algo.teacher.base-url", url]
            return kept(cell, place.train(*options))

    def trained_policy(self) -> Path:
        """The policy of the demo's own 80 steps."""
        if self._trained is None:
            progress("the teacher: the demo's run")
            place = self.place(0)
            self._trained = place.path / place.train("--seed", "0", "--run.name", "teacher").summary["policy_path"]
        return self._trained


def warm_up_loss(directory: Path) -> float:
    """The mean loss of the last five steps of the SFT in a directory."""
    lines = (directory / "outputs" / "reverse-text" / "sft" / "metrics.jsonl").read_text().splitlines()
    return statistics.mean(json.loads(line)["loss/mean"] for line in lines[-5:])


@contextlib.contextmanager
def serving(model: Path, log: Path) -> Iterator[str]:
    """An engine that serves a model as it is; gives the base URL of its API."""
    port, http_port = free_ports(2)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    env |= {"MILLRACE_MODEL": str(model), "MILLRACE_MODEL_NAME": "teacher", "MILLRACE_DRAIN_S": "0"}
    env |= {"MILLRACE_LISTEN": f"127.0.0.1:{port}", "MILLRACE_HTTP_LISTEN": f"127.0.0.1:{http_port}"}
    url = f"http://127.0.0.1:{http_port}/v1"
    with log.open("w") as output:
        command = [sys.executable, "-m", "millrace.inference.main"]
        process = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    try:
        ends = time.monotonic() + TEACHER_STARTS_WITHIN_S
        while not _answers(f"{url}/models"):
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"the teacher does not serve:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def kept(cell: Cell, run: RunResult) -> dict[str, Any]:
    """What of a run stands in the results."""
    means = {name: [step["metrics"].get(name) for step in run.steps] for name in ("entropy/mean", "mismatch_kl/mean")}
    return {
        **asdict(cell),
        "reward_before": run.summary["reward_before"],
        "reward_after": run.summary["reward_after"],
        "mean_staleness": run.mean_staleness,
        "command_s": run.command_s,
        "rewards": run.rewards,
        "entropy": means["entropy/mean"],
        "mismatch_kl": means["mismatch_kl/mean"],
    }


def cells_of(presets: Sequence[str], *, steps: int, quick: bool) -> list[Cell]:
    """Every cell in the order in which it is run."""
    plans = PLANS[:1] if quick else PLANS
    return [Cell(preset=preset, level=level, seed=seed, steps=steps) for level, seed in plans for preset in presets]


def load(path: Path) -> dict[str, Any]:
    """What earlier runs of this script gave."""
    return json.loads(path.read_text()) if path.exists() else {"machine": "", "cells": {}}


def save(path: Path, results: dict[str, Any]) -> None:
    """Replace the file in one go: a stopped benchmark leaves a whole one behind."""
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(_rounded(results), indent=1, sort_keys=True) + "\n")
    fresh.replace(path)


def run_cells(cells: Sequence[Cell], path: Path, *, ends: float) -> dict[str, Any]:
    """Run what is not there yet, until `ends`; returns all results."""
    results = load(path)
    todo = [cell for cell in cells if cell.key not in results["cells"]]
    with tempfile.TemporaryDirectory(prefix="millrace-algorithms-") as directory:
        bench = Bench(Path(directory))
        for number, cell in enumerate(todo, start=1):
            if time.monotonic() > ends:
                progress(f"out of time, {len(todo) - number + 1} cells are left")
                break
            progress(f"{cell.key} ({number} of {len(todo)})")
            result = bench.run(cell)
            results["cells"][cell.key] = result
            results["machine"] = machine()
            save(path, results)
            progress(f"{cell.key}: held-out {result['reward_before']:.3f} to {result['reward_after']:.3f}")
    return results


def render(results: dict[str, Any]) -> str:
    """A line per preset and level: how much the held-out reward rose, seed by seed."""
    by_row: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for cell in results["cells"].values():
        by_row.setdefault((cell["preset"], cell["level"], cell["steps"]), []).append(cell)
    order = list(PRESETS)
    rows = []
    for (preset, level, steps), found in sorted(by_row.items(), key=lambda item: (order.index(item[0][0]), item[0])):
        found.sort(key=lambda cell: cell["seed"])
        gains = [f"{cell['reward_after'] - cell['reward_before']:+.3f}" for cell in found]
        largest = max(value for cell in found for value in cell["mismatch_kl"] if value is not None)
        stale = " / ".join(f"{cell['mean_staleness']:.1f}" for cell in found)
        rows.append([preset, level, steps, " / ".join(gains), stale, f"{largest:.0e}"])
    header = ["preset", "async_level", "steps", "gain of held-out reward, by seed", "staleness", "largest mismatch_kl"]
    return f"## Presets on the demo's task\n\n{results['machine']}\n\n{table(header, rows)}\n"


def draw(results: dict[str, Any], path: Path) -> None:
    """One panel per preset: the training reward over the steps, a line per cell, and the mean of the held-out tasks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {0: "tab:green", 1: "tab:blue", 4: "tab:red"}
    figure, panels = pyplot.subplots(2, 5, figsize=(15, 6), sharex=True, sharey=True)
    for panel, preset in zip(panels.flat, PRESETS, strict=True):
        panel.set_title(preset)
        panel.grid(alpha=0.3)
        for cell in (cell for cell in results["cells"].values() if cell["preset"] == preset):
            colour = colours.get(cell["level"], "tab:gray")
            label = f"level {cell['level']}, seed {cell['seed']}"
            panel.plot(_smooth(cell["rewards"]), color=colour, linewidth=1.2, alpha=0.8, label=label)
            ends = (cell["reward_before"], cell["reward_after"])
            panel.plot((0, cell["steps"]), ends, "o", color=colour, markersize=4)
        if panel.lines:
            panel.legend(fontsize="x-small", loc="lower right")
    figure.supxlabel("step (policy version)")
    figure.supylabel("mean reward")
    figure.suptitle(
        "reverse-text, tiny model: training batches (mean of 3 steps), and held-out tasks before and after (dots)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _smooth(values: Sequence[float]) -> list[float]:
    windows = [values[max(0, at - 1) : at + 2] for at in range(len(values))]
    return [sum(window) / len(window) for window in windows]


def _rounded(value: Any) -> Any:
    match value:
        case float():
            return float(f"{value:.4g}")
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
    return value


def _answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as reply:
        return reply.status == 200
    return False


def measure(presets: Sequence[str], *, steps: int, quick: bool, minutes: float, places: tuple[Path, Path]) -> str:
    """The report as Markdown; keeps the results and draws the picture (`places`)."""
    results_path, plot = places
    ends = time.monotonic() + 60 * minutes
    cells = cells_of(presets, steps=steps, quick=quick) if minutes else []
    results = run_cells(cells, results_path, ends=ends)
    if results["cells"]:
        draw(results, plot)
        progress(f"reward curves: {plot}")
    return render(results)


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"level 1, seed 0, {QUICK_STEPS} steps, nothing kept")
    parser.add_argument("--presets", nargs="+", choices=tuple(PRESETS), default=tuple(PRESETS), metavar="PRESET")
    parser.add_argument("--steps", type=int, default=None, help=f"default {STEPS}, {QUICK_STEPS} with --quick")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no cell after so long")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE", help="the JSON file of the cells")
    parser.add_argument("--plot", type=Path, default=PLOT, metavar="FILE", help="the PNG to write")
    parser.add_argument("--draw-only", action="store_true", help="run nothing: table and picture of what is there")
    options = parser.parse_args()
    steps, minutes = options.steps or STEPS, 0.0 if options.draw_only else options.minutes
    if options.quick:
        with tempfile.TemporaryDirectory(prefix="millrace-quick-") as directory:
            places = (Path(directory) / "algorithms.json", Path(directory) / "algorithms.png")
            steps = options.steps or QUICK_STEPS
            print(measure(options.presets, steps=steps, quick=True, minutes=minutes, places=places))
        return
    places = (options.results, options.plot)
    print(measure(options.presets, steps=steps, quick=False, minutes=minutes, places=places))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
