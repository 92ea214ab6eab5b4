"""Views of a followed run: a live picture on a terminal, plain lines elsewhere, JSON for programs."""

import json
import os
import sys
from collections.abc import Mapping
from typing import Protocol, Self, TextIO

import click
from google.protobuf.json_format import MessageToDict

from millrace.cli.view.lines import progress_line
from millrace.cli.view.progress import Progress
from millrace.v1 import event_pb2


class ProgressView(Protocol):
    """Shows a run that is being followed."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: object) -> None: ...

    def show(self, event: event_pb2.Event) -> None:
        """Show an event. It must have been applied to the view's progress."""
        ...

    def note(self, text: str) -> None:
        """Show a line that does not come from an event."""
        ...

    def refresh(self) -> None:
        """Redraw; called four times a second."""
        ...


class PlainView:
    """Prints one line per step, evaluation, state change and warning."""

    def __init__(self, stream: TextIO, progress: Progress) -> None:
        self._stream = stream
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stream.flush()

    def show(self, event: event_pb2.Event) -> None:
        """Print the line of an event; routine events have none."""
        line = progress_line(event, self._progress)
        if line is not None:
            self.note(line)

    def note(self, text: str) -> None:
        """Print a line and flush it, because the reader may be a pipe."""
        print(text, file=self._stream, flush=True)

    def refresh(self) -> None:
        """Do nothing: lines are printed at once."""


def is_fancy(stream: TextIO, *, plain: bool, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream can show pictures and bars: a capable terminal, and plain lines are not requested."""
    return not plain and stream.isatty() and environ.get("TERM") != "dumb"


def has_colours(stream: TextIO, *, environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream gets coloured lines: a capable terminal, and NO_COLOR is not set."""
    return is_fancy(stream, plain=False, environ=environ) and not environ.get("NO_COLOR")


def make_view(progress: Progress, *, plain: bool, stream: TextIO | None = None) -> ProgressView:
    """Return the view for a stream, standard error by default. With NO_COLOR the live picture has no colours."""
    out = stream or sys.stderr
    if not is_fancy(out, plain=plain):
        return PlainView(out, progress)
    from rich.console import Console

    from millrace.cli.view.live import LiveView

    return LiveView(Console(file=out), progress)


# Progress for programs: every event as one line of JSON.


class JsonView:
    """A `ProgressView` that prints events to standard output as JSON, one per line, and notes to standard error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def show(self, event: event_pb2.Event) -> None:
        """Print the event in the JSON form of the API."""
        click.echo(json.dumps(MessageToDict(event)))

    def note(self, text: str) -> None:
        """Print a note on standard error."""
        click.echo(text, err=True)

    def refresh(self) -> None:
        """Draw nothing."""
