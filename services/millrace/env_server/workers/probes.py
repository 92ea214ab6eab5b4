"""Workers in which suspect tasks are played alone, several side by side; and the record of which tasks end workers.

Starting a worker takes as long as a short rollout, so while tasks wait to be probed, one worker more than is used is
being started. All of them end when no task was probed for a while. A probe whose task is blocked, waiting in one call,
computes nothing: its place goes to another task meanwhile.
"""

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from millrace.env_server.isolation.limits import EnvLoadError
from millrace.env_server.workers.worker_process import WorkerProcess
from millrace.telemetry import waits

logger = logging.getLogger(__name__)


STANDS_S = 3.0
"""How long a task may wait in one call before its probe's place goes to another."""
MOST_STANDING = 4
"""Probes that may play at once, blocked ones included, per probe that may compute."""
_LOOK_S = 1.0


@dataclass(slots=True)
class _Turn:
    """The rollouts of one task that are to be probed, one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


class Probes:
    """The probe workers of one environment, and the turns of tasks in them."""

    def __init__(
        self,
        env_id: str,
        start: Callable[[], Awaitable[WorkerProcess]],
        *,
        limit: int,
        idle_s: float,
        on_blocked: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare probe workers for an environment, none at first.

        `start` returns a worker with the environment loaded, or raises EnvLoadError or OSError. `limit` is how many
        probes may compute at once; idle workers end after `idle_s`; `on_blocked` is called about once a second while a
        probe is blocked.
        """
        self._on_standing = on_blocked
        self.num_probing = 0
        """Rollouts that are being played alone."""
        self._env_id = env_id
        self._start = start
        self._limit = limit
        self._idle_s = idle_s
        self._slots = asyncio.Semaphore(limit)
        self._turns: dict[str, _Turn] = {}
        self.num_waiting = 0
        self._idle: list[WorkerProcess] = []
        self._busy: set[WorkerProcess] = set()
        self.spare: asyncio.Task[None] | None = None
        self._retirement: asyncio.TimerHandle | None = None
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def workers(self) -> list[WorkerProcess]:
        """Return the probe workers that have loaded the environment and live, idle and busy."""
        return [worker for worker in (*self._idle, *self._busy) if worker.is_ready]

    @contextlib.asynccontextmanager
    async def turn(self, task_id: str) -> AsyncIterator[Callable[[], None]]:
        """Wait until a rollout of the task may be played alone in a probe worker; its turn lasts as long as the block.

        Of one task only one rollout has a turn at a time. A turn holds one of `limit` places (of the constructor), for
        which the tasks wait. Yields a function that gives the place back before the turn is over: then another task may
        begin its turn, and other rollouts of this task still wait for the block's end. More calls of it do nothing.
        """
        turn = self._turns.setdefault(task_id, _Turn())
        turn.num_waiting += 1
        self.num_waiting += 1
        is_waiting = True
        reason = f"{waits.COUNT} probes of suspect tasks of {self._env_id}"
        try:
            async with contextlib.AsyncExitStack() as stack:
                with waits.shared(reason, waits_on="env worker"):
                    # The task's lock before a place: a rollout that waits for another one of its task must not hold a
                    # place.
                    await stack.enter_async_context(turn.lock)
                    await self._slots.acquire()
                place = contextlib.ExitStack()
                place.callback(self._slots.release)
                stack.enter_context(place)
                self.num_waiting -= 1
                is_waiting = False
                yield place.close  # once, however often it is called
        finally:
            self.num_waiting -= is_waiting
            turn.num_waiting -= 1
            if not turn.num_waiting:
                del self._turns[task_id]

    @contextlib.asynccontextmanager
    async def worker(self, give_place: Callable[[], None] = lambda: None) -> AsyncIterator[WorkerProcess]:
        """Yield a probe worker that plays one task alone during the block: an idle one, the spare, or a new one.

        `give_place` is called while the task is blocked. Raises EnvLoadError or OSError if none can be started.
        """
        if self._retirement is not None:
            self._retirement.cancel()
        worker = await self._take()
        self._busy.add(worker)
        self.num_probing += 1
        if self.num_waiting:
            self._start_spare()
        attending = asyncio.create_task(self._attend(worker, give_place), name=f"attend {worker.name}")
        try:
            yield worker
        finally:
            attending.cancel()
            self.num_probing -= 1
            self._busy.discard(worker)
            if worker.is_ready and not worker.num_playing:
                self._idle.append(worker)
            elif not worker.is_ended:
                self._end([worker])  # it may still play what was cancelled: nobody plays alone there
            self._retire_later()

    async def _attend(self, worker: WorkerProcess, give_place: Callable[[], None]) -> None:
        """Look once a second whether the worker's task is blocked, until cancelled.

        While it is, call `on_blocked`, and `give_place` unless too many probes play.
        """
        # unregistered wait: a periodic look; the blocked worker is a wait of its own
        while True:
            await asyncio.sleep(_LOOK_S)
            if worker.standing_s < STANDS_S:
                continue
            if self.num_probing < self._limit * MOST_STANDING:
                give_place()
            self._on_standing()

    def num_blocked(self, *, at_least_s: float, at: Callable[[str], bool]) -> int:
        """Return how many probed tasks have waited in one call for `at_least_s` or longer.

        Counted are those alone for whose line of the environment's code `at` returns True.
        """
        return sum(worker.standing_s >= at_least_s and at(worker.echo.place) for worker in self._busy)

    async def close(self) -> None:
        """End every probe worker and wait for it; plays in progress there lose their worker."""
        if self._retirement is not None:
            self._retirement.cancel()
        if self.spare is not None:
            self.spare.cancel()
            await asyncio.gather(self.spare, return_exceptions=True)
        self._end([*self._idle, *self._busy])
        self._idle.clear()
        await asyncio.gather(*self._ending)

    async def _take(self) -> WorkerProcess:
        """Return an idle probe worker, the spare once it has started, or a new one. Raises EnvLoadError and OSError."""
        if not any(worker.is_ready for worker in self._idle) and self.spare is not None:
            await asyncio.wait({self.spare})
        while self._idle:
            worker = self._idle.pop()
            if worker.is_ready:
                return worker
        return await self._start()

    def _start_spare(self) -> None:
        """Start one more probe worker in the background, unless one is idle or starting."""
        if self._idle or (self.spare is not None and not self.spare.done()):
            return
        self.spare = asyncio.create_task(self._make_spare(), name=f"spare probe {self._env_id}")

    async def _make_spare(self) -> None:
        """Start a probe worker and add it to the idle ones; a failure is only logged."""
        try:
            self._idle.append(await self._start())
            self._retire_later()  # the rollout that it was started for may be gone
        except (EnvLoadError, OSError) as error:
            # The next probe starts one, and fails with this error if it comes again.
            logger.warning("no spare probe worker", extra={"env": self._env_id, "error": str(error)})

    def _retire_later(self) -> None:
        """Have idle probe workers end after `idle_s`, counted from now."""
        if self._retirement is not None:
            self._retirement.cancel()
        self._retirement = asyncio.get_running_loop().call_later(self._idle_s, self._retire)

    def _retire(self) -> None:
        """End the idle probe workers, unless a task is probed or waits for it."""
        if not self.num_probing and not self.num_waiting:
            self._end(self._idle)
            self._idle = []

    def _end(self, workers: list[WorkerProcess]) -> None:
        """Close these workers in the background."""
        for worker in workers:
            ending = asyncio.create_task(worker.close(), name=f"end {worker.name}")
            self._ending.add(ending)
            ending.add_done_callback(self._ending.discard)


