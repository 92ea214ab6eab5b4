"""Has the workers read their weights back beside the serving, until all is read, and tells of damage.

Between two steps a worker only copies a share, in some tenth of a millisecond; a thread digests it (`proved.py`).
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

log = logging.getLogger(__name__)

_REST = 4.0  # rests this many times as long as a call took, which waits for a step to end
_MIN_REST_S = 0.02  # longer than a share's digest takes: a fifth of one processor at most


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
        """Goes on until all is read; call it after each version."""
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="vLLM readback")

    def stop(self) -> None:
        """Reads no more."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        began_all = time.monotonic()
        while True:
            took = 0.0
            if self._is_free():
                began = time.monotonic()
                try:
                    answers = await self._call()
                except Exception:  # the edge of a task that nobody awaits; the next version begins it again
                    log.warning("the weights cannot be read back beside the serving", exc_info=True)
                    return
                took = time.monotonic() - began
                if problem := next((problem for _, problem in answers if problem), ""):
                    log.error("the engine's memory is damaged", extra={"error": problem})
                    await self._report(problem)
                    return
                if not any(left for left, _ in answers):
                    took_all = round(time.monotonic() - began_all, 1)
                    log.info("all weights are read back and as they were proved", extra={"seconds": took_all})
                    return
            await asyncio.sleep(max(_MIN_REST_S, _REST * took))
