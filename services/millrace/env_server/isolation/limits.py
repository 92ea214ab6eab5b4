"""What a worker and its children may use: bounds against accidents and runaway code."""

import resource
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.env_server.isolation.census import Usage, proportional_bytes
from millrace.env_server.isolation.deaths import mebibytes

MEMORY_VARIABLE = "MILLRACE_ENV_MEMORY_BYTES"
PROCESSES_VARIABLE = "MILLRACE_ENV_MAX_PROCESSES"
# What one process may map above what all may hold: thread stacks and reserves of allocators are mapped and never used.
# (pyarrow's allocator alone maps 1 GiB.) A single huge allocation fails there; what grows slowly is seen and ended.
_UNUSED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """Of one worker; 0 is no limit."""

    memory_bytes: int = 4 << 30
    """Resident memory of the worker and its children."""
    max_processes: int = 256
    """Processes: the worker and its descendants."""
    max_files: int = 4096
    """Open files of each process."""
    max_file_bytes: int = 8 << 30
    """Size of each file that is written."""

    def exceeded_by(self, usage: Usage) -> str:
        """How the usage is more than it may be, or ""."""
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
        """Set those that the kernel keeps, in this process and for its children."""
        _set(resource.RLIMIT_CORE, 0)
        if self.memory_bytes:
            _set(resource.RLIMIT_DATA, self.memory_bytes + _UNUSED_BYTES)
        if self.max_files:
            _set(resource.RLIMIT_NOFILE, self.max_files)
        if self.max_file_bytes:
            _set(resource.RLIMIT_FSIZE, self.max_file_bytes)

    def to_json(self) -> dict[str, int]:
        """For the worker's process."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "WorkerLimits":
        """Read what `to_json` made."""
        return cls(**values)


def _set(kind: int, value: int) -> None:
    """As low as wanted, and never above what this process itself has."""
    _, hard = resource.getrlimit(kind)
    bounded = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bounded, bounded))


NO_LIMITS = WorkerLimits(memory_bytes=0, max_processes=0, max_files=0, max_file_bytes=0)
