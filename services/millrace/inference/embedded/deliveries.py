"""Results of the engine's thread for callers that wait in event loops: one wake-up of each loop per step.

A wake-up is a call of the system, and often a switch of threads; a step of a full engine ends many requests.
"""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TypeAlias

from millrace.inference.engine import Generation

Waiter: TypeAlias = "asyncio.Future[Generation]"


class Deliveries:
    """Results for callers in event loops, added and flushed by the engine's thread."""

    def __init__(self) -> None:
        self._ended: dict[asyncio.AbstractEventLoop, list[tuple[Waiter, Generation | Exception]]] = {}

    def add(self, waiter: Waiter, outcome: Generation | Exception) -> None:
        """Keep a request's result or error for the future that its caller awaits; the next `flush` delivers it."""
        self._ended.setdefault(waiter.get_loop(), []).append((waiter, outcome))

    def flush(self) -> None:
        """Deliver what was added since the last call, with one wake-up per event loop; closed loops are skipped."""
        if not self._ended:
            return
        ended, self._ended = self._ended, {}
        for loop, outcomes in ended.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_hand_over, outcomes)


def _hand_over(outcomes: Sequence[tuple[Waiter, Generation | Exception]]) -> None:
    """Set the results and errors of futures, except those that are done; must be called in their event loop."""
    for waiter, outcome in outcomes:
        if waiter.done():  # its caller was cancelled
            continue
        if isinstance(outcome, Exception):
            waiter.set_exception(outcome)
        else:
            waiter.set_result(outcome)
