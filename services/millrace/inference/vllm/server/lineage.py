"""Processes that do not outlive their parent: the kernel kills them when it dies, however it dies."""

import multiprocessing

from millrace.processes.sessions import die_with_parent


def register() -> None:
    """Have this process die with its parent; vLLM calls this in its engine cores and workers, as its general plugin.

    A process without a multiprocessing parent, such as the one that serves HTTP, is left alone.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent=parent.pid)
