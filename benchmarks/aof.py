"""What the log's durability costs: a run's throughput with Redis' append-only file (everysec) against none.

    python benchmarks/aof.py [--quick] [--pairs 4] [--steps 40]

One stack for all runs; `CONFIG SET appendonly` turns the file on and off between them, and each pair runs in the other
order than the one before, so that a drift of the machine touches both. Seconds are from the end of the first step to
the end of the last one; the first waits for engines. Cells give the value of each run.
The full run takes about four minutes on two cores; --quick (one pair, ten steps) one and a half.
"""

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from report import end_like_interrupt, progress, table

from millrace_testing.chaos.stack import ChaosStack
from millrace_testing.workplaces import Workplace

EVERYSEC, NONE = "AOF everysec", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One run."""

    steps_per_s: float
    tokens_per_s: float
    written_mb: float
    """What the append-only file grew by."""
    redis_cpu_s: float
    """Processor time of the server, user and system."""


def measure_run(stack: ChaosStack, mode: str, *, steps: int) -> Figures:
    """One run in a mode; its audit is clean."""
    client = stack.redis()
    client.config_set("appendonly", "yes" if mode == EVERYSEC else "no")
    while client.info("persistence")["aof_rewrite_in_progress"]:  # turning it on writes what is there
        time.sleep(0.1)
    stack.wait_ready()
    before = client.info()
    run = stack.submit(max_steps=steps, **{"ckpt.interval": steps, "orchestrator.batch_size": 64})
    run.wait_done()
    after = client.info()
    stack.audit(run)
    done = run.of("step_completed")
    seconds = _time(done[-1]) - _time(done[0])
    return Figures(
        steps_per_s=(len(done) - 1) / seconds,
        tokens_per_s=sum(event.step_completed.num_tokens for event in done[1:]) / seconds,
        written_mb=(after.get("aof_current_size", 0) - before.get("aof_current_size", 0)) / 1e6,
        redis_cpu_s=sum(after[name] - before[name] for name in ("used_cpu_user", "used_cpu_sys")),
    )


def measure(*, pairs: int, steps: int) -> str:
    """The report as Markdown."""
    found: dict[str, list[Figures]] = {EVERYSEC: [], NONE: []}
    with tempfile.TemporaryDirectory(prefix="millrace-aof-") as directory:
        workplace = Workplace(Path(directory))
        progress("AOF: model and SFT")
        workplace.warm_up(0)
        with ChaosStack(workplace, "aof") as stack:
            progress("AOF: a run that warms up")
            measure_run(stack, NONE, steps=min(steps, 10))
            for pair in range(pairs):
                for mode in (EVERYSEC, NONE) if pair % 2 == 0 else (NONE, EVERYSEC):
                    progress(f"AOF: {mode}, pair {pair + 1} of {pairs}")
                    found[mode].append(measure_run(stack, mode, steps=steps))
    forms = {
        "steps/s": lambda each: f"{each.steps_per_s:.2f}",
        "training tokens/s": lambda each: f"{each.tokens_per_s:.0f}",
        "written to the file, MB": lambda each: f"{each.written_mb:.1f}",
        "processor time of Redis, s": lambda each: f"{each.redis_cpu_s:.2f}",
    }
    cells = [[name, *(" / ".join(map(form, runs)) for runs in found.values())] for name, form in forms.items()]
    ratios = [on.tokens_per_s / off.tokens_per_s for on, off in zip(found[EVERYSEC], found[NONE], strict=True)]
    verdict = f"tokens/s with AOF over none, per pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)}"
    return (
        f"## What the log costs: {pairs} pair(s) of {steps} steps\n\n{table(['', *found], cells)}\n\n"
        f"{verdict}; median {statistics.median(ratios):.2f}.\n"
    )


def _time(event) -> float:
    return event.time.seconds + event.time.nanos / 1e9


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one pair of ten steps")
    parser.add_argument("--pairs", type=int, default=None, help="default 4, 1 with --quick")
    parser.add_argument("--steps", type=int, default=None, help="default 40, 10 with --quick")
    options = parser.parse_args()
    pairs, steps = (1, 10) if options.quick else (4, 40)
    print(measure(pairs=options.pairs or pairs, steps=options.steps or steps))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
