"""What a start costs: from `millrace rl` to the first token that the engine samples, in seconds and CPU seconds.

    python benchmarks/first_token.py [--quick] [--before DIR] [--rounds 3] [--model DIR]

Two starts, each with the files of examples/reverse_text and the model of its SFT. `alone`: the command starts a stack
of its own. `standing`: `millrace up` stands and has played a run of the same environment, whose workers it still holds;
the command submits another one. The engine's counter of generated tokens is asked every 50 ms, so a wall time is that
much too long at most. CPU seconds, user and system, are those of every process under the command until then (for
`standing`: those of the command and, from its start on, of the stack), by process; a process that has ended counts with
the one that waited for it. The command is then interrupted. `--before` names the directory `services` of another
checkout, which takes turns with this one, so that both see the same machine; medians of the rounds are reported.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cpu_seconds import cpu_by_process, difference
from report import REPOSITORY, end_like_interrupt, machine, progress, table
from workplace import EXAMPLE, STOP_TIMEOUT_S, Workplace, short_run

from millrace.local.directory import free_ports

POLL_S = 0.05
LONGEST_S = 240.0
COUNTER = "millrace_inference_generated_tokens_total "


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start, until the first token."""

    wall_s: float
    cpu_s: Mapping[str, float]
    """By process."""


class Checkout:
    """One tree of `services`, whose commands run in a workplace."""

    def __init__(self, services: Path | str, place: Path, model: Path) -> None:
        self._place = place
        self.output = place / "output.log"
        self.train = ("rl", "@", str(EXAMPLE / "rl.toml"), "--model.name", str(model), "--plain")
        kept = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
        self._env = {"OMP_NUM_THREADS": "1", **kept, "PYTHONPATH": str(services)}

    @contextmanager
    def command(self, *words: str) -> Iterator[subprocess.Popen[bytes]]:
        """`millrace words…`, interrupted at the end."""
        with self.output.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "millrace.cli", *words],
                cwd=self._place,
                env=self._env,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *words: str) -> None:
        """`millrace words…` to its end."""
        with self.command(*words) as process:
            if code := process.wait(LONGEST_S):
                raise RuntimeError(f"{' '.join(words)} ended with {code}: {self.output.read_text()[-2000:]}")


def generated(port: int) -> int:
    """The engine's counter; 0 while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
    except (urllib.error.URLError, OSError):
        return 0
    return next((int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(COUNTER)), 0)


def wait_token(port: int, known: int, process: subprocess.Popen[bytes], output: Path) -> None:
    """Return when the engine has generated tokens since its counter was `known`; it begins anew with another model."""
    ends = time.monotonic() + LONGEST_S
    while generated(port) in (0, known):
        if process.poll() is not None or time.monotonic() > ends:
            last = output.read_text()[-2000:]
            raise RuntimeError(f"no token was sampled; the command's exit status: {process.poll()}\n{last}")
        time.sleep(POLL_S)


def start_alone(checkout: Checkout, name: str) -> Start:
    """`millrace rl` with a stack of its own."""
    [port] = free_ports(1)
    began = time.monotonic()
    with checkout.command(*checkout.train, "--name", name, "--inference.server.port", str(port)) as process:
        wait_token(port, 0, process, checkout.output)
        wall_s = time.monotonic() - began
        return Start(wall_s=wall_s, cpu_s=cpu_by_process(process.pid))


def start_standing(checkout: Checkout, place: Path, name: str, rounds: int) -> list[Start]:
    """`millrace rl` on a stack that stands and has played the same environment; the stack's own start is left out."""
    listen, http = free_ports(2)
    directory, server = place / f"up-{name}", f"127.0.0.1:{listen}"
    starts = []
    with checkout.command("up", "--dir", str(directory), "--listen", server, "--http-port", str(http)) as stack:
        wait_ready(directory / "stack.json", stack)
        words = [*checkout.train, "--server", server, *short_run(1), "--name"]
        checkout.run(*words, f"{name}-first")
        for number in range(rounds):
            time.sleep(2.0)  # what the run before leaves to do is over
            before, used, began = generated(http), cpu_by_process(stack.pid), time.monotonic()
            with checkout.command(*words, f"{name}-{number}") as process:
                wait_token(http, before, process, checkout.output)
                wall_s = time.monotonic() - began
                found, own = difference(cpu_by_process(stack.pid), used), cpu_by_process(process.pid)
                process.wait(LONGEST_S)  # the next run begins when this one is over
            found["command"] += own["command"]  # beside that of `millrace up`
            starts.append(Start(wall_s=wall_s, cpu_s=found))
    return starts


