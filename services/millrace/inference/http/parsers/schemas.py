"""Values that a model wrote as plain text, with the type that a tool's JSON schema gives them."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

_MAX_NUMBER_CHARS = 400  # more digits than any float has


def typed(text: str, schema: Any) -> Any:
    """The value that a text stands for, by the first type of the schema that can hold it; else the text itself."""
    types = _types(schema)
    for name, read in _READERS.items():
        if name in types:
            try:
                return read(text)
            except (ValueError, OverflowError, KeyError, CorruptObjectError):
                continue
    return text


def _types(schema: Any) -> set[str]:
    """The names of the types that a schema allows; none where it says nothing that can be read."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    names = {name for name in (declared if isinstance(declared, list) else [declared]) if isinstance(name, str)}
    names |= {_NAMES.get(type(value), "string") for value in _list(schema.get("enum"))}
    for key in ("anyOf", "oneOf", "allOf"):
        for choice in _list(schema.get(key)):
            names |= _types(choice)
    return names


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _null(text: str) -> None:
    if text.lower() != "null":
        raise ValueError(text)


def _integer(text: str) -> int:
    return int(_number_text(text))


def _number(text: str) -> float | int:
    number = float(_number_text(text))
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() else number


def _number_text(text: str) -> str:
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(text)
    return text


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _container(text: str) -> Any:
    return decode_json(text, what="a parameter", reason="TOOL_CALL_INVALID")


# In the order in which they are tried: what is narrower first.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container,
    "array": _container,
}
_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
