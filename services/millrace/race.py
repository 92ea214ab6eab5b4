"""Whichever comes first: the one place that waits for several things at once; work that a cancellation lets finish; and
code that may never return.
"""

import asyncio
import contextlib
import contextvars
import threading
from asyncio import Future
from collections.abc import Awaitable, Callable, Coroutine
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
    """Wait until one of the awaitables is done, or for `timeout_s` seconds (None: without a limit).

    Return in their order a done future for each that has ended, None for the others. Coroutines become tasks here, and
    those that are not done are cancelled and have ended on return, also when the caller is cancelled. Futures and tasks
    belong to the caller and go on. An error of an awaitable is not raised: the returned future has it.
    """
    futures = [asyncio.ensure_future(one) for one in awaited]
    owned = [future for future, one in zip(futures, awaited, strict=True) if future is not one]
    try:
        await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        return tuple(future if future.done() else None for future in futures)
    finally:
        for task in owned:
            task.cancel()
        # A cancelled task may still use what the caller frees next.
        await asyncio.gather(*owned, return_exceptions=True)


async def in_own_thread(work: Callable[[], T]) -> T:
    """Run `work` in a daemon thread of its own, and return what it returns or raise what it raises.

    For code of users, which may block for ever: the event loop's own threads, which everything else shares and which
    the end of the process waits for, stay free. StopIteration, and what is no Exception (such as SystemExit), is raised
    as RuntimeError. If the caller is cancelled, `work` goes on and its result is not used.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    future: Future[T] = loop.create_future()

    def deliver(result: T | None, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is None:
            future.set_result(result)  # pyright: ignore[reportArgumentType] - without an error there is a result
        elif isinstance(error, StopIteration) or not isinstance(error, Exception):
            # A future does not take the first; the others (SystemExit, a cancellation) would end the event loop.
            future.set_exception(RuntimeError(f"it raised {error!r}"))
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = context.run(work)
        except BaseException as raised:  # noqa: BLE001 - the edge of a thread: the caller gets it
            error = raised
        with contextlib.suppress(RuntimeError):  # the event loop has been closed meanwhile
            loop.call_soon_threadsafe(deliver, result, error)

    threading.Thread(target=run, name="users-code", daemon=True).start()
    return await future


async def finished(work: Coroutine[Any, Any, T], *, grace_s: float) -> tuple[T, asyncio.CancelledError | None]:
    """Await `work`, also past a cancellation of this task; return its result, and that cancellation or else None.

    After a cancellation `work` goes on for at most `grace_s` seconds, and is cancelled then. If it does not end in
    time, or fails, the cancellation is raised. Without a cancellation the error of `work` is raised.
    """
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task), None
    except asyncio.CancelledError as cancelled:
        await asyncio.wait((task,), timeout=grace_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if task.cancelled() or task.exception() is not None:
            raise
        return task.result(), cancelled
