"""Starts worker processes: forked from a template, or by themselves where that does not work."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.env_server import play_meters
from millrace.env_server.engine_access import engine_token_for_workers
from millrace.env_server.interpreters import shown_files
from millrace.env_server.isolation.confinement import Confinement, make_root_files
from millrace.env_server.isolation.inherited import worker_environ
from millrace.env_server.isolation.namespaces import DIRECTORY
from millrace.env_server.library import releases
from millrace.processes import fork_server, sessions
from millrace.processes.forked import ForkedProcess, ForkServerClient, ForkServerError
from millrace.processes.sessions import Process, die_with_parent
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.storage.scratch import owned_directory
from millrace.telemetry import waits

# The template from which workers are forked (`millrace.processes.fork_server`): when it is started, and tried again.
#
# As a program this module is that template. It imports what every worker needs, which costs 3 CPU-seconds, once. It
# runs no code of environments, has no secret (its variables are those of a worker), and its copies die with it.

_TEMPLATE_MODULE = "millrace.env_server.workers.starter"
WORKER_MODULE = "millrace.env_server.workers.env_worker"
_OF_V0 = ("millrace.env_server.adapters.v0",)
_OF_V1 = ("millrace.env_server.adapters.v1", "transformers.models.auto.tokenization_auto")
"""Three more CPU-seconds of imports: the environment's, and the tokenizer's, which v1 loads with the first rollout.

The first worker of v1 pays them itself; the template follows for the next ones.
"""
_RENDERER = "millrace.env_server.adapters.renderer"
# It imports 3 CPU-seconds' worth of libraries, which take much longer on a busy machine.
_READY_S = 180.0
_FORK_S = 20.0
# A template that ends this often, each time within the minute, is not tried again for a while.
_MAX_SHORT_LIVES = 3
_SHORT_LIFE_S = 60.0
_PAUSE_S = 300.0


def preloaded(release: str) -> tuple[str, ...]:
    """Return the names of the modules that the template imports, where `release` of `verifiers` is installed.

    Imported is what every worker needs, and what v0 needs, or v1 if the release has no v0.
    """
    own = _OF_V1 if releases.problem_of("v0", release) else _OF_V0
    return (WORKER_MODULE, *own, _RENDERER)


class WorkerTemplate:
    """Starts and replaces the template; one at a time, in one event loop."""

    def __init__(self, environ: Callable[[], Mapping[str, str]], cwd: Path) -> None:
        """Prepare a template, which is not started yet.

        `environ` returns its variables whenever it is started, and `cwd` is its working directory.
        """
        self._environ = environ
        self._cwd = cwd
        self.fork_server = ForkServerClient({WORKER_MODULE: preloaded(releases.installed())}, module=_TEMPLATE_MODULE)
        self._began: float | None = None
        self._has_v1 = False
        self._num_short_lives = 0
        self._not_before = 0.0

    async def fork(self, argv: Sequence[str], environ: Mapping[str, str], files: Mapping[int, int]) -> ForkedProcess:
        """Fork a worker from the template and return its process; a template is started first if there is none.

        `argv` and `environ` are the worker's; `files` has, by the number of each file in the worker, the number here.
        Raises ForkServerError.
        """
        await self._ready()
        with waits.waiting("a copy of the template of env workers", waits_on="env worker", deadline_s=_FORK_S):
            return await self.fork_server.fork(
                WORKER_MODULE, argv, env=environ, marks={}, files=files, timeout_s=_FORK_S
            )

    async def warm(self) -> None:
        """Start the template if there is none, and wait until it has imported its modules.

        Errors are ignored; the next `fork` raises them.
        """
        with contextlib.suppress(ForkServerError):
            await self._ready()

    def note_loaded(self, api: str) -> None:
        """Have the template import the modules of v1 for further workers, once an environment of `api` v1 was
        loaded.
        """
        if api == "v1" and not self._has_v1:
            self._has_v1 = True
            self._preload_v1()

    def _preload_v1(self) -> None:
        """Have the running template import the modules that v1 needs."""
        for module in _OF_V1:
            self.fork_server.preload(WORKER_MODULE, module)

    def close(self) -> None:
        """End the template process, and with it every worker forked from it."""
        self.fork_server.stop()

    async def _ready(self) -> None:
        """Start a template process if none runs, and wait until it has imported everything; raise ForkServerError."""
        if self.fork_server.pid is None:
            self._look_back()
            try:
                self.fork_server.start(self._environ(), cwd=self._cwd)
            except OSError as error:
                raise ForkServerError(f"the template could not be started: {error}") from error
            self._began = time.monotonic()
            if self._has_v1:
                self._preload_v1()
        with waits.shared("the template of env workers to import", waits_on="env worker", deadline_s=_READY_S):
            await self.fork_server.wait_loaded(timeout_s=_READY_S)

    def _look_back(self) -> None:
        """Count how often templates have ended within a minute; raise ForkServerError during a pause after several."""
        now = time.monotonic()
        if self._began is not None and now >= self._not_before:
            logger.warning("template of env workers is replaced")
            self._num_short_lives = self._num_short_lives + 1 if now - self._began < _SHORT_LIFE_S else 0
            if self._num_short_lives >= _MAX_SHORT_LIVES:
                self._num_short_lives, self._not_before = 0, now + _PAUSE_S
        if now < self._not_before:
            raise ForkServerError(f"its templates ended {_MAX_SHORT_LIVES} times; the next is tried later")


if __name__ == "__main__":
    die_with_parent()
    fork_server.main()


logger = logging.getLogger(__name__)

_FIRST_FILE = 3
"""The number of a forked worker's first socket: those below are its input and output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A worker process and its private directory."""

    process: Process
    directory: Path

    @property
    def hosts(self) -> Path:
        """Return the path of the file that the worker has as /etc/hosts; it exists at level `container`."""
        return self.directory / "hosts"

    async def forget(self) -> None:
        """Delete the private directory of a worker that has ended."""
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


