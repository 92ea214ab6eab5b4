"""Starts worker processes: forked from a template, or by themselves where that does not work."""

import asyncio
import contextlib
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from millrace.env_server import play_meters
from millrace.env_server.engine_access import engine_token_for_workers
from millrace.env_server.interpreters.examine import shown_files
from millrace.env_server.isolation.check import furnish
from millrace.env_server.isolation.confinement import Confinement
from millrace.env_server.isolation.inherited import worker_environ
from millrace.env_server.isolation.namespaces import DIRECTORY
from millrace.env_server.workers.template import WORKER_MODULE, WorkerTemplate
from millrace.processes import sessions
from millrace.processes.forked import ForkServerError
from millrace.processes.sessions import Process
from millrace.storage.clean_up import TEMPORARY, remove
from millrace.storage.scratch import owned_directory

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
        """Its /etc/hosts, at level `container`."""
        return self.directory / "hosts"

    async def forget(self) -> None:
        """It has ended: its directory goes."""
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


class WorkerStarter:
    """Of one env-server."""

    def __init__(self, confinement: Confinement | None = None, *, forks: bool = True) -> None:
        """`forks` False starts every worker by itself."""
        self.confinement = confinement or Confinement()
        self._owned = ExitStack()
        # Not below the scratch directory: its path is no business of a worker.
        parent = Path(tempfile.gettempdir())
        self.directory = self._owned.enter_context(owned_directory("env-workers", parent=parent))
        (self.directory / "template").mkdir()
        self.shared = self.directory / "shared"
        """For files that workers read."""
        self.shared.mkdir()
        self.template = WorkerTemplate(self._environ, self.directory / "template") if forks else None
        if self.confinement.user is not None:
            self.directory.chmod(0o711)
            self.shared.chmod(0o755)
            self._owned_by_user(self.directory / "home")
            engine_token_for_workers().owner = self.confinement.user

    async def warm(self) -> None:
        """Prepare for the first worker."""
        if self.template is not None:
            await self.template.warm()

    def note_loaded(self, api: str) -> None:
        """A worker has loaded an environment of this generation; more of the kind may follow."""
        if self.template is not None:
            self.template.note_loaded(api)

    async def start(self, files: Sequence[int], *, python: str = "") -> Started:
        """Start a worker with these sockets: for commands, echoes, and at level `container` its `Door`. Raises OSError.

        With `python` it goes over to that interpreter; the template is of ours, so such a worker is no copy of it.
        """
        directory = Path(tempfile.mkdtemp(prefix="w", dir=self.directory))
        try:
            if self.confinement.is_container:
                furnish(directory, self.confinement.user)
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
        """End the template and remove all private directories; the workers have ended before."""
        if self.template is not None:
            self.template.close()
        await asyncio.to_thread(self._owned.close)

    async def _fork(self, files: Sequence[int], environ: Mapping[str, str], directory: Path) -> Process | None:
        """A copy of the template; None if there is none to be had."""
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
        argv, cwd = self._argv(files, directory, python), self.directory / "template"
        process = await sessions.start(argv, env=environ, cwd=cwd, pass_fds=list(files))
        play_meters.worker_started("spawn")
        return process

    def _argv(self, files: Sequence[int], directory: Path, python: str = "") -> list[str]:
        """The command line of a worker, whose sockets have these numbers."""
        return [
            *(sys.executable, "-m", WORKER_MODULE),
            *(f"--fd={file}" for file in files),
            f"--directory={directory}",
            f"--confinement={json.dumps(self._confinement_json(python))}",
            *([f"--python={python}"] if python else []),
        ]

    def _environ(self) -> dict[str, str]:
        """The variables of a worker, but for its directory."""
        environ = {**worker_environ(os.environ), **engine_token_for_workers().environ()}
        search = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        if not self.confinement.is_container:
            # Environments beside the env-server's working directory are found as before.
            with contextlib.suppress(FileNotFoundError):
                search.insert(0, str(Path.cwd()))
        environ["PYTHONPATH"] = os.pathsep.join(search)
        environ = {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "TOKENIZERS_PARALLELISM": "false", **environ}
        if self.confinement.user is not None:
            environ = {name: value for name, value in environ.items() if not name.startswith("XDG_")}
            environ |= {"HOME": str(self.directory / "home"), "USER": "env", "LOGNAME": "env"}
        return environ

    def _confinement_json(self, python: str) -> dict[str, Any]:
        """With what a worker of level `container` is shown by this env-server: tokenizers, its token, certificates."""
        given = [*engine_token_for_workers().visible(), *shown_files(python)]
        visible = self.confinement.visible.with_shown([str(self.shared), *given])
        return replace(self.confinement, visible=visible).to_json()

    def _owned_by_user(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._give(directory)

    def _give(self, directory: Path) -> None:
        if self.confinement.user is not None:
            os.chown(directory, *self.confinement.user)
