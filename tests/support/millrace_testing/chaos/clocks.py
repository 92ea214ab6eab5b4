"""Wall clocks that jump while processes run, by libfaketime (Debian: faketime). Monotonic clocks go on as they are."""

import os
import time
from collections.abc import Iterable
from glob import glob
from pathlib import Path

from millrace.local import stack
from millrace_testing.chaos.stack import SERVICES

_LIBRARIES = ("/usr/lib/*/faketime/libfaketimeMT.so.1", "/usr/lib64/faketime/libfaketimeMT.so.1")
_READ_AGAIN_S = 1

EVERYBODY = (*SERVICES, "redis")


def library() -> str | None:
    """Return the path of libfaketime for processes with threads; None where it is not installed."""
    return next((found for pattern in _LIBRARIES for found in glob(pattern)), None)


class Clocks:
    """The offsets of a stack's clocks, one file each; give `environ` to every process of the stack."""

    def __init__(self, directory: Path) -> None:
        """Start with correct clocks; raise FileNotFoundError without libfaketime."""
        found = library()
        if found is None:
            raise FileNotFoundError("libfaketime: apt-get install faketime")
        self._directory = directory
        directory.mkdir(parents=True)
        self.set(EVERYBODY, 0)
        self.environ = {
            "LD_PRELOAD": found,
            "CLOCKS": str(directory),
            "FAKETIME_TIMESTAMP_FILE": str(directory / "redis"),
            "FAKETIME_CACHE_DURATION": str(_READ_AGAIN_S),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "NO_FAKE_STAT": "1",  # files carry the times of the kernel, which nobody can change
            stack.VARIABLE: "0",  # the file is chosen when a program starts
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).with_name("clock")), *_python_path()]),
        }

    def set(self, names: Iterable[str], offset_s: int) -> None:
        """Put these clocks ahead of the true time, or behind it; seen within a second."""
        for name in names:
            fresh = self._directory / f"{name}.new"
            fresh.write_text(f"{offset_s:+d}\n")
            fresh.rename(self._directory / name)

    def seen(self, name: str) -> float:
        """Return by how many seconds the clock of a service is ahead of the true time, by its own word."""
        return float((self._directory / f"{name}.seen").read_text()) - time.time()


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
