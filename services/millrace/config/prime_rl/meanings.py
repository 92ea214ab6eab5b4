"""What a key of prime-rl means here: another place, nothing, nothing yet, or a sentence that refuses it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config.layers import Layer
from millrace.config.notes import Effect
from millrace.config.tree import Path, SchemaKey


class Target(Protocol):
    """The layer that a value is translated into."""

    layer: Layer
    schema: SchemaKey
    deferred: dict[str, tuple[Path, Any]]

    def put(self, path: Path, value: Any, *, source: Path) -> None:
        """Set a key of ours; `source` is where the value is written."""
        ...

    def note(self, path: Path, effect: Effect, text: str) -> None:
        """Say what became of a key."""
        ...

    def refuse(self, path: Path, value: Any, text: str) -> None:
        """Report a key as an error."""
        ...


Act = Callable[[Target, Path, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What becomes of a key. Values in ``neutral`` say what is so anyway, and pass without a word."""

    effect: Effect
    text: str = ""
    to: str = ""
    neutral: tuple[Any, ...] = ()
    act: Act | None = None
    is_native: bool = False
    """Whether it also holds where our own schema has the key; else the schema's key counts."""


def moved(to: str, text: str = "", *, neutral: tuple[Any, ...] = (), is_native: bool = False) -> Meaning:
    """The same key in another place."""
    said = text or f"is `{to}` here"
    return Meaning(effect=Effect.MEANS, to=to, text=said, neutral=neutral, is_native=is_native)


def nothing(text: str, *neutral: Any) -> Meaning:
    """There is nothing to choose here."""
    return Meaning(effect=Effect.NOTHING, text=text, neutral=neutral)


def later(text: str, *neutral: Any) -> Meaning:
    """A feature that is not there yet, and that changes nothing that is learned."""
    return Meaning(effect=Effect.LATER, text=text, neutral=neutral)


def blocks(text: str, *neutral: Any) -> Meaning:
    """A feature that is not there yet, and that changes what is learned."""
    return Meaning(effect=Effect.BLOCKS, text=text, neutral=neutral)


def refused(text: str, *neutral: Any) -> Meaning:
    """An error; the text says what to write instead."""
    return Meaning(effect=Effect.REFUSED, text=text, neutral=neutral)


def converted(act: Act, *, is_native: bool = False) -> Meaning:
    """A value that is read by a function, whose docstring says what it means here."""
    text = " ".join((act.__doc__ or "").partition("\n\n")[0].split())
    return Meaning(effect=Effect.MEANS, text=text, act=act, is_native=is_native)


def only(text: str, *known: Any) -> Meaning:
    """A key of ours with values that are not there yet: these block, and the default takes their place."""

    def act(target: Target, path: Path, value: Any) -> None:
        if value in known or not isinstance(value, str):
            if target.schema.find(path):
                target.put(path, value, source=path)
        else:
            target.note(path, Effect.BLOCKS, text.format(value=value))

    return Meaning(effect=Effect.MEANS, text=text.format(value="…"), act=act, is_native=True)
