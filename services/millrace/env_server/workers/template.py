"""The template from which workers are forked (`millrace.processes.fork_server`): when it is started, and tried again.

As a program it is that template. It imports what every worker needs, which costs 3 CPU-seconds, once. It runs no code
of environments, knows no secret (it has the variables of a worker), and its copies die with it.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from millrace.processes import fork_server
from millrace.processes.forked import ForkedProcess, ForkServerClient, ForkServerError
from millrace.processes.parent_death import die_with_parent
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_TEMPLATE_MODULE = "millrace.env_server.workers.template"
WORKER_MODULE = "millrace.env_server.workers.env_worker"
# What every worker imports, and those of environments of v0; they are most.
_PRELOADED = (WORKER_MODULE, "millrace.env_server.adapters.v0", "millrace.env_server.adapters.renderer")
_OF_V1 = "millrace.env_server.adapters.v1"
"""Another second of imports, which the first worker of v1 pays itself; the template follows for the next ones."""
# It imports 3 CPU-seconds' worth of libraries; a busy machine has its own idea of seconds.
_READY_S = 180.0
_FORK_S = 20.0
# A template that ends this often, each time within the minute, is not tried again for a while.
_MAX_SHORT_LIVES = 3
_SHORT_LIFE_S = 60.0
_PAUSE_S = 300.0


class WorkerTemplate:
    """One template at a time. Of one event loop."""

    def __init__(self, environ: Callable[[], Mapping[str, str]], cwd: Path) -> None:
        """`environ` gives the variables of the template, `cwd` is its working directory."""
        self._environ = environ
        self._cwd = cwd
        self.fork_server = ForkServerClient({WORKER_MODULE: _PRELOADED}, module=_TEMPLATE_MODULE)
        self._began: float | None = None
        self._has_v1 = False
        self._num_short_lives = 0
        self._not_before = 0.0

    async def fork(self, argv: Sequence[str], environ: Mapping[str, str], files: Mapping[int, int]) -> ForkedProcess:
        """A copy of the template that works by these arguments, with these open files. Raises ForkServerError."""
        await self._ready()
        with waits.waiting("a copy of the template of env workers", waits_on="env worker", deadline_s=_FORK_S):
            return await self.fork_server.fork(
                WORKER_MODULE, argv, env=environ, marks={}, files=files, timeout_s=_FORK_S
            )

    async def warm(self) -> None:
        """Start the template, if there is none; the next `fork` raises what goes wrong."""
        with contextlib.suppress(ForkServerError):
            await self._ready()

    def note_loaded(self, api: str) -> None:
        """An environment of this generation was loaded: what its next workers import is imported now."""
        if api == "v1" and not self._has_v1:
            self._has_v1 = True
            self.fork_server.preload(WORKER_MODULE, _OF_V1)

    def close(self) -> None:
        """End the template, and with it every copy."""
        self.fork_server.stop()

    async def _ready(self) -> None:
        """Return once the template has imported everything; starts a new one if the last one ended."""
        if self.fork_server.pid is None:
            self._look_back()
            try:
                self.fork_server.start(self._environ(), cwd=self._cwd)
            except OSError as error:
                raise ForkServerError(f"the template could not be started: {error}") from error
            self._began = time.monotonic()
            if self._has_v1:
                self.fork_server.preload(WORKER_MODULE, _OF_V1)
        with waits.shared("the template of env workers to import", waits_on="env worker", deadline_s=_READY_S):
            await self.fork_server.wait_loaded(timeout_s=_READY_S)

    def _look_back(self) -> None:
        """Raise ForkServerError while no new template shall be tried."""
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
