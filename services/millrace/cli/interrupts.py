"""Ctrl-C and SIGTERM of a command: the first cancels its work, which cleans up; the second hurries the clean-up."""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from millrace.cli.early_interrupts import remembered
from millrace.cli.errors import Interrupted

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """What the signals of this process do."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came."""
        self._hurry: list[Callable[[], object]] = []

    def on_second(self, callback: Callable[[], object]) -> None:
        """Call back when a second signal comes: the user does not want to wait for an orderly end."""
        self._hurry.append(callback)

    def receive(self, number: signal.Signals, task: "asyncio.Task[Any]") -> None:
        """Handle a signal: cancel `task` at the first, and shorten the clean-up at each further one."""
        if self.received is None:
            self.received = number
            task.cancel()
            return
        for callback in self._hurry:
            callback()


def run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run an asynchronous command to its end; Interrupted if a signal ended it (after its own clean-up)."""
    return asyncio.run(_run(work))


async def _run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    interrupts = Interrupts()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task is running")
    heard = [number for number in _SIGNALS if not _is_to_be_ignored(number)]
    for number in heard:
        loop.add_signal_handler(number, interrupts.receive, number, task)
    if remembered:
        raise Interrupted(remembered[0])
    try:
        return await work(interrupts)
    except asyncio.CancelledError:
        if interrupts.received is None:
            raise
        raise Interrupted(interrupts.received) from None
    finally:
        for number in heard:
            loop.remove_signal_handler(number)


def _is_to_be_ignored(number: signal.Signals) -> bool:
    """Return whether who started this process wants it to outlive the terminal, as `nohup` does."""
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
