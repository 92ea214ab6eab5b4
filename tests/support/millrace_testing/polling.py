"""Waiting for what says nothing when it happens: looked at again and again, within a limit that names what was awaited.

Where there is an event, a future or a condition variable, await that instead.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any

LIMIT_S = 60.0
POLL_S = 0.02


async def until(
    condition: Callable[[], Any | Awaitable[Any]], *, timeout_s: float = LIMIT_S, poll_s: float = POLL_S, what: str = ""
) -> Any:
    """Return the first true answer of `condition`, which may be awaitable; raise AssertionError if there is none
    in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while not (found := await _answer(condition())):
                await asyncio.sleep(poll_s)
            return found
    except TimeoutError:
        raise AssertionError(_missed(condition, timeout_s, what)) from None


def block_until(
    condition: Callable[[], Any], *, timeout_s: float = LIMIT_S, poll_s: float = 0.05, what: str = ""
) -> Any:
    """Wait like `until`, for tests without an event loop."""
    ends = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < ends, _missed(condition, timeout_s, what)
        time.sleep(poll_s)
    return found


async def _answer(result: Any) -> Any:
    return await result if inspect.isawaitable(result) else result


def _missed(condition: Callable[[], Any], timeout_s: float, what: str) -> str:
    return f"not within {timeout_s:g} s: {what or condition}"
