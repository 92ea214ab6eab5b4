"""`hermes`: `<tool_call>{"name": …, "arguments": …}</tool_call>`, which Qwen models up to Qwen3 are trained on."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.inference.http.parsers.calls import ToolCall, call_of_json, object_end

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_CALL = re.compile(re.escape(OPEN) + r"\s*+(?=\{)")
_END = re.compile(r"\s*+(?:" + re.escape(CLOSE) + r"|\Z)")


def parse_hermes(text: str, _: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """What stands before the first call, and all calls; None unless every one of them can be read.

    A tag that no object follows is mentioned, as long as no call was made. The last call needs no closing tag: models
    are often stopped by it. Text between and behind calls is dropped.
    """
    begins = _CALL.search(text)
    if begins is None:
        return None
    first, at = begins.start(), begins.start()
    calls: list[ToolCall] = []
    while at >= 0:
        begins = _CALL.match(text, at)
        end = object_end(text, begins.end()) if begins is not None else -1
        call = call_of_json(text[begins.end() : end], arguments=("arguments",)) if begins and end >= 0 else None
        if call is None or _END.match(text, end) is None:
            return None
        calls.append(call)
        at = text.find(OPEN, end)
    return text[:first], calls
