"""Where finished rollouts go: into the spool, then into their run's log, and there they are kept until resolved.

The service hands every finished rollout over and counts it against its capacity until it is in the log. While the log
is away (Redis unreachable, or wiped and not yet rebuilt) appending is tried again for as long as it takes, with a wait
that `millrace run why` prints. A rollout is given up only when nobody needs it: its ordinal is resolved, or its run is
over.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field

from millrace.env_server.play_meters import APPEND_SECONDS
from millrace.env_server.spool.appender import MAX_DELAY_S, RunAppender
from millrace.env_server.spool.files import Spool
from millrace.errors import MillraceError, UnavailableError
from millrace.rollouts.types import Rollout
from millrace.runlog.redis.log import RunLog

logger = logging.getLogger(__name__)

# An evaluation has no watermark: its rollouts are read within seconds, and Redis is rebuilt within minutes.
EVAL_KEPT_S = 600.0
# A run of which no heartbeat speaks may be over: the store is asked this often.
_LOOK_FOR_END_S = 60.0
# So may one whose log cannot be opened.
_LOOK_AT_CLOSED_LOG_S = 10.0
_LOOK_TIMEOUT_S = 60.0
_KNOWN_S = 3600.0
"""How long a run without news and without kept rollouts is remembered: longer than any play of it lasts."""


@dataclass(slots=True)
class _KnownRun:
    """What the orchestrator told this env-server of a run. Moments are monotonic."""

    resolved_below: int = 0
    log_instance: str = ""
    has_ended: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    driven_at: float = -math.inf
    """When an orchestrator last showed that it drives the run."""
    looked_for_end_at: float = -math.inf


class RolloutSink:
    """The kept rollouts and the logs of every run that this env-server plays for."""

    def __init__(
        self,
        spool: Spool,
        open_log: Callable[[str], Awaitable[RunLog]],
        has_ended: Callable[[str], Awaitable[bool]],
        *,
        max_delay_s: float = MAX_DELAY_S,
        look_for_end_s: float = _LOOK_FOR_END_S,
    ) -> None:
        self.spool = spool
        self._open_log = open_log
        self._has_ended = has_ended
        self._max_delay_s = max_delay_s
        self._look_for_end_s = look_for_end_s
        self._appenders: dict[str, RunAppender] = {}
        self._runs: dict[str, _KnownRun] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._tidying = asyncio.create_task(self._tidy(), name="spool tidy")
        self._first_looks = [self._first_look(run_uid) for run_uid in spool.run_uids]

    @property
    def num_orphans(self) -> int:
        """Rollouts that wait for their append and belong to no group of this process."""
        return sum(appender.num_orphans for appender in self._appenders.values())

    @property
    def num_pending(self) -> int:
        """Rollouts that wait for their append."""
        return sum(appender.num_pending for appender in self._appenders.values())

    async def append(self, rollout: Rollout) -> bool:
        """Keep, then append, as long as it takes; False if it was given up because nobody needs it any more."""
        run = self._run(rollout.run_uid)
        if run.has_ended or (not rollout.eval_id and rollout.ordinal < run.resolved_below):
            return False
        began = time.monotonic()
        kept = await self.spool.keep(rollout)
        if not self.spool.holds(kept):  # the run ended meanwhile, or its ordinal was resolved
            return False
        is_appended = await self._appender(kept.run_uid).append(kept)
        if is_appended:
            APPEND_SECONDS.observe(time.monotonic() - began)
        return is_appended

    def note_run(self, run_uid: str, resolved_below: int, log_instance: str) -> None:
        """Take what a heartbeat says about a run that goes on; files are deleted in the background."""
        run = self._run(run_uid)
        self.note_driven(run_uid)
        run.log_instance = log_instance or run.log_instance
        run.resolved_below = max(resolved_below, run.resolved_below)
        appender = self._appenders.get(run_uid)
        if appender is None:
            return
        appender.note_instance(log_instance)
        if resolved := appender.give_up(run.resolved_below, all_of_them=False):
            self._in_background(self.spool.drop(resolved))

    def note_driven(self, run_uid: str) -> None:
        """An orchestrator drives the run: if it had ended (as FAILED), `run resume` has reopened it."""
        run = self._run(run_uid)
        run.has_ended, run.driven_at, run.heard_at = False, time.monotonic(), time.monotonic()

    def look_for_end(self, run_uid: str) -> bool:
        """Whether the run has ended. Where that is not known, the store is asked now and then.

        An orchestrator's word that it has ended may be old: another one may have reopened the run since, and drive it.
        """
        run, now = self._run(run_uid), time.monotonic()
        run.heard_at = now
        if not run.has_ended and now - run.looked_for_end_at >= _LOOK_AT_CLOSED_LOG_S:
            run.looked_for_end_at = now
            self._in_background(self._end_if_over(run_uid))
        return run.has_ended

    def end_run(self, run_uid: str) -> None:
        """Forget at once what is kept of a run that has ended; its files are deleted in the background."""
        self._runs[run_uid] = _KnownRun(has_ended=True)
        appender = self._appenders.pop(run_uid, None)
        if appender is None and run_uid not in self.spool.run_uids:
            return
        logger.info("run is over, its spool is emptied", extra={"run": run_uid})
        if appender is not None:
            appender.give_up(0, all_of_them=True)
            self._in_background(appender.close())
        self.spool.forget_run(run_uid)
        self._in_background(self.spool.drop_run(run_uid))

    async def catch_up(self, run_uid: str, log_instance: str, *, timeout_s: float) -> None:
        """Have that copy of the run's log hold everything that is kept of the run.

        UnavailableError (RESYNC_RUNNING) after `timeout_s`; it goes on, so asking again is right.
        """
        self.note_driven(run_uid)
        run = self._run(run_uid)
        run.log_instance = log_instance or run.log_instance
        if run_uid not in self._appenders and not self.spool.of_run(run_uid):
            return  # nothing is kept of it
        appender = self._appender(run_uid)
        try:
            async with asyncio.timeout(timeout_s):
                await appender.caught_up(log_instance)
        except TimeoutError:
            raise UnavailableError(
                f"this env-server is bringing the run's log up to date: {appender.describe_backlog()}",
                reason="RESYNC_RUNNING",
                remedy="ask again until it answers",
            ) from None

    async def recover(self, *, timeout_s: float) -> None:
        """Append what a predecessor left of runs that go on, as far as that is possible in `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*map(asyncio.shield, self._first_looks))
                for appender in list(self._appenders.values()):
                    await appender.caught_up("")
        except TimeoutError:
            logger.warning("the predecessor's rollouts are not all appended yet", extra={"pending": self.num_pending})

    async def close(self) -> None:
        """Stop; what is not appended stays in the spool."""
        for task in (looks := [self._tidying, *self._first_looks]):
            task.cancel()
        closing = (appender.close() for appender in self._appenders.values())
        await asyncio.gather(*looks, *closing, *self._dropping, return_exceptions=True)
        if pending := self.num_pending:
            logger.warning("stopping with unappended rollouts in the spool", extra={"rollouts": pending})
        await self.spool.close()

    def _first_look(self, run_uid: str) -> asyncio.Task[None]:
        """Look whether a predecessor's run has ended; if not, or if that takes long, what is kept is appended."""
        look = asyncio.create_task(self._end_if_over(run_uid), name=f"look for the end of {run_uid}")
        self._appender(run_uid, first_look=look)
        return look

    def _appender(self, run_uid: str, *, first_look: asyncio.Task[None] | None = None) -> RunAppender:
        if run_uid not in self._appenders:
            self._appenders[run_uid] = appender = RunAppender(
                run_uid,
                self.spool,
                self._open_log,
                on_closed_log=lambda: self.look_for_end(run_uid),
                max_delay_s=self._max_delay_s,
                first_look=first_look,
            )
            appender.note_instance(self._run(run_uid).log_instance)
        return self._appenders[run_uid]

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def _run(self, run_uid: str) -> _KnownRun:
        return self._runs.setdefault(run_uid, _KnownRun())

    async def _tidy(self) -> None:
        """Drop evaluations that were read long ago, and runs that ended while nobody told us."""
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            await asyncio.sleep(self._look_for_end_s)
            now = time.monotonic()
            for run_uid in {*self.spool.run_uids, *self._appenders}:
                kept = self.spool.of_run(run_uid)
                old = [k for k in kept if k.is_eval and k.appended_at is not None and now - k.appended_at > EVAL_KEPT_S]
                await self.spool.drop(old)
                if now - self._run(run_uid).heard_at > self._look_for_end_s:
                    await self._end_if_over(run_uid)
            kept_of = {*self.spool.run_uids, *self._appenders}
            old_runs = [uid for uid, run in self._runs.items() if uid not in kept_of and now - run.heard_at > _KNOWN_S]
            for run_uid in old_runs:
                del self._runs[run_uid]

    async def _end_if_over(self, run_uid: str) -> None:
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                is_over = await self._has_ended(run_uid)
        except (MillraceError, TimeoutError) as error:
            logger.warning("cannot see whether the run ended", extra={"run": run_uid, "problem": str(error)})
            return
        if is_over and self._run(run_uid).driven_at < asked_at:  # else it was reopened while the store was asked
            self.end_run(run_uid)
