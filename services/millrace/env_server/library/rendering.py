"""Hops to a thread that `verifiers` v1 makes in every turn to tokenize, left out while they cost more than they save.

A hop and its way back cost more than a short prompt does; a long one would hold up every other rollout of the worker.
So a renderer that was quick of late renders at once, and one that was not does so in a thread, as the library has it:
the longest time counts, and is forgotten by a tenth with each render.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from verifiers.v1.clients.train import RendererSlot

T = TypeVar("T")

QUICK_S = 0.002
"""CPU seconds; a thousand tokens take about half of it."""
_TOOK, _FORGOTTEN = "millrace_took_s", 0.9


def _timed(slot: RendererSlot, render: Callable[[], T]) -> T:
    began = time.thread_time()
    try:
        return render()
    finally:
        setattr(slot, _TOOK, max(time.thread_time() - began, _FORGOTTEN * getattr(slot, _TOOK, 0.0)))


def install() -> None:
    """Have the library's renderers render like that. Idempotent."""
    stock: Any = getattr(RendererSlot.run, "__wrapped__", RendererSlot.run)

    @functools.wraps(stock)
    async def run(self: RendererSlot, fn: Callable[[], T]) -> T:
        if getattr(self, _TOOK, 0.0) <= QUICK_S and self.lock.acquire(blocking=False):
            try:
                return _timed(self, fn)
            finally:
                self.lock.release()
        return await stock(self, lambda: _timed(self, fn))

    RendererSlot.run = run
