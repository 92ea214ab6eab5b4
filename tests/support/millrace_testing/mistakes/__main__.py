"""Make every mistake of a first day, and print the table of benchmarks/results/first_mistakes.md.

python -m millrace_testing.mistakes PLACE > benchmarks/results/first_mistakes.md

PLACE is an empty directory, or one of an earlier run. Exit code 1 where a mistake took longer than a minute to be told,
was told without a remedy, or ended with a traceback; standard error names it.
"""

import contextlib
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from millrace_testing.mistakes.catalog import (
    ALL,
    DONE,
    MODEL,
    RL,
    SFT,
    SMALL,
    CannotBeMade,
    Mistake,
    clean_environ,
    taken_port,
)

ROOT = Path(__file__).resolve().parents[4]
_LIMIT_S = 180.0
_LONGEST = 100
_HEAD = """# Mistakes of a first day

<!-- .venv/bin/python -m millrace_testing.mistakes PLACE > benchmarks/results/first_mistakes.md -->

Each was made for real, with the tiny model of `examples/reverse_text` on a CPU. Seconds are from the command to the
message, on two cores with a load of 1 to 20. Messages are shown as they begin; each goes on with the place and the
remedy. [Troubleshooting](../../docs/troubleshooting.md) goes by symptom, [events](../../docs/events.md) by reason.

| mistake | seconds | the message |
|---|---|---|
"""


@dataclass(frozen=True)
class Told:
    """The outcome of a mistake: the message, the seconds until its first line, the exit code."""

    message: str
    seconds: float
    code: int
    output: str


def main() -> int:
    """Make the mistakes whose text contains a word of the command line, or all of them; print the table."""
    place, words = Path(sys.argv[1]).resolve(), sys.argv[2:]
    prepare(place)
    print(_HEAD, end="")
    has_failed = False
    with taken_port() as port:
        busy = Mistake(what="a port that is in use", command=f"{RL}{SMALL} --inference.server.port {port}")
        for mistake in (*ALL, busy):
            if words and not any(word in mistake.what for word in words):
                continue
            try:
                told = make(mistake, place)
            except CannotBeMade as error:
                print(f"{mistake.what}: left out: {error}\n", file=sys.stderr, flush=True)
                continue
            print(row(mistake, told, place), flush=True)
            if why := fault(mistake, told):
                has_failed = True
                print(f"{mistake.what}: {why}\n{told.output[-2000:]}\n", file=sys.stderr, flush=True)
    return int(has_failed)


def prepare(place: Path) -> None:
    """Prepare the example, its model, and a run that has succeeded."""
    place.mkdir(parents=True, exist_ok=True)
    shutil.copytree(ROOT / "examples", place / "examples", dirs_exist_ok=True)
    if not (place / MODEL / "config.json").is_file():
        subprocess.run([sys.executable, "examples/reverse_text/make_model.py"], cwd=place, check=True, stdout=2)
        _run(f"{SFT} --max-steps 20", place)
    if not (place / "outputs" / DONE / "summary.json").is_file():
        _run(f"{RL}{SMALL} --name {DONE}", place)


def _run(command: str, place: Path) -> None:
    argv = [sys.executable, "-m", "millrace.cli", *shlex.split(command)]
    subprocess.run(argv, cwd=place, check=True, stdout=2, env=clean_environ({}))


def make(mistake: Mistake, place: Path) -> Told:
    """Make the mistake, and measure when its message comes."""
    with contextlib.ExitStack() as kept:
        if callable(close := getattr(mistake.prepare(place), "close", None)):
            kept.callback(close)
        return _told(mistake, place)


def _told(mistake: Mistake, place: Path) -> Told:
    argv = [sys.executable, "-m", "millrace.cli", *shlex.split(mistake.command)]
    began, first, lines = time.monotonic(), 0.0, list[str]()
    process = subprocess.Popen(
        argv, cwd=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=clean_environ(mistake.env)
    )
    ending = threading.Timer(_LIMIT_S, process.kill)
    ending.start()
    assert process.stdout is not None
    for line in process.stdout:
        if not first and line.startswith((mistake.answer, "Error:", "Usage:")):
            first = time.monotonic() - began
        lines.append(line)
    code = process.wait()
    ending.cancel()
    output = "".join(lines)
    found = re.search(rf"^({mistake.answer}|Error:)", output, re.M)
    return Told(output[found.start() :] if found else "", first or time.monotonic() - began, code, output)


def fault(mistake: Mistake, told: Told) -> str:
    """Return what is wrong with the outcome; empty if nothing is."""
    if "Traceback" in told.output:
        return "a traceback"
    if not told.message:
        return "no message"
    if told.seconds > mistake.limit_s:
        return f"{told.seconds:.0f} s to the message"
    if mistake.answer != "Error:":
        return ""
    if told.code == 0:
        return "exit code 0"
    # A key that is wrong says in one sentence what it must be; where it is is the line behind it.
    is_helped = any(text in told.message for text in ("remedy: ", "\n  at: ", "--help")) or "  [" in told.message
    return "" if is_helped else "no remedy"


def row(mistake: Mistake, told: Told, place: Path) -> str:
    """Return a line of the table: the mistake, and how the message begins."""
    lines = [line.strip().removeprefix("- ") for line in told.message.strip().splitlines()]
    first = _plain(" ".join(lines[:2] if lines[0].endswith(":") else lines[:1]), place)
    first = re.sub(r"^Error: |runs/\S+ failed: ", "", first)
    return f"| {mistake.what} | {told.seconds:.0f} | {_cut(first)} |"


def _plain(text: str, place: Path) -> str:
    """Return the text without paths of this machine, and without characters that end a table cell."""
    text = text.replace(str(place), "DIR").replace(sys.prefix, "VENV").replace(str(ROOT), "REPOSITORY")
    return text.replace("|", "\\|").replace("<", "&lt;")


def _cut(text: str) -> str:
    """Return the text, cut between two words if it is long."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rpartition(' ')[0]} …"


if __name__ == "__main__":
    sys.exit(main())
