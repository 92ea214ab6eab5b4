"""Finds runs by what stands in their configs: `lr=1e-5`, `grpo`, `env.id=reverse`. Secrets are not to be found."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from millrace.telemetry.redact import masked

MAX_WORDS = 20


@dataclass(frozen=True, slots=True)
class ConfigText:
    """The keys of one config, dotted and in lower case, with their values."""

    values: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any], *, secrets: tuple[str, ...]) -> Self:
        """Of a resolved config."""
        return cls(tuple(_values(masked(config, secrets), "")))

    def matches(self, words: str) -> bool:
        """Whether every word is part of some key or value; `key=value` wants both at one place."""
        return all(any(_matches(word, *each) for each in self.values) for word in words.lower().split()[:MAX_WORDS])


def _matches(word: str, key: str, value: Any) -> bool:
    name, is_pair, wanted = word.rpartition("=")
    if is_pair:
        return name in key and (_is_number(wanted, value) or _holds(value, wanted, whole=not isinstance(value, str)))
    return word in key or _holds(value, word) or _is_number(word, value)


def _holds(value: Any, wanted: str, *, whole: bool = False) -> bool:
    text = str(value).lower()
    return wanted == text if whole else wanted in text


def _is_number(word: str, value: Any) -> bool:
    """Whether the word is this number, however it is written."""
    with contextlib.suppress(ValueError):
        return isinstance(value, int | float) and not isinstance(value, bool) and float(word) == value
    return False


def _values(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _values(item, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from _values(item, f"{path}[{index}]")
    elif value is not None:
        yield path.lower(), value
