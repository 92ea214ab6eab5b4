"""When a service wrote what: its log on disk, line by line with times."""

import datetime
import re
import time
from collections.abc import Callable
from pathlib import Path

from millrace_testing.chaos.stack import ChaosStack

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) ")
_POLL_S = 0.2


def said_in(log: Path, words: str, *, since: float) -> tuple[float, str] | None:
    """Return when (as `time.time()`) these words were first written after `since`, and the line; None if they
    were not.
    """
    for line in log.read_text(errors="replace").splitlines():
        if words in line and (found := _STAMP.match(line)):
            at = datetime.datetime.fromisoformat(found[1]).timestamp()
            if at >= since:
                return at, line
    return None


def said_at(stack: ChaosStack, service: str, words: str, *, since: float) -> float | None:
    """Return when a service of a stack first wrote these words after `since`; None if it did not."""
    said = said_in(stack.directory / "logs" / f"{service}.log", words, since=since)
    return None if said is None else said[0]


def wait_line(
    log: Path, words: str, *, since: float, timeout_s: float, alive: Callable[[], bool] = lambda: True
) -> str:
    """Wait until a line with these words is written, while `alive` holds, and return it."""
    ends = time.time() + timeout_s
    while (said := said_in(log, words, since=since)) is None:
        newest = log.read_text(errors="replace")[-2000:]
        assert time.time() < ends and alive(), f"{log.name} never said {words!r}:\n{newest}"
        time.sleep(_POLL_S)
    return said[1]