class WorkerStarter:
    """Starts the workers of one env-server."""

    def __init__(self, confinement: Confinement | None = None, *, forks: bool = True) -> None:
        """Make the directories for workers; no process is started yet.

        `confinement` is how workers are confined, by default at level `process`. With `forks` False every worker is
        started as a program of its own, and not forked from a template.
        """
        self.confinement = confinement or Confinement()
        self._owned = ExitStack()
        # Not below the scratch directory, whose path a worker may not learn.
        parent = Path(tempfile.gettempdir())
        self.directory = self._owned.enter_context(owned_directory("env-workers", parent=parent))
        (self.directory / "template").mkdir()
        self.shared = self.directory / "shared"
        """Directory for files that all workers read."""
        self.shared.mkdir()
        self.template = WorkerTemplate(self._environ, self.directory / "template") if forks else None
        if self.confinement.user is not None:
            # Workers have another user: they can enter their own directories in it, but not list what is in it.
            self.directory.chmod(0o711)
            self.shared.chmod(0o755)
            self._owned_by_user(self.directory / "home")
            engine_token_for_workers().owner = self.confinement.user

    async def warm(self) -> None:
        """Start the template from which workers are forked, if there is to be one, and wait until it has imported
        its modules.
        """
        if self.template is not None:
            await self.template.warm()

    def note_loaded(self, api: str) -> None:
        """Have the template import what further workers of an environment of that `api` ("v0" or "v1") need."""
        if self.template is not None:
            self.template.note_loaded(api)

    async def start(self, files: Sequence[int], *, python: str = "") -> Started:
        """Start a worker and return its process and private directory. Raises OSError.

        `files` are its sockets: for commands, for echoes, and at level `container` for its `Door`. The worker is forked
        from the template if that works, else started as a program. A worker with `python`, which switches to that
        interpreter, is always started as a program.
        """
        directory = Path(tempfile.mkdtemp(prefix="w", dir=self.directory))
        try:
            if self.confinement.is_container:
                make_root_files(directory, self.confinement.user)
                environ = {**self._environ(), "TMPDIR": DIRECTORY, "HOME": DIRECTORY}
            else:
                self._give(directory)
                environ = {**self._environ(), "TMPDIR": str(directory)}
            process = None if python else await self._fork(files, environ, directory)
            if process is None:
                process = await self._spawn(files, environ, directory, python)
            return Started(process=process, directory=directory)
        except BaseException:  # raised on
            remove(directory, what=TEMPORARY)
            raise

    async def close(self) -> None:
        """End the template and delete all workers' directories; the workers must have ended before."""
        if self.template is not None:
            self.template.close()
        await asyncio.to_thread(self._owned.close)

    async def _fork(self, files: Sequence[int], environ: Mapping[str, str], directory: Path) -> Process | None:
        """Fork a worker from the template; return None if there is none or it fails, which is logged.

        `files` are the worker's sockets, and `directory` is its private one.
        """
        if self.template is None:
            return None
        numbers = range(_FIRST_FILE, _FIRST_FILE + len(files))  # theirs in the worker
        try:
            argv = self._argv(numbers, directory)
            process = await self.template.fork(argv, environ, dict(zip(numbers, files, strict=True)))
        except ForkServerError as error:
            logger.warning("env worker is started by itself, not forked", extra={"problem": str(error)})
            return None
        play_meters.worker_started("fork")
        return process

    async def _spawn(self, files: Sequence[int], environ: Mapping[str, str], directory: Path, python: str) -> Process:
        """Start a worker as a program of its own, which switches to the interpreter `python` unless that is "".
        Raises OSError.
        """
        argv, cwd = self._argv(files, directory, python), self.directory / "template"
        process = await sessions.start(argv, env=environ, cwd=cwd, pass_fds=list(files))
        play_meters.worker_started("spawn")
        return process

    def _argv(self, files: Sequence[int], directory: Path, python: str = "") -> list[str]:
        """Return the command line of a worker whose sockets have the descriptors `files`.

        The worker switches to the interpreter `python` unless that is "".
        """
        return [
            *(sys.executable, "-m", WORKER_MODULE),
            *(f"--fd={file}" for file in files),
            f"--directory={directory}",
            f"--confinement={json.dumps(self._confinement_json(python))}",
            *([f"--python={python}"] if python else []),
        ]

    def _environ(self) -> dict[str, str]:
        """Return the variables of every worker, except those that name its private directory."""
        environ = {**worker_environ(os.environ), **engine_token_for_workers().environ()}
        search = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if not self.confinement.is_container:
            # Environments beside the env-server's working directory are found as before.
            with contextlib.suppress(FileNotFoundError):
                search.insert(0, str(Path.cwd()))
        environ["PYTHONPATH"] = os.pathsep.join(search)
        # Defaults: a value of the env-server's own environment wins.
        environ = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false", **environ}
        if self.confinement.user is not None:
            # They name directories of the env-server's user.
            environ = {name: value for name, value in environ.items() if not name.startswith("XDG_")}
            environ |= {"HOME": str(self.directory / "home"), "USER": "env", "LOGNAME": "env"}
        return environ

    def _confinement_json(self, python: str) -> dict[str, Any]:
        """Return the confinement of a worker as plain data.

        To the visible files are added those of tokenizers, token, certificates, and of the interpreter `python`.
        """
        given = [*engine_token_for_workers().visible(), *shown_files(python)]
        visible = self.confinement.visible.with_shown([str(self.shared), *given])
        return replace(self.confinement, visible=visible).to_json()

    def _owned_by_user(self, directory: Path) -> None:
        """Make a directory that only the workers' user may read."""
        directory.mkdir(mode=0o700)
        self._give(directory)

    def _give(self, directory: Path) -> None:
        """Make the workers' user the owner of the directory, if workers have a user of their own."""
        if self.confinement.user is not None:
            os.chown(directory, *self.confinement.user)
