"""Tool calls, and the JSON objects that models write them as."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


def call_of_json(text: str, *, arguments: Sequence[str]) -> ToolCall | None:
    """The call that a JSON object describes, with its arguments under the first of these keys that it has.

    None if the text is no such object.
    """
    try:
        described = decode_object(text, what="a tool call", reason="TOOL_CALL_INVALID")
    except CorruptObjectError:
        return None
    name, key = described.get("name"), next((key for key in arguments if key in described), None)
    if not isinstance(name, str) or key is None:
        return None
    return ToolCall(name, as_json(described[key]))


def as_json(value: Any) -> str:
    """Arguments as the API gives them: always JSON, also where the model wrote a string in the place of an object."""
    return json.dumps(value, ensure_ascii=False)
