"""`hermes`: `<tool_call>{"name": …, "arguments": …}</tool_call>`, which Qwen models up to Qwen3 are trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

from millrace.inference.http.parsers.calls import ToolCall, call_of_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_hermes(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """What stands before the first call, and all calls; None unless every one of them can be read.

    The last one needs no closing tag: models are often stopped by it. Text between and behind calls is dropped.
    """
    first = at = text.find(OPEN)
    calls: list[ToolCall] = []
    while at >= 0:
        begin = at + len(OPEN)
        end = text.find(CLOSE, begin)
        call = call_of_json(text[begin:end] if end >= 0 else text[begin:], arguments=("arguments",))
        if call is None:
            return None
        calls.append(call)
        at = text.find(OPEN, end) if end >= 0 else -1
    return (text[:first], calls) if calls else None
