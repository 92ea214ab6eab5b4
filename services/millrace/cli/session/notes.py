"""What a config was taken to mean where its words say something else here: said once, before anything starts."""

import sys
from collections.abc import Sequence
from typing import TextIO

from millrace.cli.errors import CliError
from millrace.config.notes import Effect, Note

_UNBUILT = (Effect.LATER, Effect.BLOCKS)


def say_notes(notes: Sequence[Note], *, stream: TextIO | None = None) -> None:
    """Print the notes: keys with another meaning, then those without any effect yet."""
    out = stream or sys.stderr
    same = [note for note in notes if note.effect is Effect.SAME]
    taken = [note for note in notes if note.effect not in (*_UNBUILT, Effect.SAME)]
    unbuilt = [note for note in notes if note.effect in _UNBUILT]
    if taken:
        print(f"note: how {_keys(taken)} read:", file=out)
    for note in taken:
        print(f"  - {note}", file=out)
    if same:
        print(f"note: as it is here anyway: {', '.join(note.where for note in same)}", file=out)
    if unbuilt:
        print(f"warning: {_keys(unbuilt)} without effect yet:", file=out)
    for note in unbuilt:
        print(f"  - {note}", file=out)


def refuse_blocked(notes: Sequence[Note]) -> None:
    """CliError if the config asks for what is not there yet, and the run would learn something else without it."""
    blocked = [note for note in notes if note.effect is Effect.BLOCKS]
    if blocked:
        raise CliError(
            "this run would learn something else than its config asks for: " + "; ".join(map(str, blocked)),
            hint="take these keys out to run without them; --dry-run and `millrace config import` take them",
        )


def _keys(notes: Sequence[Note]) -> str:
    return "1 key is" if len(notes) == 1 else f"{len(notes)} keys are"
