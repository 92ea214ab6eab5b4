"""Writes finished rollouts into the spool, then appends them to their run's log; the spool keeps them until resolved.

A rollout counts against the env-server's capacity until it is in the log. While the log is away (Redis unreachable, or
wiped and not yet rebuilt) appending is tried again for as long as it takes, with a wait that `millrace run why` prints.
A rollout is given up only when nobody needs it: its ordinal is resolved, or its run is over.
"""

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from millrace.backoff import Backoff
from millrace.env_server.play_meters import APPEND_SECONDS
from millrace.env_server.spool import Kept, Spool
from millrace.errors import LogGoneError, MillraceError, UnavailableError
from millrace.rollouts.types import Rollout
from millrace.runlog.names import Stream
from millrace.runlog.redis.log import AppendResult, RunLog, read_hashes
from millrace.telemetry import faults, waits
from millrace.telemetry.faults import Point

# The appender of one run: it appends the kept rollouts to the log, once each, and again when the log has lost them.
#
# It is one task per run, so nothing here can race with itself. It appends the pending rollouts. Whenever the log is
# another copy than the one that it compared with last (this process started, Redis was wiped and the log rebuilt, Redis
# restarted and may have lost its tail), it first reads which entries that copy has, and makes all other kept rollouts
# pending.
#
#     offer / note_instance ──▶ [ log open? ] ──▶ [ compare if the instance changed ] ──▶ [ append what is pending ] ─┐
#                                    ▲ failure: wait 0.2 s to 5 s, visibly                                            │
#                                    └────────────────────────────────────────────────────────────────────────────────┘

_FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
# RunLog retries a lost connection for 30 s; one append is one such round.
_CALL_TIMEOUT_S = 60.0
_FIRST_LOOK_S = 2.0  # a store that answers does so sooner; one that does not may not delay rollouts longer
# The most that one command appends; Redis serves no other client meanwhile.
_APPENDED_TOGETHER = 64
_APPENDED_BYTES = 4 * 2**20


