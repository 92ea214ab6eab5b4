"""Whether a thread of the trainer or a separate process publishes in the background.

A thread competes with the step for the interpreter's lock, a process only for processors. The cost of a process, its
start and its memory, is worth it for large versions; small ones are published by the thread.
"""

import os
from collections.abc import Mapping
from enum import StrEnum

from millrace.errors import InvalidSpecError, Violation

VARIABLE = "MILLRACE_TRAINER_PUBLISH"
"""auto, thread or process."""
PROCESS_FROM_BYTES = 64 << 20
"""Least size of a rank's share of a version for a process. Measured at this size on two cores: a full version takes
0.6 s of a processor, one of which 3 % changed 0.11 s; the process takes 0.45 s to start, as much as four of these, and
30 MB of memory."""


class Executor(StrEnum):
    """The kinds of executor that publish."""

    AUTO = "auto"
    """A process if a rank's share is large and this is Linux, else a thread."""
    THREAD = "thread"
    PROCESS = "process"

    @classmethod
    def chosen(cls, environ: Mapping[str, str] = os.environ) -> "Executor":
        """Return the executor that MILLRACE_TRAINER_PUBLISH in `environ` names; `auto` if it is not set.

        Raises InvalidSpecError for an unknown one, and for a process where the system does not support it.
        """
        choice = environ.get(VARIABLE) or cls.AUTO
        if choice not in tuple(cls):
            raise _wrong(choice, f"must be one of {', '.join(cls)}")
        if choice == cls.PROCESS and not hasattr(os, "memfd_create"):
            raise _wrong(choice, "needs Linux: a process that publishes shares memory with the trainer")
        return cls(choice)

    def is_process(self, *, share_bytes: int, store_url: str) -> bool:
        """Return whether a separate process publishes this rank's share of a version, which has `share_bytes`.

        It never does without a `store_url` that it can open.
        """
        if not store_url or self is Executor.THREAD:
            return False
        return self is Executor.PROCESS or (share_bytes >= PROCESS_FROM_BYTES and hasattr(os, "memfd_create"))


def _wrong(choice: str, message: str) -> InvalidSpecError:
    return InvalidSpecError([Violation(field=VARIABLE, value=choice, message=message, source="environment")])
