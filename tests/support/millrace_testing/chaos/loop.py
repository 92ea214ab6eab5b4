"""The one event loop of the harness, in a thread of its own: asynchronous gRPC does not like many in a process."""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CALL_TIMEOUT_S = 120.0


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="loop of the chaos harness", daemon=True).start()
    return loop


def begin(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Start a coroutine there."""
    return asyncio.run_coroutine_threadsafe(work, _loop())


def call(work: Coroutine[Any, Any, T], *, timeout_s: float = CALL_TIMEOUT_S) -> T:
    """Run a coroutine there to its end; TimeoutError after `timeout_s`."""
    return begin(work).result(timeout_s)


def end_all() -> None:
    """Cancel everything that still runs there, such as the following of a run whose test failed."""

    async def cancel_others() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    call(cancel_others())
