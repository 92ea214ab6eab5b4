"""Looks at the store in the background: a page never waits longer for it than it wants to."""

import logging
import threading
import time
from collections.abc import Callable

from millrace.errors import MillraceError

logger = logging.getLogger(__name__)

SILENT_S = 5.0
"""From which age on a look says that the store does not answer."""


class StoreRefresh:
    """One look at a time, in a thread of its own, as often as somebody asks and the last one is old enough."""

    def __init__(self, look: Callable[[], None], *, fresh_s: float) -> None:
        self._look = look
        self._fresh_s = fresh_s
        self._ended = 0.0
        self._began = 0.0
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._lock = threading.Lock()
        self.is_closed = threading.Event()

    @property
    def is_busy(self) -> bool:
        """Return whether a look at the store is under way."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Return what was wrong at the last look at the store, or that the current one gets no answer.

        Empty if nothing.
        """
        silent_s = time.monotonic() - self._began
        if self.is_busy and silent_s > SILENT_S:
            return self._problem or f"the object store has not answered for {silent_s:.0f} s"
        return self._problem

    def alive(self) -> None:
        """Note that the current look gets answers, so that it may take its time."""
        self._began = time.monotonic()
        self._problem = ""

    def refresh(self, wait_s: float = 0.0) -> None:
        """Start a look at the store if none is under way and the last is old enough.

        Wait `wait_s` for the one under way.
        """
        with self._lock:  # pages ask from threads of their own
            if not self.is_busy:
                if self.is_closed.is_set() or time.monotonic() - self._ended < self._fresh_s:
                    return
                self._began = time.monotonic()
                self._thread = threading.Thread(target=self._run, name="look", daemon=True)
                self._thread.start()
            looking = self._thread
        assert looking is not None
        looking.join(wait_s)

    def close(self) -> None:
        """Start no further look, and wait for the one under way."""
        self.is_closed.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._look()
            self._problem = ""
        except MillraceError as error:
            self._problem = error.message
        except Exception as error:  # the edge of a thread: pages say it, and the next look tries again
            problem = f"the log could not be read: {type(error).__name__}, see the orchestrator's log"
            if problem != self._problem:
                logger.exception("a look at the store failed")
            self._problem = problem
        finally:
            self._ended = time.monotonic()
