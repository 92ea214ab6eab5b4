"""On the path of a process under libfaketime: which clock it has, and sleeps that libfaketime 0.9 cannot break.

Each service reads its offset from a file of its own in `CLOCKS`, and what it starts does likewise; everything else, as
Redis, from the one that FAKETIME_TIMESTAMP_FILE names. `time.sleep` waits for an absolute moment of the monotonic
clock, from which libfaketime subtracts the wall clock's offset although it was told to leave that clock alone.
"""

import os
import select
import sys
import threading
import time
from pathlib import Path

_ROOMS = {"millrace.orchestrator": "orchestrator", "millrace.env_server": "env-server"}
_ROOMS["millrace.local"] = "orchestrator"  # the fork server's children have its clock: set all alike
_ROOMS |= {"millrace.inference": "inference", "millrace.trainer": "trainer"}


def _sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    ends = time.monotonic() + seconds
    while (left := ends - time.monotonic()) > 0:
        select.select([], [], [], left)


def _tell(path: Path) -> None:
    """Write continuously what this process takes for the time, for the test to see."""
    while True:
        fresh = path.with_suffix(f".{os.getpid()}")
        fresh.write_text(f"{time.time()}")
        fresh.rename(path)
        _sleep(0.25)


if "CLOCKS" in os.environ:
    time.sleep = _sleep
    for word in sys.orig_argv:
        if name := _ROOMS.get(word.rpartition(".")[0]):
            clock = Path(os.environ["CLOCKS"], name)
            os.putenv("FAKETIME_TIMESTAMP_FILE", str(clock))
            if word.endswith(".main"):
                threading.Thread(target=_tell, args=[clock.with_suffix(".seen")], name="clock", daemon=True).start()
