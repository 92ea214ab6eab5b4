"""Processes that do not outlive their parent: the kernel kills them when it dies, however it dies."""

import ctypes
import multiprocessing
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with(parent_pid: int) -> None:
    """From now on SIGKILL of the parent, too, ends this process; at once if the parent is dead by now.

    The kernel counts the parent's thread that started this process, which therefore has to be its main thread.
    """
    if sys.platform != "linux":
        return  # elsewhere the launcher's own clean-up has to do
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        os._exit(128 + signal.SIGKILL)  # nobody is left to hear why


def register() -> None:
    """vLLM's general plugin, which it calls in each of its processes: engine cores and workers die with who made them.

    The process that serves HTTP belongs to whoever started it, and is left alone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with(parent.pid)