# Which tasks of an environment end its workers: suspects, those that were cleared, and those that are quarantined.
#
# This is bookkeeping alone; `EnvPool` and `Probes` act on it.
#
# * A task is tried when a rollout of it ended in a living worker (cleared), or when it ended a worker that played it
#   alone (quarantined). The last `WINDOW` trials decide about the environment.
# * While some of them were quarantined the environment is dangerous: tasks that were not tried yet are suspects from
#   the start, so that they end probe workers instead of the workers in which everything else is played.
# * When most of them were quarantined it is hopeless: no more of its tasks are played.

WINDOW = 32
"""The number of last trials that count."""
DANGEROUS = 2
"""Number of quarantined tasks among them from which on untried tasks are probed."""
HOPELESS = 8
"""Number of quarantined tasks among them from which on the environment is given up, if they are more than half."""
RECENT_S = 60.0
"""How long suspects of a blocked worker make the environment dangerous: they may never be played again."""
# Ids of tried tasks, 100 bytes each; one that falls out is tried again where the environment is dangerous.
MAX_CLEARED = 50_000
_MAX_NAMED = 8


class TaskTrials:
    """The trials of one environment's tasks."""

    def __init__(self) -> None:
        """Begin without any task tried or suspected."""
        self._suspects: set[str] = set()
        self._blocked_at: dict[str, float] = {}  # when their worker was ended
        self._cleared: OrderedDict[str, None] = OrderedDict()
        self._quarantined: dict[str, str] = {}
        self._ends: dict[str, str] = {}
        self._trials: deque[bool] = deque(maxlen=WINDOW)

    @property
    def suspects(self) -> frozenset[str]:
        """Return the ids of tasks that were in flight when a worker died, and were neither cleared nor quarantined
        since.
        """
        return frozenset(self._suspects)

    @property
    def quarantined(self) -> dict[str, str]:
        """Return why each quarantined task is not played any more, by the task's id."""
        return dict(self._quarantined)

    @property
    def is_dangerous(self) -> bool:
        """Return whether even tasks that were not tried yet are to be played alone.

        Untried tasks are played alone if several of the last tried ones were quarantined, or a worker was blocked
        lately.
        """
        now = time.monotonic()
        return sum(self._trials) >= DANGEROUS or any(now - at < RECENT_S for at in self._blocked_at.values())

    def quarantine_reason(self, task_id: str) -> str:
        """Return why the task is quarantined; "" if it is not."""
        return self._quarantined.get(task_id, "")

    def is_suspect(self, task_id: str) -> bool:
        """Return whether the task is to be played alone.

        Played alone are tasks that were in flight when a worker died, and untried ones while the environment is
        dangerous (`is_dangerous`).
        """
        return task_id in self._suspects or (self.is_dangerous and task_id not in self._cleared)

    def suspect(self, task_id: str, *, was_blocked: bool = False) -> None:
        """Have a task played alone from now on, because it was in flight when its worker died.

        `was_blocked` is whether the worker was killed because its event loop was blocked.
        """
        self._suspects.add(task_id)
        if was_blocked:
            self._blocked_at[task_id] = time.monotonic()

    def clear(self, task_id: str) -> None:
        """Count a task as tried and well, because its rollout ended and the worker lives; it is no suspect any more."""
        self._suspects.discard(task_id)
        self._blocked_at.pop(task_id, None)
        if task_id not in self._cleared and task_id not in self._quarantined:
            self._trials.append(False)
            self._cleared[task_id] = None
            if len(self._cleared) > MAX_CLEARED:
                self._cleared.popitem(last=False)

    def quarantine(self, task_id: str, reason: str, *, end: str) -> None:
        """Have a task never played again for `reason`, because it ended the worker that played it alone.

        `end` describes how the worker ended.
        """
        self._suspects.discard(task_id)
        self._blocked_at.pop(task_id, None)
        self._cleared.pop(task_id, None)
        if task_id not in self._quarantined:
            self._trials.append(True)
        self._quarantined[task_id] = reason
        self._ends[task_id] = end

    def ended_at(self, place: str) -> bool:
        """Return whether a quarantined task was blocked at that line of the environment's code; False for ""."""
        return bool(place) and any(f"({place})" in end for end in self._ends.values())

    def hopeless(self, *, num_probing: int, num_blocked: int = 0) -> str:
        """Return why the environment is to be given up, because most tasks end their workers; "" if it is not.

        `num_probing` tasks are being played alone. These count as good ones, because a good rollout takes its time, and
        tasks that end their worker at once would be over-represented. `num_blocked` of these tasks have waited for long
        where others were ended, and count as bad once half of `HOPELESS` tasks were quarantined.
        """
        bad, tried = sum(self._trials), len(self._trials)
        # One place that blocks may be a slow server; it counts only where enough tasks have been ended already.
        blocked = num_blocked if 2 * bad >= HOPELESS else 0
        if bad + blocked < HOPELESS or 2 * (bad + blocked) <= tried + num_probing:
            return ""
        named = list(self._ends.items())[-_MAX_NAMED:]
        examples = "; ".join(f"task {task_id}: {end}" for task_id, end in named)
        also = f"; {blocked} more are blocked where these were" if blocked else ""
        return f"{bad} of the last {tried} tasks that were tried ended their worker, alone in it ({examples}){also}"
