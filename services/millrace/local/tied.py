"""Becomes another program that is asked to end (SIGTERM) when the process that started this one is gone.

    python -I -S tied.py PARENT_PID PROGRAM ARGUMENTS...

For programs that are not ours and know no lifeline: Redis. A fork hook that asks the kernel for this (PR_SET_PDEATHSIG)
would run in a process with the threads of gRPC; here it is asked for in between, and outlives the exec. By "parent" the
kernel means a thread, that of the supervisor's event loop. Elsewhere than on Linux nothing is asked for.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: str, program: str, *arguments: str) -> None:
    """Does not return."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != int(parent):  # it was gone before the kernel was asked
        sys.exit("the process that started this one has ended")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
