"""What a key of prime-rl means here: another place, nothing, nothing yet, or a sentence that refuses it."""

from collections.abc import Callable, Mapping
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

    def move(self, path: Path, value: Any, to: Path) -> None:
        """Translate a value as if it had been written at `to`."""
        ...

    def note(self, path: Path, effect: Effect, text: str, *, value: Any = None) -> None:
        """Say what became of a key; of a table `value` that is left out, with the keys in it."""
        ...

    def refuse(self, path: Path, value: Any, text: str) -> None:
        """Report a key as an error."""
        ...


Act = Callable[[Target, Path, Any], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What becomes of a key. Values in ``neutral`` say what is so anyway."""

    effect: Effect
    text: str = ""
    to: str = ""
    neutral: tuple[Any, ...] = ()
    act: Act | None = None
    is_native: bool = False
    """Whether it also holds where our own schema has the key; else the schema's key counts."""
    form: type = object
    """The type of the values that it holds for; any other value is our own key's."""


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


def converted(act: Act, *, is_native: bool = False, form: type = object) -> Meaning:
    """A value that is read by a function, whose docstring says what it means here."""
    text = " ".join((act.__doc__ or "").partition("\n\n")[0].split())
    is_native = is_native or form is not object
    return Meaning(effect=Effect.MEANS, text=text, act=act, is_native=is_native, form=form)


def only(text: str, *known: Any, other: Mapping[str, Act] | None = None) -> Meaning:
    """A key of ours with values that are not there yet: these block, and the default takes their place.

    ``other`` has values that are written differently here, each with what reads it.
    """

    def act(target: Target, path: Path, value: Any) -> None:
        if isinstance(value, str) and other and value in other:
            other[value](target, path, value)
        elif value in known or not isinstance(value, str):
            if target.schema.find(path):
                target.put(path, value, source=path)
            else:
                target.note(path, Effect.SAME, "", value=value)
        else:
            target.note(path, Effect.BLOCKS, text.format(value=value))

    return Meaning(effect=Effect.MEANS, text=text.format(value="…"), act=act, is_native=True)


def same(meaning: Meaning, prefix: str, names: str) -> dict[str, Meaning]:
    """Several keys of one table with the same meaning."""
    return {f"{prefix}{name}": meaning for name in names.split()}
