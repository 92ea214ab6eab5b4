"""How far vLLM rests: it generates, its scheduler is paused, or it also sleeps, its memory on the device given back."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from millrace.errors import InvalidStateError, UnavailableError
from millrace.inference.vllm.handover import ask_restart
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

WAKES_WITHIN_S = 60.0
_RETRY_S = 1.0


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
        self._problem = ""
        self.has_memory = True
        """False from before it is given back until it is there again, whatever fails on the way."""
        self.is_moving = False
        """The engine brings its weights somewhere else, and answers nothing meanwhile."""

    async def become(self, wanted: Degree) -> None:
        """Requests in flight stay; their KV cache, too, unless vLLM sleeps: then they compute it anew."""
        if wanted is self._degree:
            return
        self._degree = None
        match wanted:
            case Degree.ASLEEP:
                await self._wake()  # what vLLM has not taken back since it slept last it would not give back now
                self.has_memory = False
                try:
                    with self._moving():
                        await self._bounded(self._client.sleep(level=1, mode="keep"))
                except BaseException as error:  # nobody knows what is where, then raises
                    self._give_up(f"vLLM did not fall asleep: {type(error).__name__}: {error}")
                    raise
            case Degree.PAUSED:
                await self._wake()  # which lets it generate for some steps
                # Of level 0: the scheduler's pause alone, as `pause_generation` has it before it sleeps for 20 ms so
                # that what was computed has been answered. What still comes is kept back by the gate.
                await self._bounded(self._client.sleep(level=0, mode="keep"))
            case Degree.NONE:
                if not await self._wake():
                    await self._bounded(self._client.wake_up(tags=["scheduling"]))
        self._degree = wanted

    async def _wake(self) -> bool:
        """Take the memory on the device again, if it was given back, and generate; whether that was so.

        It may come late: from a trainer that was killed, or is about to let it go. Where one process holds all of
        vLLM's memory that is asked for again for `WAKES_WITHIN_S`; else one rank may have what another lacks, and vLLM
        is started anew, where somebody can do that.
        """
        if self.has_memory:
            return False
        if self._problem:
            raise UnavailableError(self._problem, reason="ENGINE_FAILED", remedy="start the replica again")
        began = time.monotonic()
        with waits.waiting("its memory on the device", waits_on="trainer", deadline_s=WAKES_WITHIN_S):
            while not self.has_memory:
                try:
                    with self._moving():
                        if not await self._bounded(self._client.wake_up(tags=None)):
                            raise UnavailableError("it says that some is not there", reason="ENGINE_ASLEEP")
                    self.has_memory = True
                except Exception as error:  # whatever vLLM raises, then raises
                    problem = f"vLLM does not get its memory on the device again: {type(error).__name__}: {error}"
                    logger.warning(problem)
                    if not self._is_alone or time.monotonic() - began >= WAKES_WITHIN_S:
                        self._give_up(problem)
                        raise
                    await asyncio.sleep(_RETRY_S)
        return True

    def _give_up(self, problem: str) -> None:
        """Only a new start helps, which is asked for where somebody can do that."""
        self._problem = problem
        logger.critical("vLLM has to be started again", extra={"error": problem, "is_asked": ask_restart(problem)})

    @property
    def _is_alone(self) -> bool:
        parallel = self._client.vllm_config.parallel_config
        return parallel.world_size == parallel.data_parallel_size == 1

    @contextmanager
    def _moving(self) -> Iterator[None]:
        self.is_moving = True
        try:
            yield
        finally:
            self.is_moving = False

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
