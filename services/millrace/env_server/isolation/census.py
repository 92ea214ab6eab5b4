"""What the processes of a worker use: its session and their descendants, see `millrace.processes.table`.

A process that left the session and whose parent ended is not found any more; only another user's limits hold for those.
"""

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from millrace.processes.table import Table

# One look serves every worker for that long, and a look may take a fiftieth of the time at most.
_FRESH_S = 0.25
_SHARE_OF_TIME = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one worker and its children."""

    num_processes: int = 0
    rss_bytes: int = 0
    """Resident memory; pages that processes share count in each."""
    cpu_s: float = 0.0
    """Seconds of CPU; what a child used counts on where its parent waits for it."""
    pids: tuple[int, ...] = ()


class Census:
    """The process table, read again when it is old."""

    def __init__(self) -> None:
        self._until = 0.0
        self._table: Table | None = None

    def usage(self, leader: int, *, is_container: bool = False) -> Usage:
        """What the processes of a session leader use; nothing where there is no /proc.

        At level `container` it and its child are ours (`isolation.namespaces`), and not counted.
        """
        began = time.monotonic()
        if self._table is None or began >= self._until:
            self._table = Table()
            now = time.monotonic()
            self._until = now + max(_FRESH_S, _SHARE_OF_TIME * (now - began))
        pids = self._table.of(leader)
        if is_container:
            ours = {leader, *self._table.children_of(leader)}
            pids = [pid for pid in pids if pid not in ours]
        rss_bytes = sum(self._table.seen[pid].rss_bytes for pid in pids)
        cpu_s = sum(self._table.seen[pid].cpu_s for pid in pids)
        return Usage(num_processes=len(pids), rss_bytes=rss_bytes, cpu_s=cpu_s, pids=tuple(pids))


def proportional_bytes(pids: tuple[int, ...]) -> int | None:
    """Memory of the processes in which shared pages count once; None if the kernel does not tell us."""
    total = 0
    for pid in pids:
        try:
            used = psutil.Process(pid).memory_full_info()
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
        except (psutil.Error, OSError):
            return None
        if not hasattr(used, "pss"):
            return None
        total += used.pss
    return total


def peak_bytes(pid: int) -> int:
    """Most resident memory that the process ever had; 0 if it is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


CENSUS = Census()
"""The one of this process."""
