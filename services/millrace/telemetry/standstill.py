"""When this process itself did not run: stopped by a signal, its event loop blocked, or its machine overloaded.

The monotonic clock goes on meanwhile, so that every deadline seems to be over and every neighbour seems to have been
silent, although nobody has listened. Who measures how long another one took takes off what this module has seen.

    standstill.watch()                       # on the event loop whose standing still counts
    ...
    took_s = now - began - standstill.METER.within(began, now)
"""

import asyncio
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

TICK_S = 0.5
LEAST_S = 1.0
"""Shorter gaps are an ordinary busy moment."""
_REMEMBERED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A time in which this process did not run, on its monotonic clock. It is over."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it lasted."""
        return self.ended - self.began


class Meter:
    """Finds gaps between the ticks of something that ticks as long as the process runs."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ticked: float | None = None
        self._due_s = TICK_S
        self._is_ticking: Callable[[], bool] = lambda: True
        self.found: deque[Standstill] = deque(maxlen=_REMEMBERED)
        """The newest, oldest first."""

    def begin(self, *, is_ticking: Callable[[], bool] = lambda: True) -> None:
        """Ticks come from now on, as long as `is_ticking`; what was before is unknown."""
        self._is_ticking = is_ticking
        self._ticked = self._clock()

    def tick(self, *, due_s: float = TICK_S) -> None:
        """One tick; the next one is due in `due_s`."""
        gap = self._gap(self._clock())
        if gap is not None:
            self.found.append(gap)
        self._ticked, self._due_s = self._clock(), due_s

    def within(self, began: float, ended: float) -> float:
        """Seconds between two moments in which this process stood still; of now, too, before a tick has seen it."""
        gap = self._gap(self._clock()) if self._is_ticking() else None
        gaps = [*self.found, gap] if gap is not None else self.found
        return sum(max(0.0, min(ended, each.ended) - max(began, each.began)) for each in gaps)

    def _gap(self, now: float) -> Standstill | None:
        if self._ticked is None or now - self._ticked - self._due_s <= LEAST_S:
            return None
        return Standstill(began=self._ticked + self._due_s, ended=now)


METER = Meter()
"""That of this process."""
_watched: "weakref.ref[asyncio.AbstractEventLoop] | None" = None


def watch() -> None:
    """Have the running event loop tick for `METER` until it is closed; does nothing if it does so already."""
    global _watched
    loop = asyncio.get_running_loop()
    if _watched is not None and _watched() is loop:
        return
    _watched = weakref.ref(loop)
    METER.begin(is_ticking=loop.is_running)
    _tick(_watched)


def _tick(watched: "weakref.ref[asyncio.AbstractEventLoop]") -> None:
    loop = watched()
    if loop is None or watched is not _watched:  # another loop of this process has begun to tick
        return
    METER.tick()
    loop.call_later(TICK_S, _tick, watched)
