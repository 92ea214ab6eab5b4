"""Colours of single lines on a terminal: none where nobody sees them, or nobody wants them."""

from dataclasses import dataclass
from typing import Self, TextIO

import click

from millrace.cli.view.view import has_colours

_STATES = {
    "RUNNING": "green", "SUCCEEDED": "green", "FAILED": "red", "DAMAGED": "red", "CANCELLED": "yellow",
    "PAUSED": "yellow",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Paint:
    """Styles texts, or leaves them as they are. What is as wide as its column is styled behind the padding."""

    is_on: bool = False

    @classmethod
    def of(cls, stream: TextIO) -> Self:
        """As the stream and NO_COLOR say."""
        return cls(has_colours(stream))

    def __call__(self, text: str, colour: str | None = None, *, bold: bool = False, dim: bool = False) -> str:
        """The text with a style, which ends behind it."""
        if not self.is_on or not text.strip():
            return text
        return click.style(text, fg=colour, bold=bold or None, dim=dim or None)

    def run_cell(self, column: str, cell: str, padded: str) -> str:
        """A cell of a table of runs."""
        match column.upper():
            case "STATE":
                return self(padded, _STATES.get(cell, "cyan"), bold=True)
            case "AGE" | "POLICY":
                return self(padded, dim=True)
            case _:
                return padded

    def sample_cell(self, column: str, cell: str, padded: str) -> str:
        """A cell of a table of samples."""
        match column:
            case "status":
                return self(padded, "green" if cell == "ok" else "red")
            case "reward":
                return self(padded, bold=True)
            case "id" | "prompt":
                return self(padded, dim=True)
            case _:
                return padded

    def state(self, name: str) -> str:
        """The state of a run."""
        return self(name, _STATES.get(name, "cyan"), bold=True)