class RunAppender:
    """Appends the kept rollouts of one run, in a task that `close` ends."""

    def __init__(
        self,
        run_uid: str,
        spool: Spool,
        open_log: Callable[[str], Awaitable[RunLog]],
        *,
        on_closed_log: Callable[[], object],
        max_delay_s: float = MAX_DELAY_S,
        first_look: asyncio.Task[None] | None = None,
    ) -> None:
        """Start a task that appends the rollouts of the run that the spool has and gets.

        `open_log` opens the run's log. `on_closed_log` is called when an append fails and the log is not open, because
        the run may be over. `first_look`, if given, finds out whether the run has ended; nothing is appended until it
        is done, or `_FIRST_LOOK_S` are over. `max_delay_s` is the longest pause between tries.
        """
        self._uid = run_uid
        self._spool = spool
        self._open_log = open_log
        self._on_closed_log = on_closed_log
        self._first_look = first_look
        self._backoff = Backoff(_FIRST_DELAY_S, max_delay_s, spread=(0.5, 1.0))
        self._log: RunLog | None = None
        self._is_gone = False
        """Whether the log must be opened again, and compared with the spool."""
        self._pending: dict[str, Kept] = {kept.h: kept for kept in spool.of_run(run_uid)}
        self._answers: dict[str, asyncio.Future[bool]] = {}
        self._asked = ""
        """The newest instance of the log that was announced."""
        self._compared = ("", "")
        """Of the last comparison: the instance that had been announced, and the one that the log was."""
        # A predecessor may have appended some of them: the log is asked which.
        self._must_compare = bool(self._pending)
        self._backlog: set[str] = set(self._pending)
        """Rollouts that the last comparison, or the start, made pending."""
        self._problem = ""
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"append {run_uid}")
        self._wake.set()

    @property
    def num_orphans(self) -> int:
        """Return the number of the run's pending rollouts that no caller of `append` waits for, such as a
        predecessor's.
        """
        return len(self._pending.keys() - self._answers.keys())

    @property
    def num_pending(self) -> int:
        """Return the number of the run's rollouts here that are not known to be in the log."""
        return len(self._pending)

    async def append(self, kept: Kept) -> bool:
        """Wait until the rollout is in the log, however long that takes, and return True.

        Returns False if it was given up because nobody needs it.
        """
        if not self._spool.holds(kept):
            return False
        if kept.appended_at is not None and not self._has_to_compare():  # the first round takes all that is kept
            return True
        answer = self._answers[kept.h] = asyncio.get_running_loop().create_future()
        self._pending[kept.h] = kept
        self._wake.set()
        try:
            return await answer
        finally:
            self._answers.pop(kept.h, None)

    def note_instance(self, instance: str) -> None:
        """Note which copy of the log Redis has, as the orchestrator reports it ("" is unknown).

        If it is another copy than before, the spool is compared with it.
        """
        if instance and instance != self._asked:
            self._asked = instance
            self._wake.set()

    def give_up(self, resolved_below: int, *, all_of_them: bool) -> list[Kept]:
        """Stop appending the training rollouts below the ordinal `resolved_below`, or all of the run's with
        `all_of_them`.

        Returns them, those that are appended already included; they stay in the spool. Calls of `append` that wait for
        one return False.
        """
        gone = [
            kept
            for kept in self._spool.of_run(self._uid)
            if all_of_them or (not kept.is_eval and kept.ordinal < resolved_below)
        ]
        if lost := [kept.ordinal for kept in gone if kept.h in self._pending]:
            fields = {"run": self._uid, "rollouts": len(lost), "first_ordinal": lost[0]}
            logger.warning("finished rollouts given up: not wanted any more", extra=fields)
        for kept in gone:
            self._settle(kept.h, is_appended=False)
        return gone

    async def caught_up(self, instance: str) -> None:
        """Wait until the copy `instance` of the log, or a newer one, has every rollout of the run that the spool keeps.

        With "" that is the copy that was reported last. There is no time limit: the caller has one.
        """
        self.note_instance(instance)
        self._take_left()
        while self._has_to_compare() or self._backlog:
            await self._changed.wait()

    def _take_left(self) -> None:
        """Make those rollouts of the spool pending that were never given to `append`, because their play was
        cancelled while they were written.
        """
        for kept in self._spool.of_run(self._uid):
            if kept.appended_at is None and kept.h not in self._pending:
                self._pending[kept.h] = kept
                self._backlog.add(kept.h)
                self._wake.set()

    def describe_backlog(self) -> str:
        """Return as text how many rollouts `caught_up` waits for, and the last problem."""
        what = f"{len(self._backlog)} kept rollouts of run {self._uid} to be appended"
        return f"{what}: {self._problem}" if self._problem else what

    async def close(self) -> None:
        """Stop the appending task; pending rollouts stay in the spool."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _has_to_compare(self) -> bool:
        """Return whether the log may be another copy than the one with which the spool was compared last."""
        return self._must_compare or (bool(self._asked) and self._asked not in self._compared)

    async def _run(self) -> None:
        """Append what is pending, round by round, until cancelled; wait between failed rounds, visibly."""
        num_failed = 0
        wait = waits.LastingWait()
        with waits.of_run(self._uid):
            if self._first_look is not None:
                await asyncio.wait([self._first_look], timeout=_FIRST_LOOK_S)
            try:
                while True:
                    if not self._pending and not self._has_to_compare():
                        self._wake.clear()
                        await self._wake.wait()
                        continue
                    self._problem = await self._round()
                    self._notify()
                    if not self._problem:
                        num_failed = 0
                        wait.over()
                        continue
                    logger.warning("rollouts kept, append failed", extra={"run": self._uid, "problem": self._problem})
                    wait.on(self._describe_pending(), waits_on="redis", key="append")
                    if self._log is None or self._is_gone:
                        self._on_closed_log()
                    num_failed += 1
                    await asyncio.sleep(self._backoff.after(num_failed))
            finally:
                wait.over()

    def _describe_pending(self) -> str:
        """Return as text what cannot be appended or compared, and the problem."""
        first = next(iter(self._pending.values()), None)
        if first is None:
            return f"comparison with the log of run {self._uid}: {self._problem}"
        more = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
        return f"append of rollout {first.ordinal}{more}: {self._problem}"

    async def _round(self) -> str:
        """Open the log, compare it with the spool if necessary, and append a batch; return the problem, or ""."""
        try:
            log = await self._opened()
            if self._has_to_compare():
                await self._compare(log)
            return await self._append(log, self._next())
        except LogGoneError as error:
            self._is_gone = True
            return str(error)
        # Whatever the error is, to give up here would silently lose finished rollouts.
        except Exception as error:  # noqa: BLE001 - reported in the log and in the wait, then tried again
            return f"{type(error).__name__}: {error}"

    def _next(self) -> list[Kept]:
        """Return the oldest pending rollouts that one command may append; at least one."""
        batch, num_bytes = [], 0
        for kept in itertools.islice(self._pending.values(), _APPENDED_TOGETHER):
            num_bytes += kept.size_bytes
            if batch and num_bytes > _APPENDED_BYTES:
                break
            batch.append(kept)
        return batch

    async def _opened(self) -> RunLog:
        """Return the run's log, opened, or opened again after it was gone."""
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            if self._log is None:
                self._log = await self._open_log(self._uid)
            elif self._is_gone:
                await self._log.reopen()
                self._must_compare = True
        self._is_gone = False
        return self._log

    async def _compare(self, log: RunLog) -> None:
        """Read which of the run's kept rollouts the log has.

        Those are marked as appended; the others become pending.
        """
        # Read before the first await: an instance that is announced meanwhile has to be compared with again.
        asked = self._asked
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            # The instance before the hashes: should another copy of the log come in between, it is compared once more.
            # In the other order it would count as compared, by the hashes of the copy before it.
            instance = await log.read_instance()
            kept = self._spool.of_run(self._uid)
            held = await read_hashes(log, Stream.ROLLOUTS) if kept else {}
        missing = 0
        # Listed again after the reads: some may have been dropped meanwhile.
        for each in self._spool.of_run(self._uid):
            if each.h in held:
                self._spool.note_appended(each)
                self._settle(each.h, is_appended=True)
            elif each.h not in self._pending or each.h in self._backlog:
                missing += 1
                self._pending[each.h] = each
                self._backlog.add(each.h)
        self._compared, self._must_compare = (asked, instance), False
        fields = {"run": self._uid, "instance": instance, "kept": len(kept), "missing": missing}
        logger.info("spool compared with the log", extra=fields)

    async def _append(self, log: RunLog, batch: Sequence[Kept]) -> str:
        """Append the batch to the log once.

        Returns the problem, or "" if each rollout is settled: appended, or not readable in the spool.
        """
        data: dict[str, bytes] = {}
        for kept in batch:
            read = await self._spool.read(kept)
            if read is None or kept.h not in self._pending:  # damaged, or given up
                self._settle(kept.h, is_appended=False)
            else:
                data[kept.h] = read
        appended = [kept for kept in batch if kept.h in data]
        if not appended:
            return ""
        try:
            for kept in appended:
                faults.reach(Point.ENV_SERVER_BEFORE_APPEND, step=kept.planned_step)
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                result = await log.append_rollouts(list(data.values()))
            for kept in appended:
                faults.reach(Point.ENV_SERVER_AFTER_APPEND, step=kept.planned_step)
        except LogGoneError as error:
            self._is_gone = True
            return str(error)
        except Exception as error:  # noqa: BLE001 - reported in the log and in the wait, then tried again
            return await self._after_failure(log, appended, error)
        # ALREADY: an earlier append has arrived, and its answer was lost.
        if result in (AppendResult.OK, AppendResult.ALREADY):
            for kept in appended:
                self._spool.note_appended(kept)
                self._settle(kept.h, is_appended=True)
            return ""
        self._is_gone = True  # wiped, or rebuilt in another generation
        return f"the log answered {result.name}"

    async def _after_failure(self, log: RunLog, batch: Sequence[Kept], error: Exception) -> str:
        """Try each rollout of a batch alone that the log has refused with `error`, and return the problem, or "".

        If the log was unavailable, or there is only one, the rollouts become the last of those pending, so that they do
        not delay others.
        """
        # One rollout that the log refuses must not keep the others of its batch from being appended.
        if len(batch) > 1 and not isinstance(error, UnavailableError | TimeoutError):
            problems = [await self._append(log, [kept]) for kept in batch]
            return next(filter(None, problems), "")
        for kept in batch:
            if kept.h in self._pending:
                self._pending[kept.h] = self._pending.pop(kept.h)
        return f"{type(error).__name__}: {error}"

    def _settle(self, h: str, *, is_appended: bool) -> None:
        """Remove the rollout with the hash `h` from those pending, and give its waiting caller the answer
        `is_appended`.
        """
        self._pending.pop(h, None)
        self._backlog.discard(h)
        answer = self._answers.get(h)
        if answer is not None and not answer.done():
            answer.set_result(is_appended)
        self._notify()

    def _notify(self) -> None:
        """Wake all that wait in `caught_up`, which then look again."""
        # A new event for the next change, so that each waiter wakes once and none misses a change.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


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
    """What the orchestrator has reported about a run. Times are monotonic."""

    resolved_below: int = 0
    log_instance: str = ""
    has_ended: bool = False
    heard_at: float = field(default_factory=time.monotonic)
    driven_at: float = -math.inf
    """When an orchestrator last showed that it drives the run."""
    looked_for_end_at: float = -math.inf


