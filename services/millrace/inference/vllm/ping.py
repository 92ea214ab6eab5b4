"""Whether vLLM's engine still answers: it is asked something small all the time, as a step that hangs tells nobody."""

import asyncio
import logging
import time
from typing import Any

from millrace.inference.vllm.ranks import Ranks

logger = logging.getLogger(__name__)

_PERIOD_S = 2.0


class Ping:
    """Asks as long as the engine lives. `error` is the answer if it is an error, empty otherwise."""

    def __init__(self, client: Any, ranks: Ranks, *, period_s: float = _PERIOD_S) -> None:
        self._client = client
        self._ranks = ranks
        self._period_s = period_s
        self.asked_at: float | None = None
        self.error = ""
        self._task = asyncio.create_task(self._run(), name="vLLM ping")

    @property
    def age_s(self) -> float:
        """Seconds that the engine owes an answer for; an error is none."""
        return 0.0 if self.asked_at is None else time.monotonic() - self.asked_at

    def stop(self) -> None:
        """Ask no more."""
        self._task.cancel()

    async def _ask(self) -> None:
        """Ask the engine. Where it has several nodes or cores each worker is asked: the engine would notice their end
        late."""
        if self._ranks.is_spread or self._ranks.num_cores > 1:
            await self._ranks.call("millrace_ping")
        else:
            await self._client.get_weight_version()

    async def _run(self) -> None:
        # unregistered wait: a periodic look; what it awaits is registered where it is awaited
        while True:
            if self.asked_at is None:
                self.asked_at = time.monotonic()
            try:
                await self._ask()
            except Exception as error:  # the edge of a task that nobody awaits: whatever it is, it must be seen
                if self._client.errored:
                    logger.error("vLLM's engine is dead", exc_info=True)
                    return
                if not self.error:
                    logger.error("vLLM's engine answers with an error", exc_info=True)
                self.error = f"vLLM's engine answers with an error: {type(error).__name__}: {error}"
            else:
                self.asked_at, self.error = None, ""
            await asyncio.sleep(self._period_s)
