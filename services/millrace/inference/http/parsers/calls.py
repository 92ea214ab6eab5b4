"""Tool calls, and the JSON objects that models write them as."""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError

# Possessive: a string that never ends is tried once from each place, and not once per character of it.
_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}]|"', re.DOTALL)


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


def call_of_json(text: str, *, arguments: Sequence[str]) -> ToolCall | None:
    """The call that a JSON object describes, with its arguments under the first of these keys that it has.

    None if the text is no such object. Arguments of another type than an object are the model's mistake, and a call all
    the same: the environment answers it.
    """
    try:
        described = decode_object(text, what="a tool call", reason="TOOL_CALL_INVALID")
    except CorruptObjectError:
        return None
    name, key = described.get("name"), next((key for key in arguments if key in described), None)
    if not isinstance(name, str) or key is None:
        return None
    return ToolCall(name, as_json(described[key]))


def object_end(text: str, begin: int) -> int:
    """The end of the object whose `{` stands at `begin`, or -1 if it never ends. Braces in strings do not count."""
    depth = 0
    for part in _PART.finditer(text, begin):
        match part[0]:
            case "{":
                depth += 1
            case "}":
                depth -= 1
            case '"':
                return -1  # a string that never ends
        if not depth:
            return part.end()
    return -1


def as_json(value: Any) -> str:
    """Arguments as the API gives them: always JSON, also where the model wrote a string in the place of an object."""
    return json.dumps(value, ensure_ascii=False)
