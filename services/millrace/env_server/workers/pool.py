"""The workers of one environment, and what happens to rollouts when a worker dies.

Every rollout ends, whatever its environment does, and one bad task does not take its neighbours with it:

* A worker that dies or blocks takes down every rollout that it plays, and it is unknown which one is the cause. Each of
  their tasks becomes a suspect.
* A worker that was killed or stopped from outside (SIGKILL, SIGSTOP) makes no suspects the first time: what it played
  is played again at once, side by side. If that happens to a rollout twice, its task is a suspect like others: the
  kernel's out-of-memory killer acts from outside, too.
* Suspects are replayed alone in probe workers, several tasks side by side (`probes`). A task that ends its rollout
  there is cleared, and its other rollouts go back to the shared workers. A task that kills a probe worker, alone, and
  has been in flight in two deaths, or blocks it, is quarantined, and its rollouts end as QUARANTINED from then on.
* While an environment's tasks do so often, those that were not tried yet are probed from the start, and when most of
  them do, the environment is given up: ENV_KILLS_WORKERS names tasks and exit codes (`TaskTrials`).
* A worker that was asked to end (SIGTERM, SIGINT, SIGHUP), wherever it played, makes no suspects: the rollout is played
  again, twice at most; after that such an end counts like others.
* While the env-server leaves, the death of a worker counts for nothing: its surroundings are being stopped. Workers are
  not started again, and a rollout that lost its worker does not end here (PlayAbandonedError): other env-servers play
  it.
* A rollout is started at most four times (twice shared, twice probed), and twice more if workers are asked to end, so
  it ends even if workers die for other reasons.

An idle environment rests: its workers end, and its state stays (`rest`). The next play starts them again.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from millrace.backoff import Backoff
from millrace.env_server import play_meters
from millrace.env_server.adapters.outcome import Outcome, failed, make_rollout
from millrace.env_server.isolation.limits import DeathCause, EnvLoadError, WorkerDiedError
from millrace.env_server.workers.probes import Probes, TaskTrials
from millrace.env_server.workers.starter import WorkerStarter
from millrace.env_server.workers.worker_process import (
    BLOCKED_REMEDY,
    DEFAULT_BLOCKED_GRACE_S,
    DEFAULT_FROZEN_S,
    DEFAULT_WAITS_S,
    WorkerProcess,
)
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.rollouts.requests import LoadedEnv, label_of
from millrace.rollouts.types import Rollout, RolloutStatus
from millrace.telemetry import progress, waits
from millrace.telemetry.progress import Activity

# Starting workers of one environment until they have loaded it, all of them the same tasks.

# Importing verifiers takes 7 CPU-seconds and a data set may be downloaded; beyond this the load counts as failed.
LOAD_TIMEOUT_S = 600.0
# Loads that may be ended from outside, one after the other, before the environment counts as failed.
_MAX_KILLED_LOADS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLimits:
    """The number of workers of an environment, and limits of time."""

    num_workers: int = 1
    load_timeout_s: float = LOAD_TIMEOUT_S
    blocked_grace_s: float = DEFAULT_BLOCKED_GRACE_S
    frozen_s: float = DEFAULT_FROZEN_S
    waits_s: float = DEFAULT_WAITS_S
    """Seconds that one call may block a worker's event loop without computing; 0 is no limit."""
    num_probes: int = 4
    probe_idle_s: float = 60.0


