"""`llama3_json`: bare objects `{"name": …, "parameters": …}`, as Llama 3 writes them."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.inference.http.parsers.calls import ToolCall, call_of_json

# Possessive: a string that never ends is tried once from each place, and not once per character of it.
_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}]|"', re.DOTALL)


def parse_llama3_json(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """All calls and no content: with this format a text either calls or talks.

    None unless every object of the text is a call.
    """
    calls: list[ToolCall] = []
    for piece in _objects(text):
        call = None if piece is None else call_of_json(piece, arguments=("arguments", "parameters"))
        if call is None:
            return None
        calls.append(call)
    return (None, calls) if calls else None


def _objects(text: str) -> Iterator[str | None]:
    """Each outermost `{…}`, and None if the last one never ends. Quotes count inside of objects only."""
    at = text.find("{")
    while at >= 0:
        depth, end = 0, -1
        for part in _PART.finditer(text, at):
            match part[0]:
                case "{":
                    depth += 1
                case "}":
                    depth -= 1
                case '"':
                    break  # a string that never ends
            if not depth:
                end = part.end()
                break
        yield text[at:end] if end >= 0 else None
        at = text.find("{", end) if end >= 0 else -1
