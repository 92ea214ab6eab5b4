"""When a service wrote what: its log on disk, line by line with times."""

import datetime
import re
import time
from collections.abc import Callable

from chaos_stack import ChaosStack

_STAMP = re.compile(r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z) ")
_POLL_S = 0.2


def said_at(stack: ChaosStack, service: str, words: str, *, since: float) -> float | None:
    """When (as `time.time()`) a service first wrote these words after `since`; None if it did not."""
    for line in (stack.directory / "logs" / f"{service}.log").read_text(errors="replace").splitlines():
        if words in line and (found := _STAMP.match(line)):
            at = datetime.datetime.fromisoformat(found[1]).timestamp()
            if at >= since:
                return at
    return None


def wait_said(
    stack: ChaosStack,
    service: str,
    words: str,
    *,
    since: float,
    timeout_s: float,
    alive: Callable[[], bool] = lambda: True,
) -> float:
    """Wait until a service writes these words, while `alive` holds; when it did."""
    ends = time.time() + timeout_s
    while (at := said_at(stack, service, words, since=since)) is None:
        assert time.time() < ends and alive(), f"{service} never wrote {words!r}:\n{stack.log_of(service)}"
        time.sleep(_POLL_S)
    return at
