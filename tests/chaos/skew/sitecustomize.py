"""On the path of a process, shifts its wall clock by the seconds that CLOCK_SKEW names for its module.

grpc keeps the true time: it hands deadlines by the wall clock to its own C code, which no patch of Python reaches. On a
machine whose clock is wrong both are wrong alike, and over the wire a deadline is a duration.
"""

import json
import os
import sys
import time

_SECONDS = next(
    (seconds for module, seconds in json.loads(os.environ["CLOCK_SKEW"]).items() if module in sys.orig_argv), 0
)
_time, _time_ns = time.time, time.time_ns


def _shift() -> int:
    return 0 if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc.") else _SECONDS


if _SECONDS:
    time.time = lambda: _time() + _shift()
    time.time_ns = lambda: _time_ns() + _shift() * 1_000_000_000
