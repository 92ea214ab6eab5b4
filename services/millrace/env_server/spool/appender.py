"""Appends the kept rollouts of one run to its log, once each, and again when the log lost them.

One task per run, so nothing here can race with itself. It appends what is pending; whenever the log is another copy
than the one that it compared with last (this process started, Redis was wiped and the log rebuilt, Redis restarted and
may have lost its tail), it first reads which entries that copy holds and makes everything else that is kept pending.

    offer / note_instance ──▶ [ log open? ] ──▶ [ compare if the instance changed ] ──▶ [ append what is pending ] ─┐
                                   ▲ failure: wait 0.2 s to 5 s, visibly                                            │
                                   └────────────────────────────────────────────────────────────────────────────────┘
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

from millrace.backoff import Backoff
from millrace.env_server.spool.files import Kept, Spool
from millrace.errors import LogGoneError, UnavailableError
from millrace.runlog.names import Stream
from millrace.runlog.redis.hashes import read_hashes
from millrace.runlog.redis.log import AppendResult, RunLog
from millrace.telemetry import faults, waits
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.2
MAX_DELAY_S = 5.0
# RunLog retries a lost connection for 30 s; one append is one such round.
_CALL_TIMEOUT_S = 60.0
_FIRST_LOOK_S = 2.0  # a store that answers does so sooner; one that does not is no reason to keep rollouts back
# What one command appends at most; Redis serves nobody else meanwhile.
_APPENDED_TOGETHER = 64
_APPENDED_BYTES = 4 * 2**20


class RunAppender:
    """The appender of one run; `close` ends it."""

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
        """`on_closed_log` is called whenever the log could not be opened: perhaps the run is over.

        `first_look` sees whether the run has ended, which closes the appender; nothing is appended before, for a while.
        """
        self._uid = run_uid
        self._spool = spool
        self._open_log = open_log
        self._on_closed_log = on_closed_log
        self._first_look = first_look
        self._backoff = Backoff(_FIRST_DELAY_S, max_delay_s, spread=(0.5, 1.0))
        self._log: RunLog | None = None
        self._is_gone = False
        """The log must be opened anew, and compared with."""
        self._pending: dict[str, Kept] = {kept.h: kept for kept in spool.of_run(run_uid)}
        self._answers: dict[str, asyncio.Future[bool]] = {}
        self._asked = ""
        """The newest instance of the log that was announced."""
        self._compared = ("", "")
        """What had been asked for when the log was compared with last, and the instance that it was then."""
        self._must_compare = bool(self._pending)
        self._backlog: set[str] = set(self._pending)
        """What the last comparison, or the start, made pending."""
        self._problem = ""
        self._wake = asyncio.Event()
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name=f"append {run_uid}")
        self._wake.set()

    @property
    def num_orphans(self) -> int:
        """Pending rollouts that belong to no group that is being played here: of a predecessor, or of a rebuilt log."""
        return len(self._pending.keys() - self._answers.keys())

    @property
    def num_pending(self) -> int:
        """Rollouts that are not known to be in the log."""
        return len(self._pending)

    async def append(self, kept: Kept) -> bool:
        """Wait until it is in the log; False if it was given up because nobody needs it any more."""
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
        """Note which copy of the log Redis is said to hold."""
        if instance and instance != self._asked:
            self._asked = instance
            self._wake.set()

    def give_up(self, resolved_below: int, *, all_of_them: bool) -> list[Kept]:
        """Forget what is resolved; returns what was kept of it."""
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
        """Return when that copy of the log (or a newer one) holds everything that is kept. The caller bounds the
        wait."""
        self.note_instance(instance)
        self._take_left()
        while self._has_to_compare() or self._backlog:
            await self._changed.wait()

    def _take_left(self) -> None:
        """Make pending what a play did not get to hand over, because it was stopped while that was being kept."""
        for kept in self._spool.of_run(self._uid):
            if kept.appended_at is None and kept.h not in self._pending:
                self._pending[kept.h] = kept
                self._backlog.add(kept.h)
                self._wake.set()

    def describe_backlog(self) -> str:
        """What `caught_up` waits for, in words."""
        what = f"{len(self._backlog)} kept rollouts of run {self._uid} to be appended"
        return f"{what}: {self._problem}" if self._problem else what

    async def close(self) -> None:
        """Stop; what is pending stays in the spool."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def _has_to_compare(self) -> bool:
        return self._must_compare or (bool(self._asked) and self._asked not in self._compared)

    async def _run(self) -> None:
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
        first = next(iter(self._pending.values()), None)
        if first is None:
            return f"comparison with the log of run {self._uid}: {self._problem}"
        more = f" and {len(self._pending) - 1} more" if len(self._pending) > 1 else ""
        return f"append of rollout {first.ordinal}{more}: {self._problem}"

    async def _round(self) -> str:
        """Append some of the pending rollouts; the problem in words, or ""."""
        try:
            log = await self._opened()
            if self._has_to_compare():
                await self._compare(log)
            return await self._append(log, self._next())
        except LogGoneError as error:
            self._is_gone = True
            return str(error)
        # Whatever it is, giving up here would lose finished rollouts without a word.
        except Exception as error:  # noqa: BLE001 - said in the log and in the wait, then tried again
            return f"{type(error).__name__}: {error}"

    def _next(self) -> list[Kept]:
        """The oldest pending rollouts that one command may append; at least one."""
        batch, num_bytes = [], 0
        for kept in itertools.islice(self._pending.values(), _APPENDED_TOGETHER):
            num_bytes += kept.size_bytes
            if batch and num_bytes > _APPENDED_BYTES:
                break
            batch.append(kept)
        return batch

    async def _opened(self) -> RunLog:
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            if self._log is None:
                self._log = await self._open_log(self._uid)
            elif self._is_gone:
                await self._log.reopen()
                self._must_compare = True
        self._is_gone = False
        return self._log

    async def _compare(self, log: RunLog) -> None:
        """Make pending what is kept and not in this copy of the log."""
        asked = self._asked
        async with asyncio.timeout(_CALL_TIMEOUT_S):
            instance = await log.read_instance()
            kept = self._spool.of_run(self._uid)
            held = await read_hashes(log, Stream.ROLLOUTS) if kept else {}
        missing = 0
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
        """One attempt for all of them; the problem in words, or "" if they are settled."""
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
        except Exception as error:  # noqa: BLE001 - said in the log and in the wait, then tried again
            return await self._after_failure(log, appended, error)
        if result in (AppendResult.OK, AppendResult.ALREADY):
            for kept in appended:
                self._spool.note_appended(kept)
                self._settle(kept.h, is_appended=True)
            return ""
        self._is_gone = True  # wiped, or rebuilt in another generation
        return f"the log answered {result.name}"

    async def _after_failure(self, log: RunLog, batch: Sequence[Kept], error: Exception) -> str:
        """One that is refused must not hold the others up: each is tried alone, and goes behind the others."""
        if len(batch) > 1 and not isinstance(error, UnavailableError | TimeoutError):
            problems = [await self._append(log, [kept]) for kept in batch]
            return next(filter(None, problems), "")
        for kept in batch:
            if kept.h in self._pending:
                self._pending[kept.h] = self._pending.pop(kept.h)
        return f"{type(error).__name__}: {error}"

    def _settle(self, h: str, *, is_appended: bool) -> None:
        self._pending.pop(h, None)
        self._backlog.discard(h)
        answer = self._answers.get(h)
        if answer is not None and not answer.done():
            answer.set_result(is_appended)
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
