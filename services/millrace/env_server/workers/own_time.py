"""Whose code the worker's event loop runs, and for how long.

Environments run code that blocks: a reward function of a second holds up every rollout of its worker. A rollout's
deadline must not count what others take, or none of them would end in time. So the loop measures each callback, and
books it on the play in whose context it runs.
"""

import asyncio
import contextvars
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from millrace.env_server.adapters.failures import own_line_of

logger = logging.getLogger(__name__)

_PLAY: contextvars.ContextVar[int | None] = contextvars.ContextVar("play", default=None)


class OwnTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that knows how long the callbacks of each play took, tasks' steps included.

    It is made in the thread that runs it.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        """Seconds that callbacks took, everybody's."""
        self._own_s: defaultdict[int, float] = defaultdict(float)
        self._num_begun = 0
        self._is_running_one = False
        self._looked_at = -1
        self._lock = threading.Lock()
        self._thread = threading.get_ident()
        super().__init__()

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        """As any loop does, and measure it. Steps of tasks come through here, and what blocks is in these.

        An exit of a task does not end the loop, and all other plays with it: what awaits the task gets it.
        """
        return super().call_soon(self._measured, callback, *args, context=context)

    def _measured(self, callback: Callable[..., Any], *args: Any) -> None:
        self._num_begun += 1
        self._is_running_one = True
        began = time.monotonic()
        try:
            callback(*args)
        except (SystemExit, KeyboardInterrupt) as error:  # the task has it, as any other exception
            logger.debug("a task raised what ends a process", exc_info=error)
        finally:
            took = time.monotonic() - began
            self._is_running_one = False
            self.busy_s += took
            if (play := _PLAY.get()) is not None:
                self._own_s[play] += took

    def stuck_at(self) -> str | None:
        """Where it stands if the callback of the last look still runs, else None; may be called by any thread."""
        with self._lock:
            before, self._looked_at = self._looked_at, self._num_begun
            is_stuck = self._is_running_one and before == self._looked_at
        return own_line_of(self._thread) if is_stuck else None

    def own_s(self, play: int) -> float:
        """Seconds that a play's own callbacks took."""
        return self._own_s.get(play, 0.0)

    def forget(self, play: int) -> None:
        """The play is over."""
        self._own_s.pop(play, None)


class OwnTime:
    """The time of one play: what passes, less what the code of others took of it. Made in the play's own task."""

    def __init__(self, play: int) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop if isinstance(loop, OwnTimeLoop) else None
        self._play = play
        self._began = time.monotonic()
        self._busy_s = 0.0 if self._loop is None else self._loop.busy_s
        _PLAY.set(play)

    def close(self) -> None:
        """The play is over."""
        if self._loop is not None:
            self._loop.forget(self._play)

    @property
    def seconds(self) -> float:
        """Seconds since it began, without those in which the loop ran others' code."""
        passed = time.monotonic() - self._began
        if self._loop is None:
            return passed
        others_s = self._loop.busy_s - self._busy_s - self._loop.own_s(self._play)
        return passed - max(0.0, others_s)
