"""Progress for programs: every event as one line of JSON."""

import json
from typing import Self

import click
from google.protobuf.json_format import MessageToDict

from millrace.v1 import event_pb2


class JsonView:
    """A `ProgressView` that prints events to standard output, and notes to standard error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def show(self, event: event_pb2.Event) -> None:
        """Print the event in the JSON form of its message."""
        click.echo(json.dumps(MessageToDict(event)))

    def note(self, text: str) -> None:
        """Say it beside the events."""
        click.echo(text, err=True)

    def refresh(self) -> None:
        """Nothing is drawn."""
