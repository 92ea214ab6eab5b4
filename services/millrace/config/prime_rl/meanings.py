"""What a key of prime-rl means here: another place, nothing, nothing yet, or a sentence that refuses it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millrace.config.notes import Effect
from millrace.config.tree import Path

if TYPE_CHECKING:
    from millrace.config.prime_rl.translation import Translation

Act = Callable[["Translation", Path, Any], None]


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

    def act(translation: "Translation", path: Path, value: Any) -> None:
        if value in known or not isinstance(value, str):
            if translation.schema.find(path):
                translation.put(path, value, source=path)
        else:
            translation.note(path, Effect.BLOCKS, text.format(value=value))

    return Meaning(effect=Effect.MEANS, text=text.format(value="…"), act=act, is_native=True)
