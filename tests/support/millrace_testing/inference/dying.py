"""The death of the embedded engine's thread, which nothing that a caller sends can cause."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from millrace.inference.embedded import engine

THREAD = "millrace-engine"


def threads() -> list[threading.Thread]:
    """Return the threads of the engines of this process that live."""
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@contextmanager
def dying(error: BaseException, *, first: Callable[[], None] | None = None) -> Iterator[None]:
    """Let engines' threads die of `error` when they look at the clock, after a step and after a command.

    They call `first` before that.
    """

    def monotonic() -> float:
        if threading.current_thread().name != THREAD:
            return time.monotonic()
        if first is not None:
            first()
        raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "time", SimpleNamespace(monotonic=monotonic))
        yield
