"""The process table: which processes run, which belong together, and how to end them.

psutil reads it, with three exceptions: `start_ticks`, because its start times move with the machine's clock; the
environment, of which it reads only what is before the first empty entry; and `Table`, a pass over all processes on
an event loop, for which it reads two to three files per process instead of one.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil

STACK_MARK = "MILLRACE_STACK_ID"
"""Variable by which all processes of a stack are found: descendants inherit it."""
PROCESS_MARK = "MILLRACE_STACK_PROCESS"
"""Names the one process of the stack that a descendant belongs to."""
KILL_WAIT_S = 5.0
_POLL_S = 0.05
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# Processes that start others faster than these can be ended meet only the kernel's limit.
_MAX_ROUNDS = 100
_ROUND_S = 0.002


def is_running(pid: int) -> bool:
    """Return whether the process exists and is no zombie."""
    return _status(pid) not in (None, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)


def is_stopped(pid: int) -> bool:
    """Return whether the kernel has stopped the process (SIGSTOP, a debugger)."""
    return _status(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def _status(pid: int) -> str | None:
    """Return psutil's status of a process, such as "sleeping"; None if there is no such process."""
    try:
        return psutil.Process(pid).status()
    except psutil.Error:
        return None


def start_ticks(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: with the pid it identifies a process.

    0 where that is unknown (no /proc, or no such process).
    """
    try:
        return int(_stat(pid)[19])
    except OSError:
        return 0


def mark_of(pid: int, variable: str) -> str:
    """Return the value of a variable in the environment that a process was started with.

    Empty if it has none, or the process is gone or another user's.
    """
    needle = f"{variable}=".encode()
    return next((entry[len(needle) :].decode() for entry in _environ(pid) if entry.startswith(needle)), "")


def marked(mark: str, *, variable: str = STACK_MARK) -> set[int]:
    """Return the running processes, except this one, with `variable=mark` in their environment; empty without /proc."""
    needle = f"{variable}={mark}".encode()
    return {pid for pid in psutil.pids() if pid != os.getpid() and needle in _environ(pid) and is_running(pid)}


def members(groups: dict[int, int]) -> set[int]:
    """Return the running processes of these process groups; `groups` has the start ticks of each leader by its pid.

    A leader's pid that another process has by now is left out, with its group.
    """
    own = _leaders(groups)
    found: set[int] = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # it ended meanwhile
            if os.getpgid(pid) in own and is_running(pid):
                found.add(pid)
    return found


def send(pids: set[int], number: signal.Signals) -> None:
    """Send a signal to each process; ignore those that are gone or another user's."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(
    mark: str,
    groups: dict[int, int],
    *,
    term_grace_s: float,
    kill_wait_s: float = KILL_WAIT_S,
    variable: str = STACK_MARK,
) -> set[int]:
    """Send TERM to the leaders of the groups, then KILL to all marked or grouped processes; return those that are left.

    `groups` has the start ticks of each leader by its pid; `mark` is the value of the environment variable `variable`:
    a stack's is its id. KILL is sent once the leaders are gone, or after `term_grace_s` (0: at once). The call blocks
    until no process is left, or until `term_grace_s + kill_wait_s`. New processes are found, too, in each round.
    """
    begun = time.monotonic()
    asked: set[int] = set()
    # unregistered wait: is alone, with nothing imported, when everything else is dead
    while left := marked(mark, variable=variable) | members(groups):
        age_s = time.monotonic() - begun
        if age_s > term_grace_s + kill_wait_s:
            return left
        # Leaders alone get TERM: what they have started is theirs to end (see `reaper`).
        leaders = left & _leaders(groups)
        if age_s >= term_grace_s or not leaders:
            send(left, signal.SIGKILL)
        else:
            send(leaders - asked, signal.SIGTERM)
            asked |= leaders
        time.sleep(_POLL_S)
    return set()


class Seen(NamedTuple):
    """A process that lives."""

    parent: int
    session: int
    started: int
    rss_bytes: int
    cpu_s: float
    """Seconds of CPU that it and the children that it has waited for have used."""
    is_ready: bool
    """Whether its main thread runs, or would if a processor were free."""


class Table:
    """All processes at one moment; empty where there is no /proc."""

    def __init__(self) -> None:
        """Read the process table once; zombies are left out."""
        self.seen: dict[int, Seen] = {}
        self._children: dict[int, list[int]] = defaultdict(list)
        self._sessions: dict[int, list[int]] = defaultdict(list)
        for pid in psutil.pids():
            with contextlib.suppress(OSError):  # it ended meanwhile
                # proc(5), counted after the name: 0 is the state, 1 the parent, 3 the session, 11 to 14 utime, stime,
                # cutime and cstime, 19 the start time, 21 the resident pages.
                fields = _stat(pid)
                if fields[0] not in (b"Z", b"X"):
                    parent, session = int(fields[1]), int(fields[3])
                    rss_bytes = int(fields[21]) * _PAGE_BYTES
                    # Its own time in user and kernel mode, then that of the children that it has waited for.
                    cpu_s = sum(map(int, fields[11:15])) / _TICKS_PER_S
                    self.seen[pid] = Seen(parent, session, int(fields[19]), rss_bytes, cpu_s, fields[0] == b"R")
                    self._children[parent].append(pid)
                    self._sessions[session].append(pid)

    def children_of(self, pid: int) -> list[int]:
        """Return the direct children of a process."""
        return self._children.get(pid, [])

    def of(self, leader: int) -> list[int]:
        """Return the pids of the living processes of the session of `leader`, and of all their descendants, sorted.

        A process that left the session and whose parent ended is not found.
        """
        found: set[int] = set()
        left = [*self._sessions.get(leader, ()), *([leader] if leader in self.seen else ())]
        while left:
            pid = left.pop()
            if pid not in found:
                found.add(pid)
                left += self._children.get(pid, ())
        return sorted(found)


def kill_session(leader: int) -> None:
    """Send SIGKILL to the processes of the session of `leader` and their descendants, until none is left or for 0.2 s.

    It blocks. They are stopped first, so that none starts others while it is killed: a process that left the session is
    only found by its parent.
    """
    known: dict[int, int] = {}
    # unregistered wait: between looks at processes that were just ended, for a fifth of a second in all
    for number in range(_MAX_ROUNDS):
        table = Table()
        # One that left the session and whose parent is dead by now is not found by descent any more: it is remembered.
        again = [pid for pid, started in known.items() if pid in table.seen and table.seen[pid].started == started]
        found = {*table.of(leader), *again}
        if not found:
            return
        news = {pid for pid in found if known.get(pid) != table.seen[pid].started}
        known |= {pid: table.seen[pid].started for pid in found}
        # In half of the rounds new ones are only stopped; after that all are killed, whatever is started meanwhile.
        if news and number < _MAX_ROUNDS // 2:
            send(news, signal.SIGSTOP)
            continue
        send(found, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _leaders(groups: dict[int, int]) -> set[int]:
    """Return the pids of `groups` whose process is the one with these start ticks, or is gone: not reused for
    another.
    """
    # 0: the leader is gone. The kernel gives its pid to no other process while the group has members.
    return {leader for leader, ticks in groups.items() if start_ticks(leader) in (0, ticks)}


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat after the command's name: the first is the state, the second the parent.

    The name is in parentheses and may itself contain parentheses and spaces. Raises OSError if there is no such
    process.
    """
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()


def _environ(pid: int) -> list[bytes]:
    """Return the environment ("NAME=value" each) that a process was started with, as far as it has not written over it.

    Empty if the process is gone or another user's.
    """
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it ended meanwhile, or is another user's
        return []