class RolloutSink:
    """Keeps and appends the rollouts of every run that this env-server plays for."""

    def __init__(
        self,
        spool: Spool,
        open_log: Callable[[str], Awaitable[RunLog]],
        has_ended: Callable[[str], Awaitable[bool]],
        *,
        max_delay_s: float = MAX_DELAY_S,
        look_for_end_s: float = _LOOK_FOR_END_S,
    ) -> None:
        """Take over the rollouts in the spool, of every run, and begin to append them.

        `open_log` opens the log of a run by uid, and `has_ended` asks the store whether the run has ended.
        `max_delay_s` is the longest pause between tries to append, `look_for_end_s` the pause between looks for ended
        runs.
        """
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
        """Return the number of unappended rollouts that no play of this process waits for."""
        return sum(appender.num_orphans for appender in self._appenders.values())

    @property
    def num_pending(self) -> int:
        """Return the number of rollouts of all runs that wait for their append."""
        return sum(appender.num_pending for appender in self._appenders.values())

    async def append(self, rollout: Rollout) -> bool:
        """Write a finished rollout into the spool and append it to its run's log, however long that takes; return True.

        Returns False if it was given up because nobody needs it: the run has ended, or its ordinal is resolved.
        """
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
        """Take a heartbeat's news of a run that goes on.

        Its rollouts below the ordinal `resolved_below` are dropped, their files in the background. If `log_instance` is
        another copy of the log than before, the spool is compared with it.
        """
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
        """Note that an orchestrator drives the run now; a run noted as ended has then been reopened."""
        run = self._run(run_uid)
        run.has_ended, run.driven_at, run.heard_at = False, time.monotonic(), time.monotonic()

    def look_for_end(self, run_uid: str) -> bool:
        """Return whether the run is known to have ended.

        If not, the store is asked in the background, at most every ten seconds, and what is kept of an ended run is
        dropped. The orchestrator's report of an end does not suffice, because another one may have reopened the run
        since.
        """
        run, now = self._run(run_uid), time.monotonic()
        run.heard_at = now
        if not run.has_ended and now - run.looked_for_end_at >= _LOOK_AT_CLOSED_LOG_S:
            run.looked_for_end_at = now
            self._in_background(self._end_if_over(run_uid))
        return run.has_ended

    def end_run(self, run_uid: str) -> None:
        """Drop all rollouts of a run that has ended, and delete its files in the background; later ones are not
        kept.
        """
        # First, so that no rollout that ends from here on is kept.
        self._runs[run_uid] = _KnownRun(has_ended=True)
        appender = self._appenders.pop(run_uid, None)
        if appender is None and run_uid not in self.spool.run_uids:
            return
        logger.info("run is over, its spool is emptied", extra={"run": run_uid})
        if appender is not None:
            # Before the spool forgets the run: `give_up` settles what the spool lists.
            appender.give_up(0, all_of_them=True)
            self._in_background(appender.close())
        self.spool.forget_run(run_uid)
        self._in_background(self.spool.drop_run(run_uid))

    async def catch_up(self, run_uid: str, log_instance: str, *, timeout_s: float) -> None:
        """Wait until the copy `log_instance` of the run's log has every rollout that is kept of the run.

        Raises UnavailableError (RESYNC_RUNNING) after `timeout_s`; appending goes on, so the caller may ask again.
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
        """Append the rollouts that a predecessor has left in the spool, of runs that have not ended, for at most
        `timeout_s`.

        What is not appended by then is appended later.
        """
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded, because the looks go on after this time-out.
                await asyncio.gather(*map(asyncio.shield, self._first_looks))
                for appender in list(self._appenders.values()):
                    await appender.caught_up("")
        except TimeoutError:
            logger.warning("the predecessor's rollouts are not all appended yet", extra={"pending": self.num_pending})

    async def close(self) -> None:
        """Stop all appending and close the spool, which keeps what is not appended."""
        for task in (looks := [self._tidying, *self._first_looks]):
            task.cancel()
        closing = (appender.close() for appender in self._appenders.values())
        await asyncio.gather(*looks, *closing, *self._dropping, return_exceptions=True)
        if pending := self.num_pending:
            logger.warning("stopping with unappended rollouts in the spool", extra={"rollouts": pending})
        await self.spool.close()

    def _first_look(self, run_uid: str) -> asyncio.Task[None]:
        """Start a task that looks whether a predecessor's run has ended, and the run's appender, which waits for
        that; return the task.
        """
        look = asyncio.create_task(self._end_if_over(run_uid), name=f"look for the end of {run_uid}")
        self._appender(run_uid, first_look=look)
        return look

    def _appender(self, run_uid: str, *, first_look: asyncio.Task[None] | None = None) -> RunAppender:
        """Return the run's appender, made and started if there is none; a new one waits for `first_look`."""
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
        """Run the coroutine in a task, for which `close` waits."""
        task = asyncio.create_task(work)
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)

    def _run(self, run_uid: str) -> _KnownRun:
        """Return what is known of the run; nothing at first."""
        return self._runs.setdefault(run_uid, _KnownRun())

    async def _tidy(self) -> None:
        """Drop appended rollouts of evaluations after `EVAL_KEPT_S`, and what is kept of runs without news that have
        ended.

        Repeats that every `look_for_end_s` until cancelled.
        """
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
        """Ask the store whether the run has ended, and if so drop its rollouts; a failed look is only logged.

        A run that an orchestrator drives again since is left as it is.
        """
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                is_over = await self._has_ended(run_uid)
        except (MillraceError, TimeoutError) as error:
            logger.warning("cannot see whether the run ended", extra={"run": run_uid, "problem": str(error)})
            return
        if is_over and self._run(run_uid).driven_at < asked_at:  # else it was reopened while the store was asked
            self.end_run(run_uid)