def wait_ready(path: Path, stack: subprocess.Popen[bytes]) -> None:
    """Return when `stack.json` names the processes."""
    ends = time.monotonic() + LONGEST_S
    while not (path.is_file() and json.loads(path.read_text()).get("pids")):
        if stack.poll() is not None or time.monotonic() > ends:
            raise RuntimeError("the stack does not start")
        time.sleep(POLL_S)


def render(title: str, found: Mapping[str, Sequence[Start]]) -> str:
    """One table: a column per checkout, a row per process."""
    names = sorted({name for starts in found.values() for start in starts for name in start.cpu_s})
    medians = {
        name: [statistics.median(start.cpu_s.get(name, 0.0) for start in starts) for starts in found.values()]
        for name in names
    }
    rows = [["wall, s", *(f"{statistics.median(start.wall_s for start in starts):.1f}" for starts in found.values())]]
    rows.append(["least wall, s", *(f"{min(start.wall_s for start in starts):.1f}" for starts in found.values())])
    sums = [[sum(start.cpu_s.values()) for start in starts] for starts in found.values()]
    rows.append(["CPU s, all processes", *(f"{statistics.median(each):.2f}" for each in sums)])
    ordered = sorted(names, key=lambda name: -max(medians[name]))
    rows += [[f"… {name}", *(f"{value:.2f}" for value in medians[name])] for name in ordered]
    return f"### {title}\n\n{table(['', *found], rows)}\n"


def measure(rounds: int, before: Path | None, model: Path | None) -> str:
    """The report as Markdown."""
    trees = {"this": REPOSITORY / "services"} | ({"before": before.resolve()} if before else {})
    alone: dict[str, list[Start]] = {name: [] for name in trees}
    standing: dict[str, list[Start]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory(prefix="millrace-first-token-") as directory:
        place = Path(directory)
        if model is None:
            progress("model and SFT")
            workplace = Workplace(place)
            workplace.make_model(seed=0)
            workplace.fine_tune()
        found = (model or place / "outputs" / "reverse-text" / "sft" / "model").resolve()
        checkouts = {name: Checkout(services, place, found) for name, services in trees.items()}
        for number in range(rounds):
            for name, checkout in checkouts.items():
                progress(f"alone: {name}, round {number + 1} of {rounds}")
                alone[name].append(start_alone(checkout, f"alone-{name}-{number}"))
        for number in range(max(1, rounds // 2)):
            for name, checkout in checkouts.items():
                progress(f"standing: {name}, round {number + 1}")
                standing[name] += start_standing(checkout, place, f"{name}-{number}", 2)
    tables = [
        render("`millrace rl`, a stack of its own", alone),
        render("a second run on a stack that stands", standing),
    ]
    return f"## From the command to the first token: medians of {rounds}\n\n{machine()}\n\n" + "\n".join(tables)


def main() -> None:
    end_like_interrupt()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="once")
    parser.add_argument("--before", type=Path, help="directory `services` of another checkout")
    parser.add_argument("--model", type=Path, help="a model that is there, instead of making one")
    options = parser.parse_args()
    print(measure(1 if options.quick else options.rounds, options.before, options.model))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
