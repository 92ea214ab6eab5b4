"""Whichever comes first: the one place that waits for several things at once."""

import asyncio
from asyncio import Future
from collections.abc import Awaitable
from typing import Any, TypeVar, overload

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")


@overload
async def first_of(
    first: Awaitable[A], second: Awaitable[B], /, *, timeout_s: float | None = None
) -> tuple[Future[A] | None, Future[B] | None]: ...
@overload
async def first_of(*awaited: Awaitable[T], timeout_s: float | None = None) -> tuple[Future[T] | None, ...]: ...
async def first_of(*awaited: Awaitable[Any], timeout_s: float | None = None) -> tuple[Future[Any] | None, ...]:
    """Wait until one of these is done, or for `timeout_s`; return a future for each that is done, None for the others.

    Coroutines become tasks here, and those that are not done are cancelled and have ended on return, also when the
    caller is cancelled. Futures and tasks belong to the caller and go on. Nothing is raised: ask the futures.
    """
    futures = [asyncio.ensure_future(one) for one in awaited]
    owned = [future for future, one in zip(futures, awaited, strict=True) if future is not one]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tuple(future if future.done() else None for future in futures)
    finally:
        for task in owned:
            task.cancel()
        await asyncio.gather(*owned, return_exceptions=True)
