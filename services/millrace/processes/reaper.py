"""Ends the processes of a supervisor that is killed itself (SIGKILL, out of memory).

    python -I reaper.py MARK [VARIABLE]

The supervisor starts this file as a bare interpreter in a session of its own and holds the write end of its standard
input. Lines name the process groups (`add 4711 8123456`: leader, and its start time in clock ticks) and an orderly
end (`done`). End of file without `done` means that the supervisor is dead: what it started itself is asked to end, and
when that is gone, or after a grace, all that is left is killed. What those processes started is never asked: its end is
its parent's business, who would otherwise see it die for no reason while it is about to end itself.

Two ways find the processes, since each misses some: the process groups (a child may leave its group), and the mark in
the environment, which descendants inherit (a process may overwrite its own: Valkey does).
`sessions.die_with_parent` does not do: it reaches direct children only.

A reaper that is killed is replaced by the supervisor. If both are killed at once, every service starts one of these for
itself and what it has started (`lifeline`), and the next stack in the directory ends what is still left
(`millrace.local.directory`).
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # isolated from the environment, so that this is the Millrace that belongs to the file
    sys.path.insert(0, str(Path(__file__).parents[2]))

from millrace.processes.table import STACK_MARK, end_all

TERM_GRACE_S = 3.0


def main(mark: str, variable: str = STACK_MARK) -> int:
    """Read the supervisor's lines until `done`, and return 0; at their end without it, end the stack's processes.

    A line `add PID TICKS` names the leader of a process group and its start ticks. Ended are those groups, and all
    processes with the value `mark` of the environment variable `variable`. Return 1 if some are left.
    """
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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
