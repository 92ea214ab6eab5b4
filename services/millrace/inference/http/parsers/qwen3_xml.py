"""`qwen3_xml`, `qwen3_coder`: calls as tags, which Qwen3-Coder and Qwen3.5 are trained on.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are plain text: the tool's schema has their type. They may have any text in them, also tags: a value ends at the
last `</parameter>` before the next tag that opens something, if the function ends there, too.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError
from millrace.inference.http.parsers.calls import ToolCall, as_json

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_TAG = re.compile(r"</?tool_call>|<function=([^<>]*+)>|</function>|<parameter=([^<>]*+)>|</parameter>")
Tag = re.Match[str]


def parse_qwen3_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """Return the text before the first call, "" if there is none, and all calls.

    None without a call, or if one cannot be parsed. `<tool_call>` and its end may be missing: the function makes a
    call. A first `<tool_call>` that no function follows is text. Text between and after calls is dropped. `tools` have
    the types of values.
    """
    reader = _Reader(text, tools)
    for tag in _TAG.finditer(text):
        if not reader.take(tag):
            return None
    return reader.end()


class _Reader:
    """Reads the tags of a text in their order, and collects the calls."""

    def __init__(self, text: str, tools: Sequence[Mapping[str, Any]]) -> None:
        self._text, self._tools = text, tools
        self._calls: list[ToolCall] = []
        self._first = -1
        self._opened: Tag | None = None  # the <tool_call> that awaits its function
        self._function: _Function | None = None

    def take(self, tag: Tag) -> bool:
        """Read the next tag; return False if it makes a call that cannot be parsed."""
        if self._function is not None:
            if not self._function.ends_before(tag):
                return True
            self._finish(self._function)
            if tag[0] == _FUNCTION_END:
                return True
        return self._outside(tag)

    def end(self) -> tuple[str | None, list[ToolCall]] | None:
        """Return the text before the first call and all calls; None without one, or if the last one is incomplete."""
        if self._function is not None:
            if not self._function.has_ended:
                return None
            self._finish(self._function)
        if not self._calls or self._opened is not None:
            return None
        return self._text[: self._first], self._calls

    def _finish(self, function: "_Function") -> None:
        self._calls.append(ToolCall(function.name, as_json(function.arguments())))
        self._function = None

    def _outside(self, tag: Tag) -> bool:
        if tag[1] is not None:
            if not (name := tag[1].strip()):
                return False
            if self._first < 0:
                self._first = (self._opened or tag).start()
            self._opened, self._function = None, _Function(self._text, tag, name, _properties(self._tools, name))
        elif tag[0] == OPEN:
            if self._opened is not None and self._calls:
                return False
            self._opened = tag
        elif tag[0] == CLOSE and self._opened is not None:
            between = self._text[self._opened.end() : tag.start()].strip()
            if between.startswith("{") or self._calls:  # a call of another format, or of none
                return False
            self._opened = None
        return True


class _Function:
    """A function whose end has not been seen for certain."""

    def __init__(self, text: str, tag: Tag, name: str, properties: Mapping[str, Any]) -> None:
        self.name = name
        self._text, self._properties = text, properties
        self._found: dict[str, str] = {}
        self._key: str | None = None
        self._begin = 0
        self._close: Tag | None = None  # the end of the open value, as far as is known
        self._later: Tag | None = None  # the end of the open value if the function ends once more after it
        self.has_ended = False

    def ends_before(self, tag: Tag) -> bool:
        """Read a tag; return whether the function has ended with it, or before it."""
        if self.has_ended and not (tag[2] is not None and self._later is not None):
            return self._ended(tag)
        if self.has_ended:  # a value was closed after that end, and a parameter follows: the end was in the value
            self._close, self._later, self.has_ended = self._later, None, False
        if tag[0] == _FUNCTION_END:
            if self._key is None:
                self.has_ended = True
                return True
            self.has_ended = self._close is not None
        elif tag[0] == _PARAMETER_END:
            self._close = tag if self._key is not None else None
        elif tag[2] is not None:
            self._open(tag)
        return False

    def _ended(self, tag: Tag) -> bool:
        """Read a tag after the function's end; return whether the end stays, which a tag that opens something shows.

        A further end of value and function moves it.
        """
        if tag[0] == _PARAMETER_END:
            self._later = tag
        elif tag[0] == _FUNCTION_END and self._later is not None:
            self._close, self._later = self._later, None
        return tag[0] == OPEN or tag[1] is not None or tag[2] is not None

    def _open(self, tag: Tag) -> None:
        """Open a parameter; inside an unclosed value, only one that the tool has."""
        key = tag[2]
        if self._key is not None:
            if self._close is None and self._properties and key not in self._properties:
                return
            self._keep(tag)
        self._key, self._begin, self._close = key, tag.end(), None

    def _keep(self, next_tag: Tag | None = None) -> None:
        """Keep the value of the open parameter, which ends at its closing tag, else at `next_tag`."""
        end = self._close or next_tag
        if self._key is not None and end is not None:
            self._found[self._key] = self._text[self._begin : end.start()]

    def arguments(self) -> dict[str, Any]:
        """Return the function's arguments by name, with the types of the tool's schema."""
        self._keep()
        return {
            key: typed(value.removeprefix("\n").removesuffix("\n"), self._properties.get(key))
            for key, value in self._found.items()
        }


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """Return the schemas of a tool's parameters by name; {} if the request's tools do not have them."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return properties if isinstance(properties, dict) else {}
    return {}


# Values that a model wrote as plain text, with the type that a tool's JSON schema gives them.

_MAX_NUMBER_CHARS = 400  # more digits than any float has


def typed(text: str, schema: Any) -> Any:
    """Return the value of a text by the first type of the schema that it can be read as; else the text itself."""
    types = _types(schema)
    for name, read in _READERS.items():
        if name in types:
            try:
                return read(text)
            except (ValueError, OverflowError, KeyError, CorruptObjectError):
                continue
    return text


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a schema allows, also by `enum` and in alternatives; none if it names none."""
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


# In the order in which they are tried: narrower types first.
_READERS: Mapping[str, Callable[[str], Any]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": _container,
    "array": _container,
}
_NAMES = {type(None): "null", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
