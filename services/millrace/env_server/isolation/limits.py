"""Limits of a worker and its children, as bounds against accidents and runaway code; and how workers end."""

import contextlib
import resource
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil

from millrace.processes import sessions
from millrace.processes.table import Table

MEMORY_VARIABLE = "MILLRACE_ENV_MEMORY_BYTES"
PROCESSES_VARIABLE = "MILLRACE_ENV_MAX_PROCESSES"
# What one process may map above what all may hold: thread stacks and reserves of allocators are mapped and never used.
# (pyarrow's allocator alone maps 1 GiB.) A single huge allocation fails there; slow growth is found by `exceeded_by`.
_UNUSED_BYTES = 2 << 30


# What the processes of a worker use: its session and their descendants, see `millrace.processes.table`.
#
# A process that left the session and whose parent ended is not found any more; only another user's limits hold for
# those.

# One look serves every worker for that long, and a look may take a fiftieth of the time at most.
_FRESH_S = 0.25
_SHARE_OF_TIME = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Resources that one worker and its children use."""

    num_processes: int = 0
    rss_bytes: int = 0
    """Resident memory; pages that processes share count in each."""
    cpu_s: float = 0.0
    """Seconds of CPU; what a child used counts on where its parent waits for it."""
    is_ready: bool = False
    """Whether one of them runs, or would if a processor were free."""
    pids: tuple[int, ...] = ()


class Census:
    """Counts resources in the process table, which is read again when it is old."""

    def __init__(self) -> None:
        self._until = 0.0
        self._table: Table | None = None

    def usage(self, leader: int, *, is_container: bool = False) -> Usage:
        """Return the resources used by the processes of the session whose leader has the pid `leader`.

        The numbers are of a table of processes up to a moment old; without /proc all are 0. At level `container`
        (`is_container`) the leader and its child are ours (`isolation.namespaces`), and not counted.
        """
        began = time.monotonic()
        if self._table is None or began >= self._until:
            self._table = Table()
            now = time.monotonic()
            # A table that takes long to read is kept longer: a look may take a fiftieth of the time at most.
            self._until = now + max(_FRESH_S, _SHARE_OF_TIME * (now - began))
        pids = self._table.of(leader)
        if is_container:
            ours = {leader, *self._table.children_of(leader)}
            pids = [pid for pid in pids if pid not in ours]
        seen = [self._table.seen[pid] for pid in pids]
        return Usage(
            num_processes=len(pids),
            rss_bytes=sum(each.rss_bytes for each in seen),
            cpu_s=sum(each.cpu_s for each in seen),
            is_ready=any(each.is_ready for each in seen),
            pids=tuple(pids),
        )


def proportional_bytes(pids: tuple[int, ...]) -> int | None:
    """Return the memory that the processes hold in all, with shared pages counted once; ended ones count as 0.

    None if the kernel does not report it for one of them.
    """
    total = 0
    for pid in pids:
        try:
            used = psutil.Process(pid).memory_full_info()
        except psutil.NoSuchProcess:  # it ended meanwhile
            continue
        except (psutil.Error, OSError):
            return None
        if not hasattr(used, "pss"):
            return None
        total += used.pss
    return total


def peak_bytes(pid: int) -> int:
    """Return the peak resident memory of the process so far; 0 if it is unknown."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


