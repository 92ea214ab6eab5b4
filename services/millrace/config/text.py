"""Text of flags and environment variables as typed values.

Only the schema can tell whether `1` is a number or a name. Text that does not fit its type stays text, so that the
schema reports it with the type that it wanted.
"""

import json
from typing import Any, get_origin

from millrace.config.tree import Kind, Node
from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

_NONE = ("none", "null")
_BOOLEANS = {"true": True, "false": False}


class NotJsonError(ValueError):
    """Text that has to be JSON and is not; the message says why and what would do."""


def is_boolean(text: str) -> bool:
    """Whether the text is a truth value."""
    return text.lower() in _BOOLEANS


def is_none(text: str) -> bool:
    """Whether the text stands for an absent value."""
    return text.lower() in _NONE


def free_value(text: str) -> Any:
    """A value below a free table: JSON if it is, else the text itself."""
    try:
        return _decoded(text)
    except CorruptObjectError:
        return text


def typed_value(text: str, node: Node) -> Any:
    """The value that the text means for a key of the schema. Raises NotJsonError for tables and lists."""
    if node.is_optional and is_none(text):
        return None
    match node.kind:
        case Kind.SECTION:
            return _json(text, 'a JSON object such as {"key": 1}')
        case Kind.FREE_TABLE:
            return _json(text, 'a JSON object such as {"key": 1}')
        case Kind.SECTION_LIST:
            return _json(text, 'a JSON list such as [{"id": "reverse-text"}]; lists are replaced as a whole')
        case Kind.LEAF if node.annotation == list[str] and not text.startswith(("[", "{", '"')):
            return [text]  # one name or URL needs no brackets
        case Kind.LEAF if get_origin(node.annotation) is list:
            return _json(text, 'a JSON list such as ["a", "b"]; lists are replaced as a whole')
        case Kind.LEAF:
            return _leaf(text, node.annotation)


def _json(text: str, wanted: str) -> Any:
    try:
        return _decoded(text)
    except CorruptObjectError as error:
        cause = error.__cause__
        why = f"{cause.msg} at character {cause.pos + 1}" if isinstance(cause, json.JSONDecodeError) else str(error)
        raise NotJsonError(f"must be {wanted} ({why})") from error


def _decoded(text: str) -> Any:
    return decode_json(text, what="it", reason="CONFIG_INVALID")


def _leaf(text: str, annotation: Any) -> Any:
    """Text as bool, int or float where the key wants one."""
    try:
        if annotation is bool:
            return _BOOLEANS[text.lower()]
        if annotation is int:
            return int(text)
        if annotation is float:
            return float(text)
    except (KeyError, ValueError):
        return text
    return text
