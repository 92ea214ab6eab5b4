"""How far vLLM rests: it generates, its scheduler is paused, or it also sleeps, its memory on the device given back."""

import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any

from millrace.errors import InvalidStateError
from millrace.inference.vllm.handover import ask_restart

logger = logging.getLogger(__name__)


class Degree(Enum):
    """What vLLM was told last."""

    NONE = "generates"
    PAUSED = "generates nothing"
    ASLEEP = "generates nothing, and has no memory on the device"


class Rest:
    """Moves vLLM from one degree to another; one call at a time. `bounded` gives a call of the client its deadline."""

    def __init__(self, client: Any, bounded: Callable[[Any], Awaitable[Any]]) -> None:
        self._client = client
        self._bounded = bounded
        self._degree: Degree | None = Degree.NONE  # None: nobody knows, as a call of vLLM failed
        self._has_memory = True

    async def become(self, wanted: Degree) -> None:
        """Requests in flight stay; their KV cache, too, unless vLLM sleeps: then they compute it anew."""
        if wanted is self._degree:
            return
        self._degree = None
        match wanted:
            case Degree.ASLEEP:
                self._has_memory = False
                await self._bounded(self._client.sleep(level=1, mode="keep"))  # the weights lie on the host meanwhile
            case Degree.PAUSED:
                await self._wake()
                # Of level 0: the scheduler's pause alone, as `pause_generation` has it before it sleeps for 20 ms so
                # that what was computed has been answered. What still comes is kept back by the gate.
                await self._bounded(self._client.sleep(level=0, mode="keep"))
            case Degree.NONE:
                await self._wake()
                await self._bounded(self._client.wake_up(tags=["scheduling"]))
        self._degree = wanted

    def require_sleep(self) -> None:
        """InvalidStateError if vLLM was started so that it cannot give its memory back. On a CPU it keeps it."""
        config = self._client.vllm_config
        if not config.model_config.enable_sleep_mode and config.device_config.device_type != "cpu":
            raise InvalidStateError(
                "this replica cannot sleep: vLLM was started without its sleep mode",
                reason="SLEEP_NOT_ENABLED",
                remedy='start it with {"inference.sleep_while_training": true} in MILLRACE_VLLM_FLAGS, or leave that '
                "key out of the run",
            )

    async def _wake(self) -> None:
        """Take the memory on the device again. If it is not there vLLM is started anew, where somebody can do that.

        What was mapped before that failed stays mapped, so a second try could not succeed.
        """
        if self._has_memory:
            return
        try:
            await self._bounded(self._client.wake_up(tags=None))
        except Exception as error:  # whatever vLLM raises, then raises
            problem = f"vLLM does not get its memory on the device again: {type(error).__name__}: {error}"
            logger.critical("vLLM cannot wake", extra={"error": problem, "is_restarted": ask_restart(problem)})
            raise
        self._has_memory = True
