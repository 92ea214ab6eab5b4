"""What starting a service costs: CPU seconds and wall time from a kill until it serves, and until it has settled.

    python benchmarks/recovery_start.py [--repeats 3] [--each-for-itself]

One idle stack; each service is killed in turn, and the supervisor starts it again. `serving` is when its health check
answers, `settled` when it has stopped using the processor (what is imported while it registers already is done), and
CPU seconds are those of the new process and what it started, user and system. Memory is what it has alone (USS) and its
fair share of what it shares with others (PSS). CPU seconds depend little on what else runs; wall times do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import end_like_interrupt, machine, progress, table

from millrace.local import preloads
from millrace_testing.chaos.stack import SERVICES, ChaosStack
from millrace_testing.workplaces import Workplace

QUIET_S = 1.5
QUIET_SHARE = 0.08
"""Of one core: what uses less for `QUIET_S` has settled."""
LONGEST_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start."""

    cpu_s: float
    serving_s: float
    settled_s: float
    uss_mb: float
    pss_mb: float


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process and of everything that it has started."""
    total = 0.0
    for each in [process, *process.children(recursive=True)]:
        times = each.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


def settle(process: psutil.Process) -> tuple[float, float]:
    """(CPU seconds, `time.monotonic()` of the last use) once it is quiet."""
    ends = time.monotonic() + LONGEST_S
    used, since = cpu_s(process), time.monotonic()
    while time.monotonic() < ends:
        time.sleep(QUIET_S)
        now_used = cpu_s(process)
        if now_used - used < QUIET_SHARE * QUIET_S:
            return now_used, since
        used, since = now_used, time.monotonic()
    raise TimeoutError(f"{process} does not settle")


def measure_start(stack: ChaosStack, name: str) -> Start:
    """Kill one service and watch the next life of it."""
    stack.wait_ready()
    old, began = stack.pid(name), time.monotonic()
    stack.kill(name)
    pid = stack.wait_restarted(name, old)
    serving_s = time.monotonic() - began
    process = psutil.Process(pid)
    used, at = settle(process)
    memory = process.memory_full_info()
    return Start(
        cpu_s=used,
        serving_s=serving_s,
        settled_s=max(serving_s, at - began),
        uss_mb=memory.uss / 1e6,
        pss_mb=memory.pss / 1e6,
    )


def command_cpu_s(*argv: str) -> float:
    """CPU seconds of one command that ends by itself."""
    before = os.times()
    subprocess.run([sys.executable, *argv], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def measure(repeats: int, *, each_for_itself: bool) -> str:
    """The report as Markdown."""
    found: dict[str, list[Start]] = {name: [] for name in SERVICES}
    with tempfile.TemporaryDirectory(prefix="millrace-start-") as directory:
        env = {preloads.VARIABLE: "0" if each_for_itself else "1"}
        stack = ChaosStack(Workplace(Path(directory)), "start", env=env)
        began = time.monotonic()
        with stack:
            up_s = time.monotonic() - began
            assert stack._process is not None
            supervisor = psutil.Process(stack._process.pid)
            time.sleep(2 * QUIET_S)
            settle(supervisor)
            up_cpu_s = cpu_s(supervisor)
            together = [supervisor, *supervisor.children(recursive=True)]
            pss_mb = sum(each.memory_full_info().pss for each in together) / 1e6
            for repeat in range(repeats):
                for name in SERVICES:
                    progress(f"start: {name}, repetition {repeat + 1} of {repeats}")
                    found[name].append(measure_start(stack, name))
            time.sleep(2 * QUIET_S)
    cli_s = statistics.median(command_cpu_s("-m", "millrace.cli", "--help") for _ in range(3))
    rows = [
        [
            name,
            *(
                f"{statistics.median(getattr(start, field) for start in starts):.{digits}f}"
                for field, digits in (("cpu_s", 2), ("serving_s", 1), ("settled_s", 1), ("uss_mb", 0), ("pss_mb", 0))
            ),
        ]
        for name, starts in found.items()
    ]
    rows.append(["millrace --help", f"{cli_s:.2f}", "", "", "", ""])
    rows.append(["millrace up, everything", f"{up_cpu_s:.2f}", f"{up_s:.1f}", "", "", f"{pss_mb:.0f}"])
    header = ["started again", "CPU s", "serving, s", "settled, s", "USS, MB", "PSS, MB"]
    how = "every process for itself" if each_for_itself else "forked"
    return f"## Starts, {how}: medians of {repeats}\n\n{machine()}\n\n{table(header, rows)}\n"


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once")
    parser.add_argument("--each-for-itself", action="store_true", help="without the fork server")
    options = parser.parse_args()
    print(measure(1 if options.quick else options.repeats, each_for_itself=options.each_for_itself))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
