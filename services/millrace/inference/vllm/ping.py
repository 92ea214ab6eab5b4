"""Whether vLLM's engine still answers: it is asked something small all the time, as a step that hangs tells nobody."""

import asyncio
import logging
import time
from typing import Any

log = logging.getLogger(__name__)

_PERIOD_S = 2.0


class Ping:
    """Asks as long as the engine lives. `error` is the answer if it is an error, empty otherwise."""

    def __init__(self, client: Any, *, period_s: float = _PERIOD_S) -> None:
        self._client = client
        self._period_s = period_s
        self._asked_at: float | None = None
        self.error = ""
        self._task = asyncio.create_task(self._run(), name="vLLM ping")

    @property
    def age_s(self) -> float:
        """Seconds that the engine owes an answer for; an error is none."""
        return 0.0 if self._asked_at is None else time.monotonic() - self._asked_at

    def stop(self) -> None:
        """Asks no more."""
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            if self._asked_at is None:
                self._asked_at = time.monotonic()
            try:
                await self._client.get_weight_version()
            except Exception as error:  # the edge of a task that nobody awaits: whatever it is, it must be seen
                if self._client.errored:
                    log.error("vLLM's engine is dead", exc_info=True)
                    return
                if not self.error:
                    log.error("vLLM's engine answers with an error", exc_info=True)
                self.error = f"vLLM's engine answers with an error: {type(error).__name__}: {error}"
            else:
                self._asked_at, self.error = None, ""
            await asyncio.sleep(self._period_s)
