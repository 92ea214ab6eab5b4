"""How an environment's worker is confined, by level: `MILLRACE_ENV_ISOLATION`.

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
import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from millrace.decoding import decode_object
from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation import namespaces as landlock
from millrace.env_server.isolation import namespaces as system
from millrace.env_server.isolation.limits import WorkerLimits
from millrace.env_server.isolation.namespaces import VisibleFiles, prctl
from millrace.processes.sessions import die_with_parent
from millrace.storage.clean_up import TemporaryDirectory

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
    """How every worker of an env-server is confined."""

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
        """Return whether the isolation level is `container`, at which workers have namespaces of their own."""
        return self.isolation is Isolation.CONTAINER

    def to_json(self) -> dict[str, Any]:
        """Return the confinement as plain data, which the worker's process reads with `from_json`."""
        return {
            "isolation": self.isolation.value,
            "limits": self.limits.to_json(),
            "user": self.user,
            "connect_ports": list(self.connect_ports),
            "visible": self.visible.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read a confinement from what `to_json` returned."""
        user = values["user"]
        return cls(
            isolation=Isolation(values["isolation"]),
            limits=WorkerLimits.from_json(values["limits"]),
            user=None if user is None else (int(user[0]), int(user[1])),
            connect_ports=tuple(int(port) for port in values["connect_ports"]),
            visible=VisibleFiles.from_json(values["visible"]),
        )

    def enter(self, directory: str, *, files: Sequence[int] = (), control: int | None = None) -> None:
        """Apply the confinement to this process, which must have one thread; raise OSError if the kernel refuses.

        `directory` is the new working directory. With `control`, at level `container`, this returns in a child inside
        new namespaces (`namespaces.enter`), while two parents stay outside: `files` are the descriptors that only the
        child keeps, and `control` is the parents' socket.
        """
        if control is not None:
            namespaces.enter(self.visible, directory, control=control, keep=files)
            directory = namespaces.DIRECTORY
        os.chdir(directory)
        os.umask(0o077)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.isolation is not Isolation.NONE:
            self.limits.apply()
        # The kernel counts processes by user, so the limit would count all of the env-server's own without one of
        # these.
        if self.user is not None or self.is_container:
            self._limit_processes()
        if self.user is not None:
            self._become(*self.user)
        die_with_parent()  # even while its code blocks; after the change of user, which forgets it
        if self.isolation is not Isolation.NONE and sys.platform == "linux":
            # After the change of user, which needs capabilities that the worker of a container gives up here.
            system.drop(keep=frozenset() if self.is_container else system.KEPT)
            # Programs with a setuid bit gain nothing then. Landlock demands it of processes without CAP_SYS_ADMIN.
            prctl(_PR_SET_NO_NEW_PRIVS, 1)
            with _unless_needed(is_needed=bool(self.connect_ports)):
                landlock.restrict(connect_ports=self.connect_ports or None)

    def _limit_processes(self) -> None:
        """Limit the processes and threads of this process's user or user namespace, by which the kernel counts them."""
        most = self.limits.max_processes * _THREADS_PER_PROCESS
        if most:
            resource.setrlimit(resource.RLIMIT_NPROC, (most, most))

    @staticmethod
    def _become(uid: int, gid: int) -> None:
        """Change the user and group of this process irrevocably; it has no further groups then."""
        # Groups first: after the change of user the right to change them is gone.
        os.setgroups([])
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        prctl(_PR_SET_DUMPABLE, 1)  # else its own files in /proc would be root's


@contextlib.contextmanager
def _unless_needed(*, is_needed: bool) -> Any:
    """Ignore an OSError of the block, unless `is_needed`: the operator asked for the restriction."""
    try:
        yield
    except OSError:
        if is_needed:
            raise


# Whether this machine can make level `container`: tried once, as a worker would, before the env-server serves.
#
# `python -m millrace.env_server.isolation.confinement CONFINEMENT DIRECTORY` is the process that tries.

_TRY_S = 60.0
_SHOWN_CHARS = 300


def make_root_files(directory: Path, user: tuple[int, int] | None) -> None:
    """Make in `directory` what a worker's root directory is made of: `root`, `tmp` and `hosts`.

    `tmp` belongs to the uid and gid `user`, if they are given.
    """
    (directory / "root").mkdir()
    (directory / "tmp").mkdir(mode=0o700)
    if user is not None:
        os.chown(directory / "tmp", *user)
    hosts = directory / "hosts"
    hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
    hosts.chmod(0o644)


def why_no_container(confinement: Confinement) -> str:
    """Return why this machine cannot confine workers by namespaces; "" if it can.

    Blocks while a process tries `confinement`, about a second.
    """
    with TemporaryDirectory(prefix="millrace-check-") as place:
        make_root_files(Path(place), confinement.user)
        command = [sys.executable, "-m", __name__, json.dumps(confinement.to_json()), place]
        try:
            answer = subprocess.run(command, capture_output=True, timeout=_TRY_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)[:_SHOWN_CHARS]
    if answer.returncode == 0:
        return ""
    output = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return output[:_SHOWN_CHARS] or f"the attempt ended with exit code {answer.returncode}"


def _try(confinement: Confinement, directory: str) -> None:
    """Confine this process as a worker would be, with the files in `directory`, and replace it by one that imports a
    worker's code.

    Raises OSError, with the step that failed.
    """
    ours, control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.close()
    os.environ["HOME"] = os.environ["TMPDIR"] = "/tmp"
    confinement.enter(directory, control=control.detach())
    command = [sys.executable, "-c", "import millrace.env_server.workers.env_worker"]
    os.execv(sys.executable, command)


if __name__ == "__main__":
    try:
        _try(Confinement.from_json(decode_object(sys.argv[1], what="argument", reason="SETTINGS_INVALID")), sys.argv[2])
    except OSError as error:
        sys.exit(str(error.strerror or error))
