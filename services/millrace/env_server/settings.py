"""Settings of the env-server alone, beside those of every service (`telemetry.settings`)."""

import os
import pwd
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from millrace.config.section import IMAGE_PATTERN
from millrace.env_server.interpreters import PYTHONS_VARIABLE, parse_pythons
from millrace.env_server.isolation import namespaces
from millrace.env_server.isolation import namespaces as system
from millrace.env_server.isolation.confinement import Confinement, Isolation, why_no_container
from millrace.env_server.isolation.inherited import AgentListen
from millrace.env_server.isolation.limits import NO_LIMITS, WorkerLimits
from millrace.env_server.isolation.namespaces import VISIBLE_VARIABLE, covered, visible_to_workers
from millrace.env_server.workers.worker_process import BLOCKED_VARIABLE, DEFAULT_WAITS_S
from millrace.errors import InvalidSpecError, Violation
from millrace.storage.scratch import SCRATCH_VARIABLE

DEFAULT_SPOOL_BYTES = 2 << 30
ISOLATION_VARIABLE = "MILLRACE_ENV_ISOLATION"
USER_VARIABLE = "MILLRACE_ENV_USER"
PORTS_VARIABLE = "MILLRACE_ENV_CONNECT_PORTS"
_START_S = 60.0


def _count(text: str) -> int:
    """Return the text as a whole number above 0; raise ValueError for any other."""
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be a whole number above 0")
    return int(text)


def _bound(text: str) -> int:
    """Return the text as a whole number of at least 0; raise ValueError for any other."""
    if not text.isdecimal():
        raise ValueError("must be a whole number, or 0 for no limit")
    return int(text)


