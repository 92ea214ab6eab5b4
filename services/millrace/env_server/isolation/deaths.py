"""How a worker process ended: in words that name exit code or signal, and the memory that it had."""

import signal
from dataclasses import dataclass
from enum import Enum

from millrace.processes import sessions

_ASKED = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


class DeathCause(Enum):
    """Who ended a worker."""

    ITSELF = "itself"
    """Its own code: an exit, a crash, a closed socket, or answers that were none."""
    BLOCKED = "blocked"
    """We did: its event loop waited in one call for too long, or did not answer after a rollout's deadline."""
    LIMIT = "limit"
    """We did: the environment took more memory or started more processes than it may."""
    FROZEN = "frozen"
    """We did: its process did not run at all, which somebody outside did to it."""
    OUTSIDE = "outside"
    """Somebody killed it, the kernel for want of memory included."""
    ASKED = "asked"
    """Somebody asked it to end (SIGTERM and the like): that, unlike SIGKILL, is nothing that a want of memory does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a worker."""

    cause: DeathCause
    how: str
    """`exit code 17, peak memory 210 MiB`, for people."""

    @property
    def is_from_outside(self) -> bool:
        """Whether the environment's code may be innocent of it."""
        return self.cause in (DeathCause.FROZEN, DeathCause.OUTSIDE, DeathCause.ASKED)


def describe_death(returncode: int | None, *, killed: tuple[DeathCause, str] | None, peak_bytes: int) -> Death:
    """The end of a process with this return code; `killed` says why we killed it, if we did.

    `peak_bytes` is the most memory that was seen of it; 0 if nothing was.
    """
    memory = f", peak memory {mebibytes(peak_bytes)}" if peak_bytes else ""
    if killed is not None:
        cause, reason = killed
        return Death(cause=cause, how=f"{reason}{memory}")
    cause = DeathCause.ITSELF
    if returncode in _ASKED:
        cause = DeathCause.ASKED
    elif returncode == -signal.SIGKILL:
        cause = DeathCause.OUTSIDE
    return Death(cause=cause, how=f"{describe_exit(returncode)}{memory}")


def describe_exit(returncode: int | None) -> str:
    """`exit code 17` or `killed by SIGKILL`."""
    return sessions.describe_exit(returncode).replace("signal SIG", "killed by SIG")


def mebibytes(count: int) -> str:
    """`210 MiB`."""
    return f"{count / 2**20:.0f} MiB"


class WorkerDiedError(Exception):
    """The worker ended while it played."""

    def __init__(self, message: str, death: Death) -> None:
        super().__init__(message)
        self.death = death


class EnvLoadError(Exception):
    """The environment could not be loaded; `is_from_outside` says that it was not its own doing."""

    def __init__(self, error_type: str, message: str, *, remedy: str = "", is_from_outside: bool = False) -> None:
        super().__init__(message)
        self.error_type = error_type
        self.remedy = remedy
        self.is_from_outside = is_from_outside
