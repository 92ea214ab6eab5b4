"""`qwen3_xml`, `qwen3_coder`: calls as tags, which Qwen3-Coder and Qwen3.5 are trained on.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are plain text: their type is what the tool's schema says of the parameter.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from millrace.inference.http.parsers.calls import ToolCall, as_json
from millrace.inference.http.parsers.schemas import typed

_TAG = re.compile(r"<tool_call>|<function=([^<>]*+)>|</function>")
_PARAMETER = re.compile(r"<parameter=([^<>]*+)>|</parameter>")


def parse_qwen3_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """What stands before the first call, and all calls; None unless every one of them can be read.

    `<tool_call>` and its end may be missing: the function is what makes a call. Text between and behind calls is
    dropped.
    """
    first, name, begin = -1, None, 0
    is_awaited = False  # the function of a <tool_call>
    calls: list[ToolCall] = []
    for tag in _TAG.finditer(text):
        if name is not None:  # within a function, whose values may hold any text but its end
            if tag[0] != "</function>":
                continue
            if (arguments := _arguments(text[begin : tag.start()], _properties(tools, name))) is None:
                return None
            calls.append(ToolCall(name, as_json(arguments)))
            name = None
        elif tag[1] is not None:
            name, begin, is_awaited = tag[1].strip(), tag.end(), False
            if not name:
                return None
        elif tag[0] == "<tool_call>":
            if is_awaited:
                return None
            is_awaited = True
        if first < 0 and tag[0] != "</function>":
            first = tag.start()
    return (text[:first], calls) if calls and name is None and not is_awaited else None


def _arguments(body: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """The parameters between `<function=…>` and its end; None if one of them has no end."""
    found: dict[str, Any] = {}
    for key, value in _parameters(body):
        if value is None:
            return None
        found[key] = typed(value.removeprefix("\n").removesuffix("\n"), properties.get(key))
    return found


def _parameters(body: str) -> Iterator[tuple[str, str | None]]:
    """Names with their text, which ends at `</parameter>` or where the next one begins; None where nothing ends it."""
    key, begin = None, 0
    for tag in _PARAMETER.finditer(body):
        if key is not None:
            yield key, body[begin : tag.start()]
        key, begin = tag[1], tag.end()
    if key is not None:
        yield key, None


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The schemas of a tool's parameters; what a request sends as tools is not checked any further than this."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}
