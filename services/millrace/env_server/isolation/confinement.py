"""How an environment's worker is kept from what is around it: `MILLRACE_ENV_ISOLATION`.

Every level: a session of its own, a private working directory that is deleted with it, no open files but its two
sockets, no core dumps, and no variables of ours (`inherited`).

| level | and also |
|---|---|
| none | nothing |
| process | limits of memory, files and processes; no new privileges, and few of root's; Landlock around it |
| user | another user of the system, with a home of its own, so that our files and processes are not its own |
| container | namespaces of its own: no process, no file, no network but what it is given (`isolation.namespaces`) |

A worker puts it on by itself, before it reads anything of the environment and while it has one thread.
"""

import contextlib
import os
import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from millrace.env_server.isolation import capabilities, landlock, namespaces
from millrace.env_server.isolation.limits import WorkerLimits
from millrace.env_server.isolation.system import prctl
from millrace.env_server.isolation.visible import VisibleFiles
from millrace.processes.parent_death import die_with_parent

_PR_SET_DUMPABLE, _PR_SET_NO_NEW_PRIVS = 4, 38
# Processes and threads of the user of all workers, per process that one worker may have.
_THREADS_PER_PROCESS = 16


class Isolation(StrEnum):
    """Values of `MILLRACE_ENV_ISOLATION`."""

    NONE = "none"
    PROCESS = "process"
    USER = "user"
    CONTAINER = "container"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Of every worker of an env-server."""

    isolation: Isolation = Isolation.PROCESS
    limits: WorkerLimits = field(default_factory=WorkerLimits)
    user: tuple[int, int] | None = None
    """uid and gid of level `user`, and of `container` where the env-server is root."""
    connect_ports: tuple[int, ...] = ()
    """TCP ports that may be connected to; empty: all."""
    visible: VisibleFiles = field(default_factory=VisibleFiles)
    """What is seen at level `container`."""

    @property
    def is_container(self) -> bool:
        """Whether workers have namespaces of their own."""
        return self.isolation is Isolation.CONTAINER

    def to_json(self) -> dict[str, Any]:
        """For the worker's process."""
        return {
            "isolation": self.isolation.value,
            "limits": self.limits.to_json(),
            "user": self.user,
            "connect_ports": list(self.connect_ports),
            "visible": self.visible.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` made."""
        user = values["user"]
        return cls(
            isolation=Isolation(values["isolation"]),
            limits=WorkerLimits.from_json(values["limits"]),
            user=None if user is None else (int(user[0]), int(user[1])),
            connect_ports=tuple(int(port) for port in values["connect_ports"]),
            visible=VisibleFiles.from_json(values["visible"]),
        )

    def enter(self, directory: str, *, files: Sequence[int] = (), control: int | None = None) -> None:
        """Put it on this process; it must have one thread. Raises OSError if the kernel refuses.

        At level `container` other processes stay behind (`namespaces.enter`): `files` are the worker's alone, `control`
        is theirs.
        """
        if control is not None:
            namespaces.enter(self.visible, directory, control=control, keep=files)
            directory = namespaces.DIRECTORY
        os.chdir(directory)
        os.umask(0o077)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.isolation is not Isolation.NONE:
            self.limits.apply()
        if self.user is not None or self.is_container:
            self._limit_processes()
        if self.user is not None:
            self._become(*self.user)
        die_with_parent()  # even while its code blocks; after the change of user, which forgets it
        if self.isolation is not Isolation.NONE and sys.platform == "linux":
            capabilities.drop(keep=frozenset() if self.is_container else capabilities.KEPT)
            prctl(_PR_SET_NO_NEW_PRIVS, 1)
            with _unless_needed(is_needed=bool(self.connect_ports)):
                landlock.restrict(connect_ports=self.connect_ports or None)

    def _limit_processes(self) -> None:
        """The kernel counts those of the user, or of the user namespace."""
        most = self.limits.max_processes * _THREADS_PER_PROCESS
        if most:
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    @staticmethod
    def _become(uid: int, gid: int) -> None:
        """Another user, for good."""
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        prctl(_PR_SET_DUMPABLE, 1)  # else its own files in /proc would be root's


@contextlib.contextmanager
def _unless_needed(*, is_needed: bool) -> Any:
    """Kernels may be built without Landlock, or forbid it in containers: only a promise that was asked for fails."""
    try:
        yield
    except OSError:
        if is_needed:
            raise
