"""A process that writes a run somewhere while it goes on: it reads what the run has made durable, and asks nobody.

A process of its own, because the libraries that it needs are large, start others, and may hang. It reports to its
parent (`millrace.readers.exports.of_run`) in JSON, and hears of it that the run has ended.
"""

import importlib
import json
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from millrace.backoff import Backoff
from millrace.errors import InvalidStateError, MillraceError
from millrace.processes.channel import ParentLink
from millrace.runlog.names import Names
from millrace.storage import open_store
from millrace.telemetry.logging import redact

POLL_S = 5.0
RETRY = Backoff(2.0, 60.0)
_MAX_WORD_BYTES = 1024


class RunExport:
    """Writes what comes, until the run has ended and everything is written."""

    def __init__(self) -> None:
        self.rows = 0
        """How many were written."""
        self.finish_now = threading.Event()
        """Look now: the run has ended, or nobody waits for the next look."""
        self.is_ending = False
        self.is_ended_by_parent = False
        """Whether the parent says when the run has ended. Then the log does not count: that of a reopened run still has
        the end before, for as long as no later event is archived."""
        self.parent: ParentLink | None = None
        """Who gets the reports; nobody if None."""
        self._last_report = b""

    def look(self) -> bool:
        """Write what is new, and return whether the log has the run's end; each subclass implements it.

        After a Millrace error it is called again; any other ends the process.
        """
        raise NotImplementedError

    def finish(self) -> None:
        """Wait until everything that was written has arrived at the destination.

        Does nothing unless a subclass overrides it.
        """

    def run(self) -> None:
        """Write what comes until the run has ended and everything is written.

        A Millrace error is reported to the parent and tried again after a pause. Any other error ends the process, and
        its parent starts another.
        """
        failures = 0
        while True:
            # Read before the look: what was written until the end was reported is in that look.
            is_last = self.is_ending
            try:
                has_ended = self.look() and not self.is_ended_by_parent
                if has_ended or is_last:
                    self.report("finishing")
                    self.finish()
                    self.report("done", text=f"{self.rows} rows")
                    return
                failures = 0
            except MillraceError as error:
                failures += 1
                self.report("waiting", error.reason, str(error))
            self.finish_now.wait(RETRY.after(failures) if failures else POLL_S)
            self.finish_now.clear()

    def report(self, state: str, reason: str = "", text: str = "") -> None:
        """Send the parent a report, unless it is the same as the last one; secrets in `text` are masked.

        `state` is "opening", "open", "waiting", "finishing" or "done"; `reason` names an error.
        """
        report = {"state": state, "reason": reason, "text": redact(text)[:2000], "rows": self.rows}
        data = json.dumps(report).encode()
        if self.parent is not None and data != self._last_report:
            self._last_report = data
            self.parent.send(data)


class LogExport(RunExport):
    """One that reads a run's log from the object store."""

    def __init__(self, order: dict[str, Any]) -> None:
        """Create the export of an order, which names the run and its store (`store_url`, `prefix`, `uid`)."""
        super().__init__()
        self.store, self.names = open_store(order["store_url"]), Names(order["prefix"], order["uid"])


def serve(make: Callable[[dict[str, Any]], RunExport]) -> NoReturn:
    """Export the run that the parent's order names, then exit; `make` makes the export of that order.

    Exit at once when the parent is gone.
    """
    parent = ParentLink()
    export = make(parent.order)
    export.parent = parent
    export.is_ended_by_parent = parent.order.get("is_ended_by_parent") is True

    def listen() -> None:
        """Note at any frame of the parent that the run has ended; exit the process when the parent is gone."""
        while parent.receive(most=_MAX_WORD_BYTES) is not None:
            export.is_ending = True
            export.finish_now.set()
        os._exit(0)  # another process exports the run

    threading.Thread(target=listen, daemon=True, name="end of the parent").start()
    export.run()
    os._exit(0)  # what foreign threads still do is not waited for


# Libraries that only some exports need.


def import_extra(module: str, *, extra: str) -> ModuleType:
    """Import a module and return it.

    InvalidStateError with the pip command if it is not installed; `extra` is the extra of Millrace that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise InvalidStateError(
            f"exporting to {extra} needs {module.partition('.')[0]}, which is not installed ({error})",
            reason="EXTRA_MISSING",
            remedy=f"pip install 'millrace[{extra}]'",
        ) from error
