"""How long a run stands still when a process dies: every row of the failure table, by real kills on the local stack.

    python benchmarks/recovery.py [--quick] [--repeats 3] [--only TEXT]

One stack for all; in each run one process kills itself at a named point, the supervisor starts it again, and the run
ends by itself with a clean audit. `next progress` is from the kill to the next event that says that the run has moved
on (a batch, a step, a policy, a checkpoint), which what is committed already may bring at once; `standstill` is the
longest time without such an event from the kill on; `back` is from the kill until the process serves again. Medians
over the repetitions.
The full run takes about ten minutes on two cores; --quick (one row per service, once) one and a half.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from report import end_like_interrupt, progress, table

from millrace_testing.chaos.rows import ROWS
from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.workplaces import Workplace

QUICK = ("env-server mid-episode", "engine mid-decode", "orchestrator mid-commit", "trainer mid-backward")
REDIS = "Redis kill -9, AOF everysec"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One kill; all in seconds after it."""

    back_s: float
    next_progress_s: float
    standstill_s: float


def measure_row(stack: ChaosStack, row: str) -> Recovery:
    """One run with one kill; AssertionError if it does not end by itself, or if its audit finds anything."""
    stack.disarm()
    stack.wait_ready()
    victim = ROWS[row].victim if row in ROWS else "redis"
    old = stack.pid(victim)
    fault = stack.arm(ROWS[row].point, when=ROWS[row].when) if row in ROWS else None
    run = stack.submit(max_steps=6 if fault else 20)
    if fault is not None:
        at = fault.wait(run)["time"]
    else:
        run.wait_step(3)
        at = stack.kill(victim)
    stack.wait_restarted(victim, old)
    back_s = time.time() - at
    stack.finish(run)
    return Recovery(back_s=back_s, next_progress_s=run.recovery_s(at), standstill_s=run.standstill_s(at))


def measure(rows: Sequence[str], *, repeats: int) -> str:
    """The report as Markdown."""
    found: dict[str, list[Recovery]] = {row: [] for row in rows}
    with tempfile.TemporaryDirectory(prefix="millrace-recovery-") as directory:
        workplace = Workplace(Path(directory))
        progress("recovery: model and SFT")
        workplace.warm_up(0)
        with ChaosStack(workplace, "recovery") as stack:
            for repeat in range(repeats):
                for row in rows:
                    progress(f"recovery: {row}, repetition {repeat + 1} of {repeats}")
                    found[row].append(measure_row(stack, row))

    def median(values: list[float]) -> str:
        return f"{statistics.median(values):.1f}"

    cells = [
        [
            row,
            median([each.back_s for each in kills]),
            median([each.next_progress_s for each in kills]),
            median([each.standstill_s for each in kills]),
            f"{max(each.standstill_s for each in kills):.1f}",
        ]
        for row, kills in found.items()
    ]
    header = ["killed, s", "back", "next progress", "standstill", "worst standstill"]
    return f"## Recovery: {len(rows)} rows, {repeats} repetition(s)\n\n{table(header, cells)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one row per service, once")
    parser.add_argument("--repeats", type=int, default=None, help="default 3, 1 with --quick")
    parser.add_argument("--only", default="", metavar="TEXT", help="rows whose name contains it")
    options = parser.parse_args()
    rows = [row for row in (QUICK if options.quick else [*ROWS, REDIS]) if options.only in row]
    print(measure(rows, repeats=options.repeats or (1 if options.quick else 3)))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