CENSUS = Census()
"""The census of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Limits of one worker; 0 is no limit."""

    memory_bytes: int = 4 << 30
    """Resident memory of the worker and its children."""
    max_processes: int = 256
    """Processes: the worker and its descendants."""
    max_files: int = 4096
    """Open files of each process."""
    max_file_bytes: int = 8 << 30
    """Size of each file that is written."""

    def exceeded_by(self, usage: Usage) -> str:
        """Return a sentence about the limit of processes or of memory that a worker exceeds; "" if it exceeds none.

        Memory over the limit is counted once more, without counting shared pages twice.
        """
        if self.max_processes and usage.num_processes > self.max_processes:
            return (
                f"ended by its limit of processes: it had {usage.num_processes} and {PROCESSES_VARIABLE} "
                f"is {self.max_processes}"
            )
        if not self.memory_bytes or usage.rss_bytes <= self.memory_bytes:
            return ""
        held = proportional_bytes(usage.pids)  # children share pages with it, which count once
        held = usage.rss_bytes if held is None else held
        if held <= self.memory_bytes:
            return ""
        return (
            f"ended by its memory limit: it held {mebibytes(held)} and {MEMORY_VARIABLE} is "
            f"{mebibytes(self.memory_bytes)}"
        )

    def apply(self) -> None:
        """Set the limits that the kernel enforces for each process (memory, files), on this process and its children.

        Core dumps are turned off as well. Memory and processes of the whole worker are checked by `exceeded_by`.
        """
        _set(resource.RLIMIT_CORE, 0)
        if self.memory_bytes:
            # RLIMIT_DATA bounds private writable mappings (Linux 4.7). RLIMIT_AS would also count mapped files.
            _set(resource.RLIMIT_DATA, self.memory_bytes + _UNUSED_BYTES)
        if self.max_files:
            _set(resource.RLIMIT_NOFILE, self.max_files)
        if self.max_file_bytes:
            _set(resource.RLIMIT_FSIZE, self.max_file_bytes)

    def to_json(self) -> dict[str, int]:
        """Return the limits as plain data, which the worker's process reads with `from_json`."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "WorkerLimits":
        """Read limits from what `to_json` returned."""
        return cls(**values)


def _set(kind: int, value: int) -> None:
    """Set the soft and hard resource limit `kind` (an RLIMIT constant) of this process to `value`.

    If the present hard limit is lower, it is kept.
    """
    _, hard = resource.getrlimit(kind)
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bounded, bounded))


NO_LIMITS = WorkerLimits(memory_bytes=0, max_processes=0, max_files=0, max_file_bytes=0)


# How a worker process ended: in words that name exit code or signal, and the memory that it had.

_ASKED = frozenset({-signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})


class DeathCause(Enum):
    """Who ended a worker."""

    ITSELF = "itself"
    """Its own code: an exit, a crash, a closed socket, or answers that could not be read."""
    BLOCKED = "blocked"
    """We killed it: its event loop waited in one call for too long, or did not answer after a rollout's deadline."""
    LIMIT = "limit"
    """We killed it: the environment took more memory or started more processes than it may."""
    FROZEN = "frozen"
    """We killed it: its process did not run at all, because somebody outside had stopped it."""
    OUTSIDE = "outside"
    """Somebody else killed it; that may be the kernel for want of memory."""
    ASKED = "asked"
    """Somebody else asked it to end (SIGTERM and the like), which the kernel does not do for want of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of a worker."""

    cause: DeathCause
    how: str
    """A description such as `exit code 17, peak memory 210 MiB`."""

    @property
    def is_from_outside(self) -> bool:
        """Return whether something outside the environment's code may have ended the worker."""
        return self.cause in (DeathCause.FROZEN, DeathCause.OUTSIDE, DeathCause.ASKED)


def describe_death(returncode: int | None, *, killed: tuple[DeathCause, str] | None, peak_bytes: int) -> Death:
    """Return cause and description of the end of a worker process with this return code.

    `killed` has the cause and reason if this env-server killed it. `peak_bytes` is the most memory that it was seen to
    have; 0 if none was seen.
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
    """Return a process's return code as text, as in `exit code 17` or `killed by SIGKILL`."""
    return sessions.describe_exit(returncode).replace("signal SIG", "killed by SIG")


def mebibytes(count: int) -> str:
    """Format bytes, as in `210 MiB`."""
    return f"{count / 2**20:.0f} MiB"


class WorkerDiedError(Exception):
    """The worker ended while it played."""

    def __init__(self, message: str, death: Death) -> None:
        """Make the error with how the worker ended, `death`."""
        super().__init__(message)
        self.death = death


class EnvLoadError(Exception):
    """The environment could not be loaded; `is_from_outside` is true if its own code is not the cause."""

    def __init__(self, error_type: str, message: str, *, remedy: str = "", is_from_outside: bool = False) -> None:
        """Make the error with its type for users; `is_from_outside` is whether the environment's own code is not
        the cause.
        """
        super().__init__(message)
        self.error_type = error_type
        self.remedy = remedy
        self.is_from_outside = is_from_outside
