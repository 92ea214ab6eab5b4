"""Asks vLLM's workers again until they are ready: a call of them has to be short, what they do beside need not be."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from millrace.errors import UnavailableError
from millrace.telemetry import waits

T = TypeVar("T")
_GROWTH = 2.0


async def until(
    ask: Callable[[], Awaitable[T]],
    is_done: Callable[[T], bool],
    *,
    what: str,
    deadline_s: float,
    first_s: float,
    last_s: float,
    late: UnavailableError,
) -> T:
    """The first answer that is done; raises `late` after `deadline_s`. `what` is waited for, visibly.

    It rests `first_s` after the first question, then longer and longer, at most `last_s`.
    """
    began, rest_s = time.monotonic(), first_s
    with waits.waiting(what, waits_on="inference", deadline_s=deadline_s):
        while not is_done(answer := await ask()):
            if time.monotonic() - began > deadline_s:
                raise late
            await asyncio.sleep(rest_s)
            rest_s = min(_GROWTH * rest_s, last_s)
    return answer
