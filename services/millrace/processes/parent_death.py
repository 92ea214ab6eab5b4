"""Has the kernel signal this process when its parent dies, however that dies (Linux; elsewhere nothing is asked for).

As a program it becomes another one that is asked to end (SIGTERM) when the process that started this one is gone:

    python -I -S parent_death.py PARENT_PID PROGRAM ARGUMENTS...

That is for programs that are not ours and know no lifeline, such as Redis, started from a process with the threads of
gRPC, in which no fork hook may run; what is asked for in between outlives the exec. By "parent" the kernel means the
thread that started the process: it has to live as long as that.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Loaded here: between fork and exec only async-signal-safe work is allowed.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent(number: signal.Signals = signal.SIGKILL, *, parent: int | None = None) -> None:
    """Ask for it; with `parent`, a process id, end at once if that is dead already. Also for `preexec_fn`."""
    if _LIBC is None:
        return
    if _LIBC.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if parent is not None and os.getppid() != parent:
        os._exit(128 + number)  # nobody is left to hear why


def main(parent: str, program: str, *arguments: str) -> None:
    """Does not return."""
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # it was gone before the kernel was asked
        sys.exit("the process that started this one has ended")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
