"""What a rollout of the demo costs: CPU milliseconds by process, between two steps of one run, without its start.

    python benchmarks/rollout_cost.py [--quick] [--repeats 2] [--steps 80] [--async-level 1] [--model DIR]
        [--profile]

`millrace rl` with the files of examples/reverse_text: 256 rollouts a step, two evaluations left out. CPU seconds, user
and system, of every process are read when step 10 has ended and when the last but five has; the difference, divided by
the rollouts of the steps between, is what one costs: sampling, environment, log, training on it, a policy per step.
Other programs disturb it little. `--profile` samples every process meanwhile (`sampling/sitecustomize.py`), which costs
time of its own, and prints where each one spends it.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpu_seconds import cpu_by_process, difference, name_of
from first_token import Checkout
from report import REPOSITORY, end_like_interrupt, machine, progress, table
from workplace import Workplace

FIRST, BEFORE_LAST = 10, 5
ROLLOUTS = 256
POLL_S = 0.05
SHOWN = 8
LONGEST_S = 1200.0


def steps_done(path: Path) -> int:
    """How many steps the metrics file of the run tells of."""
    return path.read_text().count('"kind": "step"') if path.is_file() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of the steps between two moments of a run."""

    cpu_ms: Mapping[str, float]
    """Per rollout, by process."""
    wall_ms: float
    """Per rollout."""
    wait_share: float
    """Of the trainer's time."""
    bound: float
    """The share that is left if all cores work all the time: 1 - (a step's time without waiting) * cores / CPU."""


def measure_run(checkout: Checkout, place: Path, name: str, steps: int, async_level: int) -> Cost:
    """One run of so many steps."""
    seen: list[tuple[int, float, Mapping[str, float]]] = []
    metrics = place / "outputs" / name / "metrics.jsonl"
    words = [*checkout.train, "--max-steps", str(steps), "--orchestrator.eval.interval", str(steps), "--name", name]
    words += ["--async-level", str(async_level)]
    with checkout.command(*words) as process:
        ends = time.monotonic() + LONGEST_S
        for wanted in (FIRST, steps - BEFORE_LAST):
            while (done := steps_done(metrics)) < wanted:
                if process.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(f"step {wanted} does not come:\n{checkout.output.read_text()[-2000:]}")
                time.sleep(POLL_S)
            seen.append((done, time.monotonic(), cpu_by_process(process.pid)))
        events = [json.loads(line) for line in metrics.read_text().splitlines()]
    (begun, since, before), (done, now, used) = seen
    spent = difference(used, before)
    between = [event for event in events if event["kind"] == "step"][begun:done]
    waited, lasted = (sum(event[key] for event in between) for key in ("wait_seconds", "step_seconds"))
    per_rollout = 1000 / ((done - begun) * ROLLOUTS)
    return Cost(
        cpu_ms={name: seconds * per_rollout for name, seconds in spent.items()},
        wall_ms=(now - since) * per_rollout,
        wait_share=waited / lasted,
        bound=max(0.0, 1 - (lasted - waited) * (os.cpu_count() or 1) / sum(spent.values())),
    )


def render(found: Sequence[Cost]) -> str:
    """The table of the runs' medians, dearest first."""

    def median(value: Callable[[Cost], float]) -> float:
        return statistics.median(map(value, found))

    medians = {name: median(lambda cost, name=name: cost.cpu_ms.get(name, 0.0)) for name in found[0].cpu_ms}
    rows = [[name, f"{value:.2f}"] for name, value in sorted(medians.items(), key=lambda item: -item[1])]
    rows.append(["all processes", f"{median(lambda cost: sum(cost.cpu_ms.values())):.2f}"])
    rows.append(["wall time", f"{median(lambda cost: cost.wall_ms):.2f}"])
    rows.append(["trainer waits, share of its time", f"{median(lambda cost: cost.wait_share):.0%}"])
    rows.append(["… with every core at work", f"{median(lambda cost: cost.bound):.0%}"])
    return table(["CPU of a rollout", "ms"], rows)


def render_profiles(samples: Path) -> str:
    """One table per process: functions of ours with the share of the samples, and what they are in."""
    tables = []
    for path in sorted(samples.glob("*.json")):
        said = json.loads(path.read_text())
        found: Counter[str] = Counter(said["found"])
        total = found.pop("samples")
        ours: Counter[str] = Counter()
        leaves: dict[str, Counter[str]] = {}
        for pair, count in found.items():
            mine, _, leaf = pair.partition(" | ")
            ours[mine] += count
            leaves.setdefault(mine, Counter())[leaf] += count
        rows = [
            [
                mine,
                f"{count / total:.0%}",
                ", ".join(leaf.rpartition(":")[2] for leaf, _ in leaves[mine].most_common(3)),
            ]
            for mine, count in ours.most_common(SHOWN)
        ]
        name = name_of(" ".join(said["argv"]))
        tables.append(f"### {name}, {total} samples\n\n{table(['in', 'share', 'there mostly'], rows)}\n")
    return "\n".join(tables)


def measure(repeats: int, steps: int, *, async_level: int, model: Path | None, is_profiled: bool) -> str:
    """The report as Markdown."""
    with tempfile.TemporaryDirectory(prefix="millrace-rollout-cost-") as directory:
        place = Path(directory)
        if model is None:
            progress("model and SFT")
            workplace = Workplace(place)
            workplace.make_model(seed=0)
            workplace.fine_tune()
        found = (model or place / "outputs" / "reverse-text" / "sft" / "model").resolve()
        paths, profiles = str(REPOSITORY / "services"), ""
        if is_profiled:
            sampling = place / "sampling"
            shutil.copytree(REPOSITORY / "benchmarks" / "sampling", sampling)
            (sampling / "samples").mkdir()
            paths = f"{sampling}:{paths}"
        checkout = Checkout(paths, place, found)
        runs = []
        for number in range(repeats):
            progress(f"run {number + 1} of {repeats}, {steps} steps")
            runs.append(measure_run(checkout, place, f"cost-{number}", steps, async_level))
        if is_profiled:
            profiles = "\n" + render_profiles(place / "sampling" / "samples")
    between = f"async level {async_level}, steps {FIRST} to {steps - BEFORE_LAST} of {steps}, medians of {repeats}"
    return f"## A rollout of the demo, {between}\n\n{machine()}\n\n{render(runs)}\n{profiles}"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--async-level", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="once, 20 steps")
    parser.add_argument("--profile", action="store_true", help="where each process spends it")
    parser.add_argument("--model", type=Path, help="a model that is there, instead of making one")
    options = parser.parse_args()
    repeats, steps = (1, 20) if options.quick else (options.repeats, options.steps)
    level = options.async_level
    print(measure(repeats, steps, async_level=level, model=options.model, is_profiled=options.profile))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