@dataclass(kw_only=True)
class Loader:
    """Starts the workers of one environment and requires that all load the same tasks."""

    env: EnvSpec
    limits: PoolLimits
    starter: WorkerStarter
    is_over: Callable[[], bool]
    """Returns whether no more workers are to be started."""
    info: LoadedEnv | None = None
    """The environment as the first worker loaded it."""
    _numbers: "itertools.count[int]" = field(default_factory=itertools.count)

    async def start(self, kind: str, note: Callable[[WorkerProcess], object]) -> WorkerProcess:
        """Start a worker and return it once it has loaded the environment.

        `kind` is part of the worker's name; `note` is called with the worker as soon as its process runs. Loading is
        repeated, a few times, if it was ended from outside. Raises EnvLoadError and OSError.
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
        """Start a worker of that name, give it to `note`, and return it once it has loaded. Raises EnvLoadError and
        OSError.
        """
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
        """Wait until the worker has loaded the environment, with the same tasks as the first worker.

        The first one's description is kept as `info`. A worker that takes too long or has other tasks is killed. Raises
        EnvLoadError, also if loading fails.
        """
        timeout_s = self.limits.load_timeout_s
        what = f"environment {self.env.id}"
        with progress.work(Activity.LOAD, what, waits_on="env worker", deadline_s=timeout_s):
            try:
                async with asyncio.timeout(timeout_s):
                    # Shielded: the time-out ends this wait and not the worker's future, which its listener resolves.
                    info = await asyncio.shield(worker.loaded)
            except TimeoutError:
                worker.kill("loading took too long")
                message = f"not loaded within {timeout_s:g} s; load it once by hand to see what it waits for"
                raise EnvLoadError("LoadTimeout", message) from None
        if self.info is None:
            self.info = info
            # The template is of the env-server's own interpreter.
            if not self.env.python:
                self.starter.note_loaded(info.api)
        elif (info.train.digest, info.eval.digest) != (self.info.train.digest, self.info.eval.digest):
            worker.kill("its tasks differ")
            raise EnvLoadError(
                "TaskSetChanged",
                f"a new worker of environment {self.env.id} loaded other tasks than the first one; "
                "make its data a function of its args (a fixed seed)",
            )


logger = logging.getLogger(__name__)

# A v1 rollout holds two HTTP connections in its worker; above this number they break (VERIFIERS: ReadErrors at 512).
_MAX_PLAYS_V1 = 128
_MAX_PLAYS_V0 = 1024
_MAX_SHARED_DEATHS = 2
_RESTARTS = Backoff(0.2, 30.0)
# A worker that lived this long did not die of being started.
_STABLE_S = 60.0
# Ends of workers that were asked to end, per rollout, that count for nothing.
_MAX_ASKED_ENDS = 2
KILLS_WORKERS = "ENV_KILLS_WORKERS"
"""Error type of an environment that is given up because most of its tasks end their workers."""


class PlayAbandonedError(Exception):
    """The rollout lost its worker while the env-server leaves: it does not end here, and its task is not blamed."""


class EnvPool:
    """The shared workers and the probe workers of one environment."""

    def __init__(self, env: EnvSpec, limits: PoolLimits, starter: WorkerStarter) -> None:
        """Make the pool of an environment, without workers: `start` begins to load them."""
        self.env = env
        self.failure: EnvLoadError | None = None
        self.failed_at = 0.0
        self.num_deaths = 0
        self.num_playing = 0
        """Rollouts that workers play."""
        self.runs: set[str] = set()
        """Uids of the runs that played here."""
        self.trials = TaskTrials()
        self._limits = limits
        self._loader = Loader(env=env, limits=limits, starter=starter, is_over=lambda: self._is_over)
        self.slots: list[WorkerProcess | None] = [None] * limits.num_workers
        self._changed = asyncio.Condition()
        self._supervisors: list[asyncio.Task[None]] = []
        self.probes = Probes(
            env.id,
            self._start_probe,
            limit=limits.num_probes,
            idle_s=limits.probe_idle_s,
            on_blocked=lambda: self._in_background(self._judge(is_blocked=True)),  # it outlives the blocked play
        )
        self._ending: set[asyncio.Task[None]] = set()
        self._num_plays = 0
        self._used_at = time.monotonic()
        self.is_leaving = False

    def start(self) -> None:
        """Begin to start the environment's workers in the background, which load it.

        Does nothing if they run already, or the environment has failed, or the env-server leaves.
        """
        self._used_at = time.monotonic()
        if self._supervisors or self.is_leaving or self.failure is not None:
            return
        for slot in range(self._limits.num_workers):
            name = f"supervise {self.env.id} {slot}"
            self._supervisors.append(asyncio.create_task(self._supervise(slot), name=name))

    @property
    def info(self) -> LoadedEnv | None:
        """Return the loaded environment's description, None before it is loaded."""
        return self._loader.info

    @property
    def _is_over(self) -> bool:
        """Return whether the pool starts no more workers: the env-server leaves, or the environment has failed."""
        return self.is_leaving or self.failure is not None

    @property
    def idle_since(self) -> float | None:
        """Return the monotonic time of the pool's last use; None while a play is in progress or the environment
        loads.
        """
        is_loading = self.failure is None and self.info is None
        return None if self._num_plays or is_loading else self._used_at

    @property
    def is_resting(self) -> bool:
        """Return whether the pool has no workers, and starts none until its next use."""
        return not self._supervisors and not self.num_workers

    def rest(self) -> asyncio.Task[None]:
        """End the workers of an idle environment in the background, and return the task that does so.

        What is known of its tasks stays, and the next play starts workers again.
        """
        # Taken out before the first await, so that a play which comes meanwhile starts workers anew.
        supervisors, self._supervisors = self._supervisors, []
        running = [worker for worker in self.slots if worker is not None]
        self.slots = [None] * self._limits.num_workers
        return self._in_background(self._end(supervisors, running))

    async def close(self) -> None:
        """End every worker of the environment and wait for it; rollouts in progress end as ENV_ERROR."""
        if self.failure is None:
            message = "the env-server ended the environment's workers"
            # As an end from outside: its rollouts count as failures of infrastructure, which are played again.
            await self._end_as(EnvLoadError("PoolClosed", message, is_from_outside=True))
        await self.rest()
        await asyncio.gather(*self._ending)

    async def _end(self, supervisors: Sequence[asyncio.Task[None]], workers: Sequence[WorkerProcess]) -> None:
        """Cancel the supervisors, then close these workers and all probe workers."""
        for supervisor in supervisors:
            supervisor.cancel()
        await asyncio.gather(*supervisors, return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in workers), self.probes.close())

    def _in_background(self, ending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run the coroutine, which ends workers, in a task for which `close` waits; return the task."""
        task = asyncio.create_task(ending, name=f"end workers of {self.env.id}")
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return task

    async def leave(self) -> None:
        """Prepare for the env-server's end: rollouts may finish, no workers are started, and a worker's death makes
        no suspects.
        """
        self.is_leaving = True
        await self._notify()

    @property
    def quarantined_tasks(self) -> Sequence[str]:
        """Return the ids of the environment's tasks that are not played any more."""
        return tuple(self.trials.quarantined)

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the environment's workers that have loaded it and live, probe workers included."""
        shared = [worker for worker in self.slots if worker is not None and worker.is_ready]
        return [*shared, *self.probes.workers]

    @property
    def num_workers(self) -> int:
        """Return how many of the environment's workers have loaded it and live, probe workers included."""
        return len(self.workers)

    async def play(self, request: PlayGroupRequest, *, tokenizer_dir: str) -> list[Rollout]:
        """Play the request's members together in a worker and return one rollout for each, a failed one in case of any
        problem.

        `tokenizer_dir` has the policy's tokenizer; "" if none is needed. Starts the workers if they have ended for lack
        of use. Raises PlayAbandonedError, only while the env-server leaves.
        """
        self.runs.add(request.run_uid)
        self._num_plays += 1
        try:
            self.start()
            return await self._play(request, tokenizer_dir)
        finally:
            self._num_plays -= 1
            self._used_at = time.monotonic()

    async def _play(self, request: PlayGroupRequest, tokenizer_dir: str) -> list[Rollout]:
        """Play the request, again after each worker that it loses, until its members have rollouts.

        A task that ended a worker is played alone in a probe worker, and quarantined if it ends that, too (see the top
        of this module). Raises PlayAbandonedError while the env-server leaves.
        """
        task_id = self.task_id(request)
        num_deaths = num_asked = 0
        while True:
            if self._is_abandoned:
                raise PlayAbandonedError
            if self.failure is not None:
                return self._failures(request, _load_failure(self.failure))
            if reason := self.trials.quarantine_reason(task_id):
                return self._failures(request, failed(RolloutStatus.QUARANTINED, "TaskQuarantined", reason))
            must_probe = num_deaths >= _MAX_SHARED_DEATHS
            is_probed = must_probe or self.trials.is_suspect(task_id)
            began = time.monotonic()
            try:
                if is_probed:
                    rollouts = await self._play_probed(request, task_id, tokenizer_dir, must_probe=must_probe)
                else:
                    rollouts = await self._play_shared(request, tokenizer_dir)
                if rollouts is not None:
                    self.trials.clear(task_id)
                    return rollouts
            except WorkerDiedError as error:
                logger.warning("rollout lost its worker", extra={"task": task_id, "reason": str(error)})
                if self.is_leaving:
                    raise PlayAbandonedError from error
                if error.death.cause is DeathCause.ASKED and num_asked < _MAX_ASKED_ENDS:
                    num_asked += 1
                elif self.failure is not None:
                    continue  # its workers are ended for that
                elif is_probed and (
                    num_deaths or task_id in self.trials.suspects or error.death.cause is DeathCause.BLOCKED
                ):
                    # It was alone in the worker, so nothing else can be the cause.
                    return await self._condemn(request, task_id, error, seconds=time.monotonic() - began)
                else:
                    num_deaths += 1
                    # An end from outside counts from the second on: the kernel's out-of-memory killer acts from
                    # outside, too.
                    if not error.death.is_from_outside or num_deaths > 1:
                        self.trials.suspect(task_id, was_blocked=error.death.cause is DeathCause.BLOCKED)

    def task_id(self, request: PlayGroupRequest) -> str:
        """Return the id of the task that the request names by its index; raise RuntimeError before the environment
        is loaded.
        """
        if self.info is None:
            raise RuntimeError("the environment is not loaded")
        return self.info.task_id(request)

    @property
    def _is_abandoned(self) -> bool:
        """Return whether the env-server is leaving and the environment has no worker left to play in."""
        return self.is_leaving and (self.failure is not None or not any(self.slots))

    async def _play_shared(self, request: PlayGroupRequest, tokenizer_dir: str) -> list[Rollout] | None:
        """Play in a shared worker, beside other rollouts, and return a rollout per member.

        None if the environment failed, or the env-server left, before a worker was free. Raises WorkerDiedError.
        """
        worker = await self._free_worker()
        if worker is None:
            return None
        try:
            with self._playing(request):
                return await worker.play(request, tokenizer_dir=tokenizer_dir)
        finally:
            await self._notify()

    async def _play_probed(
        self, request: PlayGroupRequest, task_id: str, tokenizer_dir: str, *, must_probe: bool
    ) -> list[Rollout] | None:
        """Play alone in a probe worker, once it is the task's turn, and return a rollout per member.

        None if before its turn the task was cleared (unless `must_probe`) or quarantined, or the environment failed. A
        worker that cannot be started makes the rollouts failures. Raises WorkerDiedError, and PlayAbandonedError while
        the env-server leaves.
        """
        async with self.probes.turn(task_id) as give_place:
            is_settled = not must_probe and not self.trials.is_suspect(task_id)
            if is_settled or self.failure is not None or self.trials.quarantine_reason(task_id):
                return None
            try:
                async with self.probes.worker(give_place) as worker:
                    with self._playing(request):
                        rollouts = await worker.play(request, tokenizer_dir=tokenizer_dir)
            except EnvLoadError as error:
                if self.is_leaving:
                    raise PlayAbandonedError from error
                if self.failure is not None:
                    return None  # that is the reason
                return self._failures(request, _load_failure(error))
            except OSError as error:
                message = f"cannot start a probe worker: {error}"
                outcome = failed(RolloutStatus.ENV_ERROR, type(error).__name__, message, is_infrastructure=True)
                return self._failures(request, outcome)
            self.trials.clear(task_id)  # before the next one of its task has its turn
            return rollouts

    async def _condemn(
        self, request: PlayGroupRequest, task_id: str, error: WorkerDiedError, *, seconds: float
    ) -> list[Rollout]:
        """Quarantine the task, which ended with `error` the worker that played it alone, and return failed rollouts.

        The environment fails as well, if most of its tasks end their workers. `seconds` is how long it was played.
        """
        play_meters.worker_died(label_of(self.env))
        reason = (
            f"task {task_id} of environment {self.env.id} ended a worker process that played it alone ({error}); "
            "it is not played again until the env-server restarts: fix the environment or drop the task"
        )
        self.trials.quarantine(task_id, reason, end=error.death.how)
        logger.error("task quarantined", extra={"task": task_id, "env": self.env.id, "reason": str(error)})
        is_blocked = error.death.cause is DeathCause.BLOCKED
        await self._judge(is_blocked=is_blocked)
        if is_blocked:
            outcome = failed(RolloutStatus.TIMEOUT, "WorkerBlocked", f"{error}; {BLOCKED_REMEDY}")
        else:
            # What was stopped or asked to end is not the environment's doing; SIGKILL may be the kernel's, for memory.
            is_innocent = error.death.cause in (DeathCause.FROZEN, DeathCause.ASKED)
            outcome = failed(RolloutStatus.WORKER_DIED, "WorkerDied", str(error), is_infrastructure=is_innocent)
        return self._failures(request, outcome, seconds=seconds)

    async def _judge(self, *, is_blocked: bool) -> None:
        """Fail the environment and end its workers, if most of its tasks end their workers.

        `is_blocked` chooses the remedy: tasks block their workers, or end them otherwise.
        """
        # A quarter of the limit is enough in a line of code where other tasks were blocked until they ended. Otherwise
        # each task of such an environment would be waited for in full.
        num_blocked = self.probes.num_blocked(at_least_s=self._limits.waits_s / 4, at=self.trials.ended_at)
        hopeless = self.trials.hopeless(num_probing=self.probes.num_probing, num_blocked=num_blocked)
        if hopeless and self.failure is None:
            lacks = "raise MILLRACE_ENV_MEMORY_BYTES if memory is what its tasks lack"
            remedy = f"fix the environment: {BLOCKED_REMEDY}" if is_blocked else f"fix the environment, or {lacks}"
            await self._fail(EnvLoadError(KILLS_WORKERS, f"environment {self.env.id}: {hopeless}", remedy=remedy))
            self.rest()

    def _failures(self, request: PlayGroupRequest, outcome: Outcome, *, seconds: float = 0.0) -> list[Rollout]:
        """Return a rollout for every member of the request, all with the same failed outcome, and `seconds` long."""
        task_id = self.task_id(request)
        return [
            make_rollout(request, member=member, task_id=task_id, outcome=outcome, seconds=seconds)
            for member in request.members
        ]

    @contextmanager
    def _playing(self, request: PlayGroupRequest) -> Iterator[None]:
        """Count the request's members as playing during the block, which is registered as a wait for their engine."""
        reason = (
            f"{waits.COUNT} rollouts of {label_of(request.env)} that are played with the engine at {request.base_url}"
        )
        deadline_s = request.rollout_timeout_seconds + self._limits.blocked_grace_s
        self.num_playing += len(request.members)
        try:
            with waits.shared(reason, waits_on=request.base_url, deadline_s=deadline_s):
                yield
        finally:
            self.num_playing -= len(request.members)

    async def _notify(self) -> None:
        """Wake all that wait for a free worker; they look again."""
        async with self._changed:
            self._changed.notify_all()

    async def _free_worker(self) -> WorkerProcess | None:
        """Wait for a shared worker that is loaded and has room, and return the one that plays least.

        None if the environment failed, or the env-server leaves and no worker is left.
        """
        reason = f"a worker of environment {self.env.id} for {waits.COUNT} rollouts"
        with waits.shared(reason, waits_on="env worker", deadline_s=self._limits.load_timeout_s):
            async with self._changed:
                while self.failure is None and not self._is_abandoned:
                    is_v1 = self.info is not None and self.info.api == "v1"
                    most = _MAX_PLAYS_V1 if is_v1 else _MAX_PLAYS_V0
                    ready = [w for w in self.slots if w is not None and w.is_ready and w.num_playing < most]
                    if ready:
                        return min(ready, key=lambda worker: worker.num_playing)
                    await self._changed.wait()
        return None

    async def _supervise(self, slot: int) -> None:
        """Keep a shared worker in the slot of that number, started again after each death with a growing pause.

        Ends when the pool starts no more workers. If the environment cannot be loaded, it counts as failed.
        """
        num_short_lives = 1
        while not self._is_over:
            began = time.monotonic()
            try:
                # `rest` finds it in its slot while it loads.
                worker = await self._loader.start("", lambda started: self.slots.__setitem__(slot, started))
            except EnvLoadError as error:
                if not self._is_over:
                    await self._fail(error)
                    return
                self.slots[slot] = None
                break
            except Exception as error:  # the edge of a task that nobody awaits: without a word it would load for ever
                if not isinstance(error, OSError):
                    logger.exception("an env worker could not be started")
                await self._fail(EnvLoadError(type(error).__name__, f"cannot start a worker process: {error}"))
                return
            await self._notify()
            await worker.wait_ended()
            self.slots[slot] = None
            self.num_deaths += 1
            await self._notify()
            if self.is_leaving:
                break
            play_meters.worker_died(label_of(self.env))
            num_short_lives = 1 if time.monotonic() - began > _STABLE_S else num_short_lives + 1
            with waits.waiting(f"another start of a worker of {self.env.id} ({self.num_deaths} died)"):
                await asyncio.sleep(_RESTARTS.after(num_short_lives))
        await self._notify()

    async def _fail(self, error: EnvLoadError) -> None:
        """Log the error and mark the environment as failed with it."""
        logger.error("environment failed", extra={"env": self.env.id, "error": f"{error.error_type}: {error}"})
        await self._end_as(error)

    async def _end_as(self, error: EnvLoadError) -> None:
        """Mark the environment as failed with `error`, and wake all that wait for a worker."""
        self.failure = error
        self.failed_at = time.monotonic()
        await self._notify()

    async def _start_probe(self) -> WorkerProcess:
        """Start a worker that plays suspect tasks alone, and return it once it has loaded. Raises EnvLoadError and
        OSError.
        """
        started: list[WorkerProcess] = []
        try:
            return await self._loader.start("probe", started.append)
        except asyncio.CancelledError:
            for worker in started:
                self._in_background(worker.close())
            raise


def _load_failure(error: EnvLoadError) -> Outcome:
    """Return the outcome of a rollout whose worker could not load the environment."""
    return failed(RolloutStatus.ENV_ERROR, error.error_type, str(error), is_infrastructure=error.is_from_outside)
