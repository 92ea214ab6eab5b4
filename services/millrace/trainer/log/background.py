"""An event loop in a thread of its own: it runs the log and the heartbeats while the main thread computes."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from millrace.errors import UnavailableError
from millrace.telemetry import waits

T = TypeVar("T")

_STOP_S = 10.0
_QUIET_S = 1.0  # a call that the main thread waits for longer is reported as a wait


class BackgroundLoop:
    """Runs coroutines for synchronous code. Used as a context manager; leaving it cancels what still runs."""

    def __init__(self, name: str = "trainer-background") -> None:
        self._loop = asyncio.new_event_loop()
        # A daemon, because leaving waits for its end for a bounded time only.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Cancel what still runs on the loop, and end its thread."""
        # While the loop runs, so that the tasks' `finally` blocks run.
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop).result(_STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_S)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the background loop; return a future with its result.

        An error of the coroutine is in the future only, and is not logged.
        """
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, function: Callable[[], None]) -> None:
        """Schedule a call of `function`, which must not block, on the background loop, and return at once."""
        self._loop.call_soon_threadsafe(function)

    def call(self, coroutine: Coroutine[Any, Any, T], *, what: str, timeout_s: float) -> T:
        """Run a coroutine on the background loop and return its result, or raise what it raises.

        After `timeout_s` cancels it and raises UnavailableError. `what` names it in the registered wait and in the
        error.
        """
        future = self.submit(coroutine)
        try:
            with waits.waiting(what, deadline_s=timeout_s, quiet_s=_QUIET_S):
                return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done():  # the coroutine itself raised a TimeoutError
                raise
            future.cancel()
            raise UnavailableError(
                f"{what} did not finish within {timeout_s:g} s",
                reason="BACKGROUND_TIMEOUT",
                remedy="see the log for what Redis or the object store answers",
            ) from None

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    async def _cancel_all(self) -> None:
        """Cancel all tasks of the loop but the current one, and wait until they have ended."""
        mine = asyncio.current_task()
        tasks = [task for task in asyncio.all_tasks() if task is not mine]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# How a run is released.


class StopRequested(Exception):
    """The trainer was asked to release the run: a signal, a pause, or another assignment. Not an error."""
