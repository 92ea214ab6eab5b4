"""Appends finished rollouts to their run's stream, and keeps them until they are there.

A rollout may have cost minutes of GPU time. While the log is away (Redis unreachable, or wiped and not yet rebuilt) it
stays in memory and the append is repeated, with a wait that `millrace run why` prints. It is given up only if nobody
wants it any more: its ordinal is resolved, its group was cancelled, or the run is deleted. The service counts a rollout
against its capacity until it is appended, so memory is bounded by the capacity.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

from millrace.errors import LogGoneError, NotFoundError
from millrace.internal.v1 import rollout_pb2
from millrace.runlog.log import AppendResult
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.2
_MAX_DELAY_S = 5.0
# RunLog retries a lost connection for 30 s; one append is one such round.
_APPEND_TIMEOUT_S = 60.0


class RolloutLog(Protocol):
    """What the sink needs of a run's log."""

    async def append_rollout(self, data: bytes) -> AppendResult:
        """Append one encoded rollout."""
        ...


class RolloutSink:
    """The logs of the runs that this env-server plays for."""

    def __init__(self, open_log: Callable[[str], Awaitable[RolloutLog]], *, max_delay_s: float = _MAX_DELAY_S) -> None:
        self._open_log = open_log
        self._max_delay_s = max_delay_s
        self._logs: dict[str, RolloutLog] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self.num_waiting = 0

    def forget(self, run_uid: str) -> None:
        """Open the run's log anew at the next append."""
        self._logs.pop(run_uid, None)
        self._opening.pop(run_uid, None)

    async def append(self, rollout: rollout_pb2.Rollout, *, is_wanted: Callable[[], bool]) -> bool:
        """Append, as long as it takes; False if the rollout was given up because it is not wanted any more."""
        data = rollout.SerializeToString(deterministic=True)
        if problem := await self._try(rollout.run_uid, data):
            return await self._insist(rollout, data, problem, is_wanted)
        return True

    async def _insist(
        self, rollout: rollout_pb2.Rollout, data: bytes, problem: str, is_wanted: Callable[[], bool]
    ) -> bool:
        where = {"run": rollout.run_uid, "ordinal": rollout.ordinal, "member": rollout.member}
        delay_s = _FIRST_DELAY_S
        self.num_waiting += 1
        try:
            with waits.waiting(f"append of rollout {rollout.ordinal}/{rollout.member}", waits_on="redis") as wait:
                while problem:
                    if not is_wanted():
                        logger.warning("finished rollout given up: not wanted any more", extra=where)
                        return False
                    logger.warning("rollout kept, append failed", extra={**where, "problem": problem})
                    wait.update(reason=f"append of rollout {rollout.ordinal}/{rollout.member}: {problem}")
                    await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                    delay_s = min(2 * delay_s, self._max_delay_s)
                    problem = await self._try(rollout.run_uid, data)
        finally:
            self.num_waiting -= 1
        logger.info("kept rollout appended", extra=where)
        return True

    async def _try(self, run_uid: str, data: bytes) -> str:
        """One attempt; the problem in words, or "" if the rollout is in the log."""
        try:
            async with asyncio.timeout(_APPEND_TIMEOUT_S):
                log = await self._log(run_uid)
                result = await log.append_rollout(data)
        except (LogGoneError, NotFoundError) as error:
            self.forget(run_uid)
            return str(error)
        # Whatever it is, giving up here would lose a finished rollout without a word.
        except Exception as error:  # noqa: BLE001 - said in the log and in the wait, then tried again
            return f"{type(error).__name__}: {error}"
        match result:
            case AppendResult.OK | AppendResult.ALREADY:
                return ""
            case _:
                # The log was wiped or rebuilt: its generation must be read again.
                self.forget(run_uid)
                return f"the log answered {result.name}"

    async def _log(self, run_uid: str) -> RolloutLog:
        async with self._opening.setdefault(run_uid, asyncio.Lock()):
            if run_uid not in self._logs:
                self._logs[run_uid] = await self._open_log(run_uid)
            return self._logs[run_uid]
