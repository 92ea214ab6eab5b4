"""Pauses that callers of PolicyService ask for, with or without sleep: visible while they last, and never without end.

A paused engine has nothing to do, so neither its health nor its progress shows that rollouts stand still. Therefore a
pause is a wait of this process, which heartbeats carry, and it ends by itself when its caller forgets it.

If a caller goes away while the engine answers, the call goes on: after half a call nobody could tell whether the engine
generates.
"""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine

from millrace.errors import UnavailableError
from millrace.inference.engine import PolicyEngine
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

# Longer than an update or a look at one replica takes, shorter than the deadlines of rollouts (600 s by default), so a
# forgotten pause costs time but no rollouts. A caller that needs longer asks again.
PAUSE_LIMIT_S = 300.0
OPERATOR = "operator"
"""Holder of the pauses that callers ask for."""
SLEEP = "sleep"
"""Holder of those in which the memory on the device is the trainer's."""


class CallerPause:
    """The one pause of its kind, which callers share: the last one to ask sets its end, `resume` ends it for all."""

    def __init__(self, engine: PolicyEngine, *, holder: str = OPERATOR) -> None:
        self._engine = engine
        self._holder = holder
        self._run_uid = ""
        self._ending: asyncio.Task[None] | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._over.set()

    @property
    def is_on(self) -> bool:
        """Whether it lasts, or is about to begin or to end."""
        return not self._over.is_set()

    def is_by(self, run_uid: str) -> bool:
        """Whether the pause that lasts is this run's."""
        return self._ending is not None and bool(run_uid) and self._run_uid == run_uid

    async def pause(self, run_uid: str) -> None:
        """Stop generation for at most `PAUSE_LIMIT_S` from now; again makes that anew. An empty run is an operator."""
        # The end comes first: the engine must not be paused without one if its caller goes away meanwhile.
        self._cancel()
        self._over.clear()
        self._run_uid = run_uid
        self._ending = asyncio.create_task(self._end_later(run_uid or "an operator", PAUSE_LIMIT_S))
        await self._whole(self._pause(self._ending))
        logger.info("generation is paused", extra={"holder": self._holder, "run": run_uid})

    async def resume(self) -> None:
        """Go on with generation."""
        self._cancel()
        await self._whole(self._resume())

    async def over(self, *, timeout_s: float) -> bool:
        """Wait for its end, so long at most; whether it is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._over.wait()
        return not self.is_on

    async def _pause(self, ending: asyncio.Task[None]) -> None:
        """Pause the engine; what could not begin is shown by no wait, and needs no end."""
        try:
            await self._engine.pause(self._holder)
        except BaseException:  # then raises
            ending.cancel()
            if self._ending is ending:
                self._ending = None
                self._over.set()
            raise

    async def _resume(self) -> None:
        try:
            await self._engine.resume(self._holder)
        finally:
            if self._ending is None:  # else it was asked for again meanwhile
                self._over.set()
        logger.info("generation goes on", extra={"holder": self._holder})

    async def _whole(self, call: Coroutine[None, None, None]) -> None:
        """Wait for a call of the engine, which goes on if this one is cancelled; its own deadlines end it."""
        task = asyncio.create_task(call, name="operator's pause")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        await asyncio.shield(task)

    def _cancel(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None:
            ending.cancel()

    async def _end_later(self, caller: str, limit_s: float) -> None:
        reason, whom = f"paused by {caller}", "operator"
        if self._holder == SLEEP:
            reason, whom = f"asleep while the trainer of {caller} has the device", "trainer"
        with waits.waiting(reason, waits_on=whom, deadline_s=limit_s):
            await asyncio.sleep(limit_s)
        logger.warning("a pause was not resumed; generation goes on", extra={"caller": caller, "limit_s": limit_s})
        self._ending = None  # from here on a new pause has nothing to cancel, so it must come after this one's end
        try:
            await self._resume()
        except UnavailableError:
            return  # a closed engine has no pauses
        except Exception:  # the edge of a task that nobody awaits: whatever vLLM raises, its status tells
            logger.exception("generation does not go on", extra={"holder": self._holder})
