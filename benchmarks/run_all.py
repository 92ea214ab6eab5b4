"""Runs all benchmarks, one after the other, and prints one Markdown report; `make bench` calls it.

    python benchmarks/run_all.py [--quick] [--write] [--only NAME …]

Each benchmark is its own process, so that none inherits threads or memory of another. Progress goes to stderr, the
report to stdout and, with --write, to benchmarks/results/latest.md (beside it the plot of the demo). A benchmark that
fails leaves its error in the report and the exit status 1; the others still run. Close other programs meanwhile: the
report states the load average at the start.
The full run takes about 40 minutes on two cores, --quick about seven.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from report import REPOSITORY, end_like_interrupt, machine, progress

HERE = REPOSITORY / "benchmarks"
RESULTS = HERE / "results"
NAMES = ("budget", "batch_encoding", "engine", "async_levels", "demo", "first_token", "rollout_cost")
NAMES += ("recovery", "aof", "weight_sync")
TIMEOUT_S = 3600  # of one benchmark; the longest takes ten minutes
STOP_TIMEOUT_S = 90  # above what a command in a workplace takes to stop its stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one benchmark printed, or why it did not."""

    name: str
    report: str
    seconds: float
    is_ok: bool


def run_one(name: str, *options: str) -> Outcome:
    """Run `benchmarks/{name}.py`; its progress lines go through."""
    progress(f"{name}: begins")
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, str(HERE / f"{name}.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches it once, through us
    ) as process:
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            problem = f"exit status {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            output, problem = _stop(process), f"not finished within {TIMEOUT_S} s"
        except KeyboardInterrupt:
            _stop(process)
            raise
    seconds = time.monotonic() - began
    progress(f"{name}: {problem or 'done'} after {seconds:.0f} s")
    if problem is None:
        return Outcome(name=name, report=output, seconds=seconds, is_ok=True)
    failed = f"## {name}\n\nFailed: {problem}. Run `python benchmarks/{name}.py` to see why.\n\n{output}"
    return Outcome(name=name, report=failed, seconds=seconds, is_ok=False)


def render(outcomes: list[Outcome], facts: str, *, quick: bool) -> str:
    """The whole report."""
    note = "Quick run: too short for figures to compare, it shows that the benchmarks work.\n\n" if quick else ""
    times = ", ".join(f"{outcome.name} {outcome.seconds:.0f} s" for outcome in outcomes)
    sections = "\n".join(outcome.report.rstrip() + "\n" for outcome in outcomes)
    return f"# Benchmarks\n\n{note}{facts}\n* time taken: {times}\n\n{sections}"


def main() -> int:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="the shortest run of each")
    parser.add_argument("--write", action="store_true", help=f"write {(RESULTS / 'latest.md').relative_to(REPOSITORY)}")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES), metavar="NAME", help=", ".join(NAMES))
    options = parser.parse_args()
    if options.write and (options.quick or set(options.only) != set(NAMES)):
        parser.error("--write keeps the figures of a full run: leave out --quick and --only")
    facts = machine()
    extra: dict[str, list[str]] = {"demo": ["--plot", str(RESULTS / "reward_curves.png")]} if options.write else {}
    quick = ["--quick"] if options.quick else []
    outcomes = [run_one(name, *quick, *extra.get(name, [])) for name in options.only]
    report = render(outcomes, facts, quick=options.quick)
    print(report)
    if options.write:
        _write(RESULTS / "latest.md", report)
    return 0 if all(outcome.is_ok for outcome in outcomes) else 1


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    progress(f"written: {path.relative_to(REPOSITORY)}")


def _stop(process: subprocess.Popen[str]) -> str:
    """Ctrl-C for the benchmark, which stops what it started; returns what it had printed."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=STOP_TIMEOUT_S)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
