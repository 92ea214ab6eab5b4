"""Starting workers of one environment until they have loaded it, all of them the same tasks."""

import asyncio
import itertools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from millrace.env_server.isolation.deaths import EnvLoadError
from millrace.env_server.workers.starter import WorkerStarter
from millrace.env_server.workers.worker_process import (
    DEFAULT_BLOCKED_GRACE_S,
    DEFAULT_FROZEN_S,
    DEFAULT_WAITS_S,
    WorkerProcess,
)
from millrace.rollouts.requests import EnvSpec, LoadedEnv
from millrace.telemetry import progress
from millrace.telemetry.progress import Doing

logger = logging.getLogger(__name__)

# Importing verifiers takes 7 CPU-seconds and a data set may be downloaded; beyond this the load counts as failed.
LOAD_TIMEOUT_S = 600.0
# Loads that may be ended from outside, one after the other, before the environment counts as failed.
_MAX_KILLED_LOADS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """How many workers, and how long things may take."""

    num_workers: int = 1
    load_timeout_s: float = LOAD_TIMEOUT_S
    blocked_grace_s: float = DEFAULT_BLOCKED_GRACE_S
    frozen_s: float = DEFAULT_FROZEN_S
    waits_s: float = DEFAULT_WAITS_S
    """Seconds that one call may hold up a worker's event loop without computing; 0 is no limit."""
    num_probes: int = 4
    probe_idle_s: float = 60.0


@dataclass(kw_only=True)
class Loader:
    """Of one environment."""

    env: EnvSpec
    limits: PoolLimits
    starter: WorkerStarter
    is_over: Callable[[], bool]
    """Whether no more workers are wanted."""
    info: LoadedEnv | None = None
    """What the first worker has loaded."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def start(self, kind: str, note: Callable[[WorkerProcess], object]) -> WorkerProcess:
        """Start a worker, for which `note` is called before it has loaded; again if loading was ended from outside.

        Raises EnvLoadError, OSError.
        """
        num_killed_loads = 0
        while not self.is_over():
            try:
                return await self._start(f"{self.env.id}#{kind}{next(self._numbers)}", note)
            except EnvLoadError as error:
                num_killed_loads += 1
                if not error.is_from_outside or num_killed_loads >= _MAX_KILLED_LOADS:
                    raise
                logger.warning("loading was ended from outside, trying again", extra={"env": self.env.id})
        raise EnvLoadError(
            "Leaving", "the env-server leaves, or the environment has failed: no more workers are started"
        )

    async def _start(self, name: str, note: Callable[[WorkerProcess], object]) -> WorkerProcess:
        limits = self.limits
        worker = await WorkerProcess.spawn(
            self.env,
            self.starter,
            name=name,
            blocked_grace_s=limits.blocked_grace_s,
            frozen_s=limits.frozen_s,
            waits_s=limits.waits_s,
        )
        note(worker)
        await self._wait_loaded(worker)
        return worker

    async def _wait_loaded(self, worker: WorkerProcess) -> None:
        """Wait until the worker has loaded the tasks of the others. Raises EnvLoadError."""
        timeout_s = self.limits.load_timeout_s
        what = f"environment {self.env.id}"
        with progress.work(Doing.LOAD, what, waits_on="env worker", deadline_s=timeout_s):
            try:
                async with asyncio.timeout(timeout_s):
                    info = await asyncio.shield(worker.loaded)
            except TimeoutError:
                worker.kill("loading took too long")
                message = f"not loaded within {timeout_s:g} s; load it once by hand to see what it waits for"
                raise EnvLoadError("LoadTimeout", message) from None
        if self.info is None:
            self.info = info
            if not self.env.python:
                self.starter.note_loaded(info.api)
        elif (info.train.digest, info.eval.digest) != (self.info.train.digest, self.info.eval.digest):
            worker.kill("its tasks differ")
            raise EnvLoadError(
                "TaskSetChanged",
                f"a new worker of environment {self.env.id} loaded other tasks than the first one; "
                "make its data a function of its args (a fixed seed)",
            )
