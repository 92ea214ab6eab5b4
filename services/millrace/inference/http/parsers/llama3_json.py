"""`llama3_json`: bare objects `{"name": …, "parameters": …}`, as Llama 3 writes them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.inference.http.parsers.calls import ToolCall, call_of_json, object_end


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
        end = object_end(text, at)
        yield text[at:end] if end >= 0 else None
        at = text.find("{", end) if end >= 0 else -1