def _seconds(text: str) -> float:
    """Return the text as seconds from 0 to a week; raise ValueError for any other."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 7 * 86400:
        raise ValueError("must be seconds from 0 to 604800")
    return seconds


def _isolation(text: str) -> Isolation:
    """Return the isolation level of that name; raise ValueError for any other text."""
    if text not in set(Isolation):
        raise ValueError(f"must be one of {', '.join(Isolation)}")
    return Isolation(text)


def _ports(text: str) -> tuple[int, ...]:
    """Return the TCP ports in the text, separated by commas or blanks; raise ValueError for what is no port."""
    parts = [part for part in re.split(r"[,\s]+", text) if part]
    if not all(part.isdecimal() and 0 < int(part) < 65536 for part in parts):
        raise ValueError("must be TCP ports separated by commas, such as 8000,443")
    return tuple(int(part) for part in parts)


def _paths(text: str) -> tuple[str, ...]:
    """Return the paths in the text, separated by `:`; raise ValueError unless all are absolute and exist."""
    paths = tuple(path for path in text.split(os.pathsep) if path)
    if not all(os.path.isabs(path) and os.path.exists(path) for path in paths):
        raise ValueError(f"must be absolute paths of what exists, separated by {os.pathsep!r}")
    return paths


def _spool_dir(text: str) -> Path:
    """Return the spool directory, which need not exist yet; raise ValueError if it cannot be made or written."""
    path = Path(text)
    if not path.is_absolute():
        raise ValueError("must be an absolute path")
    # The directory is made at the start, so the first existing one above it has to be writable.
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"must be a directory, and {existing} is none")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"must be writable, and {existing} is not")
    return path


def _variable(name: str, parse: Callable[[str], Any], default: Any) -> Any:
    """Declare a setting that is read from the variable `name` by `parse`, and has `default` if the variable is
    unset.
    """
    return field(default=default, metadata={"name": name, "parse": parse})


# The container image that an env-server announces (`MILLRACE_ENV_IMAGE`), and whose environments it therefore plays.
#
# An env-server cannot find out which image it runs: a variable names it. The orchestrator places environments by it
# (`orchestrator.env.image`); the check here refuses those that came to the wrong place.

IMAGE_VARIABLE = "MILLRACE_ENV_IMAGE"
FIELD = "orchestrator.env.image"


def parse_image(text: str) -> str:
    """Return the text if it can be the name of a container image; raise ValueError otherwise."""
    if not re.fullmatch(IMAGE_PATTERN, text):
        raise ValueError("must be the name of a container image, such as registry.example.com/team/my-env:1.2")
    return text


def require_image(wanted: str, announced: str) -> None:
    """Raise InvalidSpecError (ENV_IMAGE_REFUSED) unless the image that an environment names equals `announced`.

    `announced` is this env-server's; "" is no image in both.
    """
    if wanted == announced:
        return
    if not announced:
        message = (
            f"is not what this env-server runs: it announces no image; start one from {wanted} with "
            f"{IMAGE_VARIABLE}={wanted}, or leave the key out"
        )
    elif not wanted:
        message = (
            f"is not set, and this env-server plays only environments of {announced}: set it to that, or start an "
            f"env-server without {IMAGE_VARIABLE}"
        )
    else:
        message = f"is not what this env-server runs, which is {announced}; correct one of the two"
    raise InvalidSpecError([Violation(field=FIELD, value=wanted, message=message)], reason="ENV_IMAGE_REFUSED")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvServerSettings:
    """Settings of the env-server alone."""

    num_workers: int = _variable("MILLRACE_ENV_WORKERS", _count, 1)
    """Worker processes per environment, each about 250 MB."""
    capacity: int = _variable("MILLRACE_ENV_CAPACITY", _count, 512)
    """Rollouts that are played, or wait to be appended, at once."""
    spool_dir: Path | None = _variable("MILLRACE_SPOOL_DIR", _spool_dir, None)  # noqa: RUF009 - it is a field
    """Where finished rollouts are kept until they are resolved; of this env-server alone. Without it they are in a
    temporary directory, and what is not in the log yet dies with this process."""
    spool_bytes: int = _variable("MILLRACE_SPOOL_BYTES", _count, DEFAULT_SPOOL_BYTES)
    """Bound of what is kept there; above it no groups are taken."""
    num_probes: int = _variable("MILLRACE_ENV_PROBES", _count, 4)
    """Tasks per environment that are played alone at once, after a worker died of one of them."""
    blocked_s: float = _variable(BLOCKED_VARIABLE, _seconds, DEFAULT_WAITS_S)
    """Seconds that one call of an environment may hold up its worker's event loop without computing; 0 is no limit."""
    idle_s: float = _variable("MILLRACE_ENV_IDLE_S", _seconds, 600.0)
    """Seconds that an environment keeps its workers after its last rollout."""
    idle_workers: int = _variable("MILLRACE_ENV_IDLE_WORKERS", _bound, 4)
    """Workers that environments of ended runs keep at once."""
    isolation: Isolation = _variable(ISOLATION_VARIABLE, _isolation, Isolation.PROCESS)  # noqa: RUF009 - it is a field
    """What keeps workers from what is around them: none, process, user, container (`confinement`)."""
    user: str = _variable(USER_VARIABLE, str, "")
    """User (name or uid) that workers run as at level `user`, and at `container` where the env-server is root."""
    memory_bytes: int = _variable("MILLRACE_ENV_MEMORY_BYTES", _bound, WorkerLimits().memory_bytes)
    """Memory of a worker and its children; 0 is no limit."""
    max_processes: int = _variable("MILLRACE_ENV_MAX_PROCESSES", _bound, WorkerLimits().max_processes)
    """Processes of a worker, itself included; 0 is no limit."""
    max_files: int = _variable("MILLRACE_ENV_MAX_FILES", _bound, WorkerLimits().max_files)
    """Open files of each process of a worker; 0 is no limit."""
    max_file_bytes: int = _variable("MILLRACE_ENV_MAX_FILE_BYTES", _bound, WorkerLimits().max_file_bytes)
    """Size of each file that a worker writes; 0 is no limit."""
    connect_ports: tuple[int, ...] = _variable(PORTS_VARIABLE, _ports, ())
    """TCP ports that workers may connect to: the engines' own, and those of what environments call. Empty: all."""
    visible: tuple[str, ...] = _variable(VISIBLE_VARIABLE, _paths, ())
    """Paths that workers of level `container` see, beside what programs need: data of environments."""
    image: str = _variable(IMAGE_VARIABLE, parse_image, "")
    """Container image that this env-server runs: it plays the environments that name it, and no others."""
    pythons: tuple[str, ...] = _variable(PYTHONS_VARIABLE, parse_pythons, ())
    """Directories below which environments may name an interpreter of their own; `*` is all, empty none."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> "EnvServerSettings":
        """Read the settings of the env-server from the variables in `environ`; unset ones have their defaults.

        Raises one InvalidSpecError with all that is malformed, and also if the variables for agents are wrong.
        """
        values: dict[str, Any] = {}
        violations: list[Violation] = []
        for part in fields(cls):
            name = part.metadata["name"]
            if not (text := environ.get(name, "")):
                continue
            try:
                values[part.name] = part.metadata["parse"](text)
            except ValueError as error:
                violations.append(Violation(field=name, value=text, message=str(error), source="environment"))
        if violations:
            raise InvalidSpecError(violations, reason="SETTINGS_INVALID")
        AgentListen.from_environ(environ)  # workers read it
        return cls(**values)

    def confinement(self) -> Confinement:
        """Return how these settings confine workers; raise InvalidSpecError if this machine or user cannot do that.

        Blocks while it tries level `container`, or the user's Python at level `user`.
        """
        limits = WorkerLimits(
            memory_bytes=self.memory_bytes,
            max_processes=self.max_processes,
            max_files=self.max_files,
            max_file_bytes=self.max_file_bytes,
        )
        problems: list[Violation] = []
        uid_gid = None
        needs_user = self.isolation is Isolation.USER
        # An administrator makes containers without a user namespace, and root in them is root of this machine.
        needs_user = needs_user or (self.isolation is Isolation.CONTAINER and namespaces.is_administrator())
        match self.isolation:
            case Isolation.NONE:
                limits = NO_LIMITS
            case Isolation.PROCESS:
                pass
            case Isolation.USER | Isolation.CONTAINER if needs_user:
                try:
                    uid_gid = _find_user(self.user, must_import=self.isolation is Isolation.USER)
                except ValueError as error:
                    problems.append(_refused(USER_VARIABLE, self.user, str(error)))
            case _:
                pass
        if self.user and not needs_user:
            message = f"is used only with {ISOLATION_VARIABLE}=user, which is {self.isolation}"
            if self.isolation is Isolation.CONTAINER:
                message = "is used at level container only where the env-server is root with all of its powers"
            problems.append(_refused(USER_VARIABLE, self.user, message))
        if self.connect_ports and self.isolation is Isolation.NONE:
            problems.append(_refused(PORTS_VARIABLE, self.connect_ports, f"needs {ISOLATION_VARIABLE}=process or more"))
        elif self.connect_ports and system.version() < system.CONNECT_VERSION:
            message = "cannot be kept by this kernel: it takes Linux 6.7 with Landlock; use a network policy instead"
            problems.append(_refused(PORTS_VARIABLE, self.connect_ports, message))
        if self.visible and self.isolation is not Isolation.CONTAINER:
            message = f"is used only with {ISOLATION_VARIABLE}=container, which is {self.isolation}"
            problems.append(_refused(VISIBLE_VARIABLE, ",".join(self.visible), message))
        confinement = Confinement(
            isolation=self.isolation, limits=limits, user=uid_gid, connect_ports=self.connect_ports
        )
        if self.isolation is Isolation.CONTAINER and not problems:
            confinement = replace(confinement, visible=visible_to_workers(os.environ, self.visible))
            if hidden := covered(confinement.visible):
                message = (
                    f"cannot be kept here: workers need {', '.join(hidden)}, and see a private directory in that "
                    "place. Install Python and the code elsewhere, such as below /opt or a home"
                )
                problems.append(_refused(ISOLATION_VARIABLE, self.isolation.value, message))
            elif why := why_no_container(confinement):
                best = "user, with a user to run as," if os.geteuid() == 0 else "process"
                message = f"cannot be kept here: {why}. Level {best} can, which keeps out less (docs/security.md)"
                problems.append(_refused(ISOLATION_VARIABLE, self.isolation.value, message))
        if problems:
            raise InvalidSpecError(problems, reason="SETTINGS_INVALID", remedy="correct these and start again")
        return confinement

    def make_private(self) -> None:
        """Make the directories of spool and scratch files, readable by this user alone.

        Does nothing at isolation levels `none` and `process`.
        """
        scratch = os.environ.get(SCRATCH_VARIABLE, "")
        for path in [self.spool_dir, Path(scratch) if scratch else None]:
            if self.isolation in (Isolation.USER, Isolation.CONTAINER) and path is not None:
                path.mkdir(parents=True, exist_ok=True)
                path.chmod(0o700)


def _refused(name: str, value: object, message: str) -> Violation:
    """Return the violation that the variable `name` has a value that cannot be used, for the reason `message`."""
    return Violation(field=name, value=str(value), message=message, source="environment")


def _find_user(text: str, *, must_import: bool) -> tuple[int, int]:
    """Return (uid, gid) of the user whose name or uid `text` is; raise ValueError if workers cannot run as that user.

    With `must_import` Python is run as that user, who must be able to import Millrace.
    """
    if not text:
        raise ValueError(f"must name the user that workers run as, with {ISOLATION_VARIABLE}=user or container")
    try:
        entry = pwd.getpwuid(int(text)) if text.isdecimal() else pwd.getpwnam(text)
    except KeyError:
        raise ValueError("is no user of this machine; make one with `useradd --system`") from None
    if entry.pw_uid in (0, os.geteuid()):
        raise ValueError("must be another user than root and the one that runs the env-server")
    if not must_import:
        return entry.pw_uid, entry.pw_gid
    try:
        answer = subprocess.run(
            [sys.executable, "-c", "import millrace"],
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=[],
            # That user may not be able to enter this process's directory.
            cwd="/",
            capture_output=True,
            timeout=_START_S,
            check=False,
        )
    except PermissionError as error:
        if os.geteuid() != 0:
            message = "cannot be taken: the env-server needs to run as root, or with CAP_SETUID and CAP_SETGID"
        else:
            message = f"cannot run {sys.executable}: {error.strerror}; install Python where every user can read it"
        raise ValueError(message) from None
    except subprocess.TimeoutExpired:
        raise ValueError(f"did not start Python within {_START_S:g} s") from None
    if answer.returncode != 0:
        last = answer.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise ValueError(f"cannot import millrace: {last}; install it where that user can read it")
    return entry.pw_uid, entry.pw_gid
