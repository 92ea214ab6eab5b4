"""What the processes of a worker use, and the end of all of them: read from /proc, which costs milliseconds.

A worker is the leader of a session. Its processes are those of the session and their descendants, which may have left
it. Whoever left the session and whose parent ended is not found any more; only another user's limits hold for those.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# One look serves every worker for that long, and a look may take a fiftieth of the time at most.
_FRESH_S = 0.25
_SHARE_OF_TIME = 50.0
# Who starts processes faster than they can be ended is ended by the kernel's limit, if by anything.
_MAX_ROUNDS = 100
_ROUND_S = 0.002


@dataclass(frozen=True, slots=True)
class _Seen:
    parent: int
    session: int
    started: int
    rss_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Of one worker and its children."""

    num_processes: int = 0
    rss_bytes: int = 0
    """Resident memory; pages that processes share count in each."""
    pids: tuple[int, ...] = ()


class _Table:
    """The process table at one moment."""

    def __init__(self) -> None:
        self.seen = dict(_read_all())
        self._children: dict[int, list[int]] = defaultdict(list)
        self._sessions: dict[int, list[int]] = defaultdict(list)
        for pid, seen in self.seen.items():
            self._children[seen.parent].append(pid)
            self._sessions[seen.session].append(pid)

    def children_of(self, pid: int) -> list[int]:
        """Its own, not theirs."""
        return self._children.get(pid, [])

    def of(self, leader: int) -> list[int]:
        """The living processes of a worker."""
        found: set[int] = set()
        left = [*self._sessions.get(leader, ()), *([leader] if leader in self.seen else ())]
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += self._children.get(pid, ())
        return sorted(found)


class Census:
    """The process table, read again when it is old."""

    def __init__(self) -> None:
        self._until = 0.0
        self._table: _Table | None = None

    def usage(self, leader: int, *, is_container: bool = False) -> Usage:
        """What the processes of a session leader use; nothing where there is no /proc.

        At level `container` it and its child are ours (`isolation.namespaces`), and not counted.
        """
        began = time.monotonic()
        if self._table is None or began >= self._until:
            self._table = _Table()
            now = time.monotonic()
            self._until = now + max(_FRESH_S, _SHARE_OF_TIME * (now - began))
        pids = self._table.of(leader)
        if is_container:
            ours = {leader, *self._table.children_of(leader)}
            pids = [pid for pid in pids if pid not in ours]
        rss_bytes = sum(self._table.seen[pid].rss_bytes for pid in pids)
        return Usage(num_processes=len(pids), rss_bytes=rss_bytes, pids=tuple(pids))


def kill_all(leader: int) -> None:
    """SIGKILL every process of the worker, those that it starts meanwhile included (blocking, milliseconds)."""
    ended: dict[int, int] = {}
    # unregistered wait: between looks at processes that were just ended, for a fifth of a second in all
    for _ in range(_MAX_ROUNDS):
        table = _Table()
        again = [pid for pid, started in ended.items() if pid in table.seen and table.seen[pid].started == started]
        found = {*table.of(leader), *again}
        if not found:
            return
        for pid in found:
            ended[pid] = table.seen[pid].started
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _read_all() -> list[tuple[int, _Seen]]:
    """Every process that lives; zombies have ended."""
    found: list[tuple[int, _Seen]] = []
    try:
        names = os.listdir(_PROC)
    except OSError:
        return found
    for name in names:
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it ended meanwhile
                fields = Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    rss_bytes = int(fields[21]) * _PAGE_BYTES
                    found.append((int(name), _Seen(int(fields[1]), int(fields[3]), int(fields[19]), rss_bytes)))
    return found


def proportional_bytes(pids: tuple[int, ...]) -> int | None:
    """Memory of the processes in which shared pages count once; None if the kernel does not tell us."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        except OSError:
            return None
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
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
