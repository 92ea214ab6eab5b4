"""Who does the work of publishing beside the training: a thread of the trainer, or a process of its own.

A thread takes the interpreter's lock from the step, a process no more than its share of the machine. What a process
costs, its start and its memory, pays for itself where versions are large; small ones stay on the thread.
"""

import os
from collections.abc import Mapping
from enum import StrEnum

from millrace.errors import InvalidSpecError, Violation

VARIABLE = "MILLRACE_TRAINER_PUBLISH"
"""auto, thread or process."""
PROCESS_FROM_BYTES = 64 << 20
"""Of a rank's share of a version. Measured at this size on two cores: a version in full takes 0.6 s of a processor, one
of which 3 % changed 0.11 s; the process takes 0.45 s to start, as much as four of these, and has 30 MB of its own."""


class Executor(StrEnum):
    """Who publishes."""

    AUTO = "auto"
    """A process where a rank's share is large and this is Linux, else a thread."""
    THREAD = "thread"
    PROCESS = "process"

    @classmethod
    def chosen(cls, environ: Mapping[str, str] = os.environ) -> "Executor":
        """Return the executor that MILLRACE_TRAINER_PUBLISH names; raise InvalidSpecError if unknown or
        unsupported here.
        """
        choice = environ.get(VARIABLE) or cls.AUTO
        if choice not in tuple(cls):
            raise _wrong(choice, f"must be one of {', '.join(cls)}")
        if choice == cls.PROCESS and not hasattr(os, "memfd_create"):
            raise _wrong(choice, "needs Linux: a process that publishes shares memory with the trainer")
        return cls(choice)

    def is_process(self, *, share_bytes: int, store_url: str) -> bool:
        """Return whether a separate process publishes a share of that size to the store at this URL."""
        if not store_url or self is Executor.THREAD:
            return False
        return self is Executor.PROCESS or (share_bytes >= PROCESS_FROM_BYTES and hasattr(os, "memfd_create"))


def _wrong(choice: str, message: str) -> InvalidSpecError:
    return InvalidSpecError([Violation(field=VARIABLE, value=choice, message=message, source="environment")])
