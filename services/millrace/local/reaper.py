"""Ends what a supervisor leaves behind when it is killed itself (SIGKILL, out of memory).

The supervisor starts this file as a bare interpreter in a session of its own and holds the write end of its standard
input. Lines tell it the process groups (`add 4711 8123456`: leader, and its start time in clock ticks) and an orderly
end (`done`). End of file without `done` means that the supervisor is dead: what it started itself is asked to end, and
when that is gone, or after a grace, all that is left is killed. What those processes started is never asked: its end is
its parent's business, who would otherwise see it die for no reason while it is about to end itself.

Two ways find the processes, since each misses some: the process groups (a child may leave its group), and the marker
`MILLRACE_STACK_ID` in the environment, which descendants inherit (a process may overwrite its own: Valkey does).
PR_SET_PDEATHSIG does not do: it reaches direct children only, and needs a fork hook in a process with gRPC threads.

A reaper that is killed is replaced by the supervisor. If both are killed at once, every service starts one of these for
itself and what it has started (`millrace.telemetry.lifeline`), and the next stack in the directory ends what is still
left (`millrace.local.directory`).

Standard library only, and nothing of Millrace: it runs with `-I -S` so that it starts in 20 ms and costs 8 MB.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

MARKER = "MILLRACE_STACK_ID"
PROCESS_MARKER = "MILLRACE_STACK_PROCESS"
"""Names the one process of the stack that a descendant belongs to."""
TERM_GRACE_S = 3.0
KILL_WAIT_S = 5.0
_POLL_S = 0.05


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since boot; 0 where that is unknown (no /proc, or no such process)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name is in parentheses and may hold spaces and parentheses itself; field 22 counts from the pid.
    return int(stat.rpartition(")")[2].split()[19])


def stack_of(pid: int) -> str:
    """The id of the stack that a process says it belongs to; empty for none, and for a process of somebody else."""
    try:
        environ = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    needle = f"{MARKER}=".encode()
    return next((entry[len(needle) :].decode() for entry in environ.split(b"\0") if entry.startswith(needle)), "")


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return not Path("/proc/self").exists() and _answers(pid)
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def marked(mark: str, *, variable: str = MARKER) -> set[int]:
    """The processes (not this one, no zombies) whose environment says so; empty where there is no /proc."""
    needle = f"{variable}={mark}".encode()
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        # Gone meanwhile, or another user's: not ours in both cases.
        with contextlib.suppress(OSError):
            if needle in (entry / "environ").read_bytes().split(b"\0") and is_running(pid):
                found.add(pid)
    return found


def members(groups: dict[int, int]) -> set[int]:
    """The running processes of these process groups (leader to its start ticks), reused leader pids left out."""
    if not Path("/proc/self").exists():
        return {leader for leader in groups if _answers(leader)}
    own = _leaders(groups)
    found: set[int] = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            rest = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(rest[2]) in own and rest[0] not in "ZX":
                found.add(int(entry.name))
    return found


def send(pids: set[int], number: signal.Signals) -> None:
    """Signal each process; one that is gone meanwhile is fine."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def end_all(
    mark: str,
    groups: dict[int, int],
    *,
    term_grace_s: float,
    kill_wait_s: float = KILL_WAIT_S,
    variable: str = MARKER,
) -> set[int]:
    """TERM the leaders of the groups, then KILL everything that is marked or grouped, once they are gone or too slow.

    Returns what is left after `term_grace_s + kill_wait_s`. The mark of a stack is its id.
    `term_grace_s` 0 kills at once. Processes that appear meanwhile are found too: each round looks again.
    """
    begun = time.monotonic()
    asked: set[int] = set()
    # unregistered wait: stands alone, with nothing imported, when everything else is dead
    while left := marked(mark, variable=variable) | members(groups):
        age_s = time.monotonic() - begun
        if age_s > term_grace_s + kill_wait_s:
            return left
        leaders = left & _leaders(groups)
        if age_s >= term_grace_s or not leaders:
            send(left, signal.SIGKILL)
        else:
            send(leaders - asked, signal.SIGTERM)
            asked |= leaders
        time.sleep(_POLL_S)
    return set()


def main(mark: str, variable: str = MARKER) -> int:
    """Follow the supervisor's lines until `done` or its death, then end what bears the mark in the variable."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a signal to the whole terminal must not end the last one to clean up
    groups: dict[int, int] = {}
    for line in sys.stdin:
        match line.split():
            case ["add", pid, ticks]:
                groups[int(pid)] = int(ticks)
            case ["done"]:
                return 0
    return 1 if end_all(mark, groups, term_grace_s=TERM_GRACE_S, variable=variable) else 0


def _leaders(groups: dict[int, int]) -> set[int]:
    """The leaders whose pid is not somebody else's by now."""
    return {leader for leader, ticks in groups.items() if start_ticks(leader) in (0, ticks)}


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
