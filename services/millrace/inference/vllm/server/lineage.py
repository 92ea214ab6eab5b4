"""Processes that do not outlive their parent: the kernel kills them when it dies, however it dies."""

import multiprocessing

from millrace.processes.sessions import die_with_parent


def register() -> None:
    """Register as vLLM's general plugin, which vLLM calls in each of its processes: engine cores and workers die
    with their parent.

    The process that serves HTTP belongs to its starter, and is left alone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent=parent.pid)
