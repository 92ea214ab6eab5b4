"""Has the workers read their weights back beside the serving, until all is read, and tells of damage.

Between two steps a worker only copies a share, in some tenth of a millisecond; a thread digests it (`proved.py`). A
call that fails is made again, less and less often; as long as that lasts it is a wait of the replica.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_REST = 4.0  # rests this many times as long as a call took, which waits for a step to end
_MIN_REST_S = 0.02  # longer than a share's digest takes: a fifth of one processor at most
_FIRST_RETRY_S, _LAST_RETRY_S = 1.0, 60.0
_OVERDUE_S = 600.0  # so long unread weights serve, then the wait counts as overdue


class BesideReader:
    """`call` asks every worker for a step; `is_free` says whether a step delays nobody; `report` is told of damage."""

    def __init__(
        self,
        call: Callable[[], Awaitable[list[Any]]],
        *,
        is_free: Callable[[], bool],
        report: Callable[[str], Awaitable[None]],
    ) -> None:
        self._call = call
        self._is_free = is_free
        self._report = report
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Go on until all is read; call it after each version."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vLLM readback")

    def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        began_all, retry_s, wait = time.monotonic(), 0.0, waits.LastingWait()
        try:
            while True:
                took = 0.0
                if self._is_free():
                    began = time.monotonic()
                    try:
                        answers = await self._call()
                    except Exception as error:  # whatever it is, what serves must be read back
                        retry_s = min(max(_FIRST_RETRY_S, 2 * retry_s), _LAST_RETRY_S)
                        what = f"weights to be read back beside the serving, which fails: {error}"
                        wait.on(what, waits_on="inference", key="readback", deadline_s=_OVERDUE_S)
                        logger.warning("the weights cannot be read back now", extra={"retry_s": retry_s}, exc_info=True)
                        await asyncio.sleep(retry_s)
                        continue
                    wait.over()
                    retry_s, took = 0.0, time.monotonic() - began
                    if await self._is_over(answers, began_all):
                        return
                await asyncio.sleep(max(_MIN_REST_S, _REST * took))
        finally:
            wait.over()

    async def _is_over(self, answers: list[Any], began: float) -> bool:
        """Whether nothing is to be read any more, and says why."""
        if problem := next((problem for _, problem, _ in answers if problem), ""):
            logger.error("the engine's memory is damaged", extra={"error": problem})
            await self._report(problem)
            return True
        if any(left for left, _, _ in answers):
            return False
        if all(is_proved for *_, is_proved in answers):
            took = round(time.monotonic() - began, 1)
            logger.info("all weights are read back and as they were proved", extra={"seconds": took})
        else:
            logger.warning("the weights are not read back beside the serving: what they should be is not known")
        return True
