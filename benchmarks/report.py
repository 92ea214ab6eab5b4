"""What the benchmarks share: Markdown tables, the facts of the machine, and progress lines that stay out of the report.

Reports go to stdout, progress to stderr, so that `python benchmarks/x.py > x.md` keeps only the report.
"""

import os
import platform
import signal
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def progress(text: str) -> None:
    """One line with the time of day, on stderr."""
    print(f"[{datetime.now().astimezone():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, first column to the left, the others to the right; padded so that it reads as plain text."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * (width - 1) + ":") if index else "-" * width for index, width in enumerate(widths)]
    return "\n".join([line(cells[0]), line(rule), *map(line, cells[1:])])


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; nan of nothing, because a short run may have no step to count."""
    return statistics.fmean(values) if values else float("nan")


def machine() -> str:
    """A Markdown list of what the figures depend on: date, processor, cores, memory, Python and libraries. No names."""
    versions = [f"{name} {_version(name)}" for name in ("torch", "numpy", "protobuf", "transformers", "verifiers")]
    facts = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "processor": f"{_cpu_model()}, {os.cpu_count()} cores ({len(os.sched_getaffinity(0))} usable)"
        if hasattr(os, "sched_getaffinity")
        else f"{_cpu_model()}, {os.cpu_count()} cores",
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
        "system": platform.system(),
        "load (1, 5, 15 min)": ", ".join(f"{value:.2f}" for value in os.getloadavg()),
        "Python": platform.python_version(),
        "libraries": ", ".join(versions),
    }
    return "\n".join(f"* {name}: {value}" for name, value in facts.items())


def end_like_interrupt() -> None:
    """Let SIGTERM unwind like Ctrl-C, so that children are stopped and temporary directories removed.

    SIGINT is set, too: a shell starts background jobs with it ignored, and children would inherit that.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not Linux
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()
