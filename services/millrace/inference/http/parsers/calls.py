"""Tool calls as JSON objects: what they are, and the parsers `hermes` and `llama3_json`."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
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
    """Return the call that a JSON object describes, with its arguments under the first of the keys `arguments` that it
    has.

    None if the text is no object with a name and such a key. Arguments that are no object make a call all the same,
    because the environment answers that mistake of the model.
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
    """Return the index after the object whose `{` is at `begin`, or -1 if it never ends.

    Braces in strings do not count.
    """
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
    """Return a call's arguments as JSON, as the API has them: a string is quoted, too."""
    return json.dumps(value, ensure_ascii=False)


# `hermes`: `<tool_call>{"name": …, "arguments": …}</tool_call>`, which Qwen models up to Qwen3 are trained on.

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"\s*+(?=\{)")
_END = re.compile(r"\s*+(?:" + re.escape(CLOSE) + r"|\Z)")


def parse_hermes(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """Return the text before the first call, and all calls; None without one, or if one cannot be parsed.

    A first `<tool_call>` that no object follows is text. The last call needs no closing tag, because models are often
    stopped by it. Text between and after calls is dropped.
    """
    begins = _CALL.search(text)
    if begins is None:
        return None
    first, at = begins.start(), begins.start()
    calls: list[ToolCall] = []
    while at >= 0:
        begins = _CALL.match(text, at)
        end = object_end(text, begins.end()) if begins is not None else -1
        # One unreadable call makes the whole text content: a half-parsed reply would hide what the policy wrote.
        call = call_of_json(text[begins.end() : end], arguments=("arguments",)) if begins and end >= 0 else None
        if call is None or _END.match(text, end) is None:
            return None
        calls.append(call)
        at = text.find(OPEN, end)
    return text[:first], calls


# `llama3_json`: bare objects `{"name": …, "parameters": …}`, as Llama 3 writes them.


def parse_llama3_json(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """Return all calls and no content, because a text in this format either calls or talks.

    None without an object, or if an object of the text is no call.
    """
    calls: list[ToolCall] = []
    for piece in _objects(text):
        call = None if piece is None else call_of_json(piece, arguments=("arguments", "parameters"))
        if call is None:
            return None
        calls.append(call)
    return (None, calls) if calls else None


def _objects(text: str) -> Iterator[str | None]:
    """Yield each outermost `{…}`, and None for a last one that never ends. Quotes count inside of objects only."""
    at = text.find("{")
    while at >= 0:
        end = object_end(text, at)
        yield text[at:end] if end >= 0 else None
        at = text.find("{", end) if end >= 0 else -1
