"""Overlapping kills on a busy machine: how long until the run moves on, and what the recovery costs.

    python benchmarks/recovery_loaded.py [--rounds 12] [--busy 4] [--seed 1] [--each-for-itself]

Beside one stack `--busy` processes spin. In each round two or three processes of the stack are killed within three
seconds of each other, and one of them once more while it starts. `to progress` is from the first of these kills to the
first event behind the last one that says that the run has moved on; `CPU s` is what all processes of the stack used
meanwhile, for whatever. `--each-for-itself` starts every process as a program of its own, without the fork server.
"""

import argparse
import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import end_like_interrupt, machine, progress, quantile, table

from millrace.local import preloads
from millrace_testing.chaos.run import PROGRESS, ChaosRun
from millrace_testing.chaos.stack import SERVICES, ChaosStack
from millrace_testing.workplaces import Workplace

VICTIMS = (*SERVICES, "redis")
APART_S = (0.0, 3.0)
STEPS = 400
GIVE_UP_S = 300.0
CALM_S = 5.0
"""Between a round's progress and the next round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one round of kills cost."""

    victims: tuple[str, ...]
    to_progress_s: float
    cpu_s: float


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """So many processes that spin, for the length of the block."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def progress_after(run: ChaosRun, moment: float) -> float | None:
    """When, by this process's clock, the first progress event behind a moment came; None if none has."""
    for event, at in zip(list(run.events), list(run.heard), strict=False):
        if event.WhichOneof("body") in PROGRESS and event.time.ToNanoseconds() / 1e9 > moment:
            return at
    return None


class Meter:
    """CPU seconds of everything that works for a stack, those of processes that died since included."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self._used: dict[tuple[int, float], float] = {}

    def read(self) -> float:
        """All so far. To be called often: what a process used between the last reading and its death is lost."""
        for process in self._workplace.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                self._used[process.pid, process.create_time()] = times.user + times.system
        return sum(self._used.values())


def torment(stack: ChaosStack, run: ChaosRun, dice: random.Random) -> Round:
    """One round."""
    meter = Meter(stack.workplace)
    victims = dice.sample(VICTIMS, dice.choice((2, 3)))
    victims.append(dice.choice(victims))  # once more, while it starts
    used, began, last = meter.read(), time.time(), 0.0
    for name in victims:
        meter.read()
        last = stack.kill_running(name)
        time.sleep(dice.uniform(*APART_S))
    while (at := progress_after(run, last)) is None:
        if time.time() > last + GIVE_UP_S or run.is_over:
            raise AssertionError(f"no progress after {victims} were killed. {run.describe()}")
        meter.read()
        time.sleep(0.2)
    return Round(victims=tuple(victims), to_progress_s=at - began, cpu_s=meter.read() - used)


def measure(options: argparse.Namespace) -> str:
    """The report as Markdown."""
    dice, rounds = random.Random(options.seed), list[Round]()
    with tempfile.TemporaryDirectory(prefix="millrace-loaded-") as directory:
        workplace = Workplace(Path(directory))
        progress("loaded: model and SFT")
        workplace.warm_up(0)
        env = {preloads.VARIABLE: "0" if options.each_for_itself else "1"}
        with ChaosStack(workplace, "loaded", env=env) as stack:
            run = stack.submit(max_steps=STEPS)
            run.wait_step(2)
            with busy(options.busy):
                for number in range(options.rounds):
                    rounds.append(torment(stack, run, dice))
                    newest = rounds[-1]
                    progress(
                        f"loaded: round {number + 1} of {options.rounds}: {', '.join(newest.victims)}: "
                        f"{newest.to_progress_s:.1f} s, {newest.cpu_s:.1f} CPU s"
                    )
                    time.sleep(CALM_S)
                    if run.steps() and run.steps()[-1] > STEPS - 20:
                        stack.finish(run)
                        run = stack.submit_patiently(max_steps=STEPS)
                        run.wait_step(2)
                load = os.getloadavg()
            run.cancel()
            stack.audit(run)
    seconds, used = [each.to_progress_s for each in rounds], [each.cpu_s for each in rounds]
    rows = [
        ["to progress, s", *(f"{value:.1f}" for value in _spread(seconds))],
        ["CPU s of the stack meanwhile", *(f"{value:.1f}" for value in _spread(used))],
    ]
    how = "every process for itself" if options.each_for_itself else "forked"
    title = f"## Overlapping kills, {options.busy} busy loops, {how}: {options.rounds} rounds, seed {options.seed}"
    average = ", ".join(f"{value:.1f}" for value in load)
    figures = table(["", "median", "p95", "worst"], rows)
    return f"{title}\n\nLoad average at the end {average}; audit clean.\n\n{machine()}\n\n{figures}\n"


def _spread(values: list[float]) -> tuple[float, float, float]:
    return statistics.median(values), quantile(values, 0.95), max(values)


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="default 12, 3 with --quick")
    parser.add_argument("--busy", type=int, default=4, help="processes that spin beside the stack")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--each-for-itself", action="store_true", help="without the fork server")
    options = parser.parse_args()
    options.rounds = options.rounds or (3 if options.quick else 12)
    print(measure(options))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
