"""Which process of a run grows with its steps: anonymous memory of each over a long run of the example's tiny model.

A whole stack with a real trainer and engine, as a user starts it, and very small batches so that steps are many. The
memory of every process (RssAnon of Linux) is read once a second. The slope is that of a line through the samples after
the first third of the steps, by least squares; `range` is what the samples differ by around it.
"""

import argparse
import json
import re
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import numpy as np
import psutil
from report import progress, table
from workplace import Workplace

SAMPLE_S = 1.0
TINY = (
    "--orchestrator.batch-size", "8", "--orchestrator.rollouts-per-example", "4",
    "--orchestrator.sampling.max-tokens", "8", "--orchestrator.eval.interval", "1000000", "--seq-len", "64",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the options."""
    parser.add_argument("steps", type=int, nargs="?", default=400)
    parser.add_argument("--samples", type=Path, help="also write every sample into this file, as lines of JSON")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="further keys of the run's config")


def report(options: argparse.Namespace) -> str:
    """Take the steps and return a row for each process, as Markdown."""
    with tempfile.TemporaryDirectory(prefix="scale-memory-") as directory:
        place = Workplace(Path(directory))
        place.make_model(seed=0)
        place.fine_tune("--max-steps", "2")
        keys = [word for each in options.options for word in ("--" + each.partition("=")[0], each.partition("=")[2])]
        watching = _Watch(Path(directory))
        try:
            run = place.train("--max-steps", str(options.steps), *TINY, *keys)
        finally:
            watching.end()
        progress(f"{len(run.steps)} steps in {run.command_s:.0f} s")
    if options.samples is not None:
        options.samples.write_text("".join(json.dumps(each) + "\n" for each in watching.samples))
    return f"## Memory over {options.steps} steps\n\n" + table(
        ["process", "MB at the end", "KB a step", "range, MB"], _rows(watching.samples, options.steps)
    )


def _rows(samples: list[tuple[int, dict[str, float]]], steps: int) -> list[list[object]]:
    by_name: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
    for step, sizes in samples:
        for name, size in sizes.items():
            if steps / 3 <= step < steps:
                by_name[name].append((step, size))
    rows = list[list[object]]()
    for name, found in sorted(by_name.items()):
        at, sizes = np.array(found).T
        if len(set(at)) > 10:
            slope, start = np.polyfit(at, sizes, 1)
            rest = sizes - (slope * at + start)
            rows.append([name, f"{sizes[-1]:.1f}", f"{1024 * slope:.2f}", f"{rest.max() - rest.min():.2f}"])
    return rows


class _Watch:
    """Reads the memory of every process below this one, with the step that the run has taken."""

    def __init__(self, directory: Path) -> None:
        self.samples: list[tuple[int, dict[str, float]]] = []
        self._directory, self._ends = directory, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop reading."""
        self._ends.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self.samples.append((self._steps(), _sizes(self._directory)))
            if len(self.samples) % 60 == 0:
                progress(f"step {self.samples[-1][0]}")

    def _steps(self) -> int:
        found = [path.read_text().count('"kind": "step"') for path in self._directory.rglob("metrics.jsonl")]
        return max(found, default=0)


def _sizes(directory: Path) -> dict[str, float]:
    """Return MB of anonymous memory by role and pid, of the command that works in a directory and its descendants."""
    sizes: dict[str, float] = {}
    for process in psutil.process_iter():
        try:
            if process.cwd().startswith(str(directory)) and "millrace.cli" in process.cmdline():
                for each in [process, *process.children(recursive=True)]:
                    anonymous = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{each.pid}/status").read_text())
                    if anonymous is not None:
                        sizes[f"{_role(' '.join(each.cmdline()))} {each.pid}"] = int(anonymous[1]) / 1024
        except (psutil.Error, OSError):  # it has ended, or is another one's
            continue
    return sizes


def _role(command: str) -> str:
    found = re.findall(r"millrace[.\w]*", command)
    return found[-1] if found else command.partition(" ")[0].rpartition("/")[2]
