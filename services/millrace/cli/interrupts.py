"""Ctrl-C and SIGTERM of a command.

The first one cancels the work, which cleans up; the second one shortens the clean-up.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from millrace.cli.early_interrupts import remembered
from millrace.cli.errors import Interrupted

T = TypeVar("T")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """The signals that this process has received, and what they trigger."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that came."""
        self._on_second: list[Callable[[], object]] = []

    def on_second(self, callback: Callable[[], object]) -> None:
        """Register a callback that is called at the second signal and at each later one: the user wants a shorter
        clean-up.
        """
        self._on_second.append(callback)

    def receive(self, number: signal.Signals, task: "asyncio.Task[Any]") -> None:
        """Handle a signal: the first cancels `task`, each later one calls the callbacks of `on_second`."""
        if self.received is None:
            self.received = number
            task.cancel()
            return
        for callback in self._on_second:
            callback()


def run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run an asynchronous command and return its result.

    Raises Interrupted, after the command's clean-up, if a signal ended it.
    """
    return asyncio.run(_run(work))


async def _run(work: Callable[[Interrupts], Coroutine[Any, Any, T]]) -> T:
    """Run `work` while its signals are handled; raise Interrupted if a signal ended it, or came before it began."""
    interrupts = Interrupts()
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("no task is running")
    numbers = [number for number in _SIGNALS if not _is_to_be_ignored(number)]
    for number in numbers:
        loop.add_signal_handler(number, interrupts.receive, number, task)
    # A Ctrl-C during the imports, when there was no loop to tell.
    # Looked at once the handlers are installed, so that no signal can come in between.
    if remembered:
        raise Interrupted(remembered[0])
    try:
        return await work(interrupts)
    except asyncio.CancelledError:
        if interrupts.received is None:
            raise
        raise Interrupted(interrupts.received) from None
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def _is_to_be_ignored(number: signal.Signals) -> bool:
    """Return whether the signal is SIGHUP and was ignored when the process started, as under `nohup`: then the process
    has to outlive the terminal.
    """
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
