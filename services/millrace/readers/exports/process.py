"""A process that writes a run somewhere while it goes on: it reads what the run has made durable, and asks nobody.

A process of its own, because the libraries that it needs are large, start others, and may hang. It gets its order as
one JSON line on its standard input, whose end is the end of its parent, and reports by JSON lines on its standard
output (`millrace.readers.exports.of_run` is the other end).
"""

import importlib
import json
import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from millrace.backoff import Backoff
from millrace.decoding import decode_object
from millrace.errors import InvalidStateError, MillraceError
from millrace.runlog.names import Names
from millrace.storage import open_store
from millrace.telemetry.logging import redact

POLL_S = 5.0
RETRY = Backoff(2.0, 60.0)


class RunExport:
    """Writes what comes, until the run has ended and everything is written."""

    def __init__(self) -> None:
        self.rows = 0
        """How many were written."""
        self.finish_now = threading.Event()
        """Look now: the run has ended, or nobody waits for the next look."""
        self.is_ending = False
        self.is_told = False
        """Whether the parent says when the run has ended. Then the log does not count: that of a reopened run still has
        the end before, for as long as no later event is archived."""
        self._last_line = ""

    def look(self) -> bool:
        """Write what is new, and return whether the log has the run's end.

        After a Millrace error it is called again.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Let everything arrive, since all of it is written."""

    def run(self) -> None:
        """Write what comes until the run has ended and everything is written.

        A Millrace error is reported and tried again. Any other error ends the process, and its parent starts
        another.
        """
        failures = 0
        while True:
            is_last = self.is_ending
            try:
                has_ended = self.look() and not self.is_told
                if has_ended or is_last:
                    self.say("finishing")
                    self.finish()
                    self.say("done", text=f"{self.rows} rows")
                    return
                failures = 0
            except MillraceError as error:
                failures += 1
                self.say("waiting", error.reason, str(error))
            self.finish_now.wait(RETRY.after(failures) if failures else POLL_S)
            self.finish_now.clear()

    def say(self, state: str, reason: str = "", text: str = "") -> None:
        """Send the parent a report, unless it is the same as the last one."""
        line = json.dumps({"state": state, "reason": reason, "text": redact(text)[:2000], "rows": self.rows})
        if line != self._last_line:
            self._last_line = line
            print(line, flush=True)


class LogExport(RunExport):
    """One that reads a run's log from the object store."""

    def __init__(self, order: dict[str, Any]) -> None:
        super().__init__()
        self.store, self.names = open_store(order["store_url"]), Names(order["prefix"], order["uid"])


def serve(make: Callable[[dict[str, Any]], RunExport]) -> NoReturn:
    """Export the run that the first line of the standard input names, then exit.

    Exit at once when the parent is gone.
    """
    order = decode_object(sys.stdin.readline().encode(), what="the order of an export", reason="ORDER_UNREADABLE")
    export = make(order)
    export.is_told = order.get("is_told") is True

    def listen() -> None:
        for _ in sys.stdin:  # any further line: the run has ended
            export.is_ending = True
            export.finish_now.set()
        os._exit(0)  # the parent is gone: another process exports the run

    threading.Thread(target=listen, daemon=True, name="end of the parent").start()
    export.run()
    os._exit(0)  # what foreign threads still do is not waited for


# Libraries that only some exports need.


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Import a module.

    InvalidStateError with the pip command if it, and so the extra that brings it, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidStateError(
            f"exporting to {extra} needs {module.partition('.')[0]}, which is not installed ({error})",
            reason="EXTRA_MISSING",
            remedy=f"pip install 'millrace[{extra}]'",
        ) from error
