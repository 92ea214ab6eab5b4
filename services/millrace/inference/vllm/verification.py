"""Background verification: while a version serves, the workers read all of their weights once more.

Between two steps a worker only copies a share, in some tenth of a millisecond; a thread digests it
(`policies/proof.py`). A call that fails is made again, less and less often; as long as that lasts it is a wait of the
replica.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from millrace.backoff import Backoff
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_REST = 4.0  # rests this many times as long as a call took, which waits for a step to end
_MIN_REST_S = 0.02  # longer than a share's digest takes: a fifth of one processor at most
BACKOFF = Backoff(1.0, 60.0)
_OVERDUE_S = 600.0  # so long unverified weights serve, then the wait counts as overdue


class BackgroundVerifier:
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
        """Begin, or go on, until all is verified; call it after each version."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vLLM verification")

    def stop(self) -> None:
        """Verify no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        began_all, num_failed, wait = time.monotonic(), 0, waits.LastingWait()
        try:
            while True:
                took = 0.0
                if self._is_free():
                    began = time.monotonic()
                    try:
                        answers = await self._call()
                    except Exception as error:  # whatever it is, what serves must be verified
                        num_failed += 1
                        retry_s = BACKOFF.after(num_failed)
                        what = f"weights to be verified in the background, which fails: {error}"
                        wait.on(what, waits_on="inference", key="verification", deadline_s=_OVERDUE_S)
                        logger.warning("the weights cannot be verified now", extra={"retry_s": retry_s}, exc_info=True)
                        await asyncio.sleep(retry_s)
                        continue
                    wait.over()
                    num_failed, took = 0, time.monotonic() - began
                    if await self._is_over(answers, began_all):
                        return
                await asyncio.sleep(max(_MIN_REST_S, _REST * took))
        finally:
            wait.over()

    async def _is_over(self, answers: list[Any], began: float) -> bool:
        """Whether nothing is to be verified any more; reports damage."""
        if problem := next((problem for _, problem, _ in answers if problem), ""):
            logger.error("the engine's memory is damaged", extra={"error": problem})
            await self._report(problem)
            return True
        if any(left for left, _, _ in answers):
            return False
        if all(is_proved for *_, is_proved in answers):
            took = round(time.monotonic() - began, 1)
            logger.info("all weights are verified", extra={"seconds": took})
        else:
            logger.warning("the weights are not verified in the background: what they should be is not known")
        return True
