"""Splits the text of a chat's completion into reasoning, content and tool calls, by parsers with vLLM's names.

A parser looks at text only, after everything was sampled: tokens, log-probs and policy spans stay what they are. What a
model writes is untrusted, so a parser never fails: what it cannot read in full is content, as it was written.

What is well formed becomes what vLLM 0.32 makes of it. Where the two differ no thought, answer or call is lost here: a
call that is only thought of is not made, and a tag that is only mentioned, or half a call, stays text. The table
`millrace_testing/inference/parser_replies.json` has what both make of some 500 replies, and why; both are held to it.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.decoding import decode_json, decode_object
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

# Tool calls as JSON objects: what they are, and the parsers `hermes` and `llama3_json`.

# Possessive: a string that never ends is tried once from each place, and not once per character of it.
_PART = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}]|"', re.DOTALL)


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


def call_of_json(text: str, *, arguments: Sequence[str]) -> ToolCall | None:
    """Return the tool call that the JSON object `text` describes.

    Its arguments are under the first of the keys `arguments` that it has. None if the text is no object with a name and
    such a key. Arguments that are no object make a call all the same, because the environment answers that mistake of
    the model.
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
    """Return the index after the JSON object whose `{` is at index `begin` of the text; -1 if it never ends.

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
    """Return (the text before the first `<tool_call>`, all calls); None without a call, or if one cannot be parsed.

    A first `<tool_call>` that no object follows is text. The last call needs no closing tag, because models are often
    stopped by it. Text between and after calls is dropped. The tools are not used.
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
    """Return (None, all calls) of a text with bare JSON objects: in this format a text either calls or talks.

    None without an object, or if an object of the text is no call. The tools are not used.
    """
    calls: list[ToolCall] = []
    for piece in _objects(text):
        call = None if piece is None else call_of_json(piece, arguments=("arguments", "parameters"))
        if call is None:
            return None
        calls.append(call)
    return (None, calls) if calls else None


def _objects(text: str) -> Iterator[str | None]:
    """Yield each outermost `{…}` of a text, and None for a last one that never ends. Quotes count inside of objects
    only.
    """
    at = text.find("{")
    while at >= 0:
        end = object_end(text, at)
        yield text[at:end] if end >= 0 else None
        at = text.find("{", end) if end >= 0 else -1


# `qwen3_xml`, `qwen3_coder`: calls as tags, which Qwen3-Coder and Qwen3.5 are trained on.
#
#     <tool_call> <function=NAME> <parameter=KEY> VALUE </parameter> </function> </tool_call>
#
# Values are plain text: the tool's schema has their type. They may have any text in them, also tags: a value ends at
# the last `</parameter>` before the next tag that opens something, if the function ends there, too.

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_TAG = re.compile(r"</?tool_call>|<function=([^<>]*+)>|</function>|<parameter=([^<>]*+)>|</parameter>")
Tag = re.Match[str]


def parse_qwen3_xml(text: str, tools: Sequence[Mapping[str, Any]]) -> tuple[str | None, list[ToolCall]] | None:
    """Return (the text before the first call, "" if there is none; all calls), where calls are written as tags.

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
        """Take the text whose tags are to be read, and the request's tools, which have the types of values."""
        self._text, self._tools = text, tools
        self._calls: list[ToolCall] = []
        self._first = -1
        self._opened: Tag | None = None  # the <tool_call> that awaits its function
        self._function: _Function | None = None

    def take(self, tag: Tag) -> bool:
        """Read the text's next tag; return False if it makes a call that cannot be parsed."""
        if self._function is not None:
            if not self._function.ends_before(tag):
                return True
            self._finish(self._function)
            if tag[0] == _FUNCTION_END:
                return True
        return self._outside(tag)

    def end(self) -> tuple[str | None, list[ToolCall]] | None:
        """Return (the text before the first call, all calls) once all tags are read; None without one, or if the
        last is incomplete.
        """
        if self._function is not None:
            if not self._function.has_ended:
                return None
            self._finish(self._function)
        if not self._calls or self._opened is not None:
            return None
        return self._text[: self._first], self._calls

    def _finish(self, function: "_Function") -> None:
        """Add the function's call to those found; no function is open then."""
        self._calls.append(ToolCall(function.name, as_json(function.arguments())))
        self._function = None

    def _outside(self, tag: Tag) -> bool:
        """Read a tag that is in no function; return False if it makes a call that cannot be parsed."""
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
        """Begin the function `name`, whose opening tag in `text` is `tag`; `properties` are its parameters' schemas."""
        self.name = name
        self._text, self._properties = text, properties
        self._found: dict[str, str] = {}
        self._key: str | None = None
        self._begin = 0
        self._close: Tag | None = None  # the end of the open value, as far as is known
        self._later: Tag | None = None  # the end of the open value if the function ends once more after it
        self.has_ended = False

    def ends_before(self, tag: Tag) -> bool:
        """Read a tag that follows the function's; return whether the function has ended with this tag, or before it."""
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
        """Read a tag after the function's end; return True if it opens something, which shows that the end was the
        function's.

        An end tag of a value and then one of a function move the function's end to there.
        """
        if tag[0] == _PARAMETER_END:
            self._later = tag
        elif tag[0] == _FUNCTION_END and self._later is not None:
            self._close, self._later = self._later, None
        return tag[0] == OPEN or tag[1] is not None or tag[2] is not None

    def _open(self, tag: Tag) -> None:
        """Begin a parameter at its tag; inside an unclosed value, only if the tool has a parameter of that name."""
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
    """Return the text's value by the first type of its JSON schema that it can be read as; else the text itself."""
    types = _types(schema)
    for name, read in _READERS.items():
        if name in types:
            try:
                return read(text)
            except (ValueError, OverflowError, KeyError, CorruptObjectError):
                continue
    return text


def _types(schema: Any) -> set[str]:
    """Return the names of the types that a JSON schema allows, also by `enum` and in alternatives; none if it names
    none.
    """
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
    """Return the value if it is a list, else []."""
    return value if isinstance(value, list) else []


def _null(text: str) -> None:
    """Return None for the text `null`, in capitals or not; raise ValueError for any other."""
    if text.lower() != "null":
        raise ValueError(text)


def _integer(text: str) -> int:
    """Return the text as an int; raise ValueError if it is none."""
    return int(_number_text(text))


def _number(text: str) -> float | int:
    """Return the text as a number, an int if it has no fraction; raise ValueError if it is none, or not finite."""
    number = float(_number_text(text))
    if not math.isfinite(number):
        raise ValueError(text)
    return int(number) if number.is_integer() else number


def _number_text(text: str) -> str:
    """Return the text; raise ValueError if it is too long for a number."""
    if len(text) > _MAX_NUMBER_CHARS:
        raise ValueError(text)
    return text


def _boolean(text: str) -> bool:
    """Return the text as a bool: `true`, `1`, `false` or `0`, in capitals or not; raise KeyError for any other."""
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _container(text: str) -> Any:
    """Return the JSON value of the text; raise CorruptObjectError if it is none."""
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


# Reasoning parsers: they split a text into its thought and its answer, without the tags between.
#
# A thought ends at the first `</think>`. All text before that is thought, also `<think>` and `<tool_call>`; all text
# after it is the answer, also another `</think>`. Only the tag that opens the thought and the one that closes it are
# removed.

THINK, END_THINK = "<think>", "</think>"


class Thought(NamedTuple):
    """A text in two parts: the thought, and what follows it. Each is None if it is empty."""

    reasoning: str | None
    rest: str | None
    is_open: bool = False
    """Whether no tag ended the thought: the model was cut off, or left the tag out and went on with a call."""


def split_deepseek_r1(text: str, _: Mapping[str, Any]) -> Thought:
    """Split a text that begins with a thought, whose `<think>` the template may have written, into thought and answer.

    Without a `</think>` all of it is thought, and counts as ended.
    """
    return _split(text)._replace(is_open=False)


def split_qwen3(text: str, template_kwargs: Mapping[str, Any]) -> Thought:
    """Split a text that begins with a thought, whose `<think>` the template may have written, into thought and answer.

    With `enable_thinking = false` in the template's variables it has no thought.
    """
    return Thought(None, text or None) if template_kwargs.get("enable_thinking") is False else _split(text)


def thought_end(text: str) -> int:
    """Return the index at which the answer begins in a text that still has its thought; 0 without a `</think>`."""
    end = text.find(END_THINK)
    return end + len(END_THINK) if end >= 0 else 0


def begins_with_thought(text: str) -> bool:
    """Return whether a text begins with `<think>`."""
    return text.lstrip().startswith(THINK)


def _split(text: str) -> Thought:
    """Split a text at the first `</think>` into thought and answer, without tags; without it all is an open thought."""
    thought, end, rest = text.partition(END_THINK)
    if begins_with_thought(thought):
        thought = thought.lstrip().removeprefix(THINK)
    return Thought(thought or None, rest or None, is_open=not end)


Tools = Sequence[Mapping[str, Any]]
ToolCallParser = Callable[[str, Tools], tuple[str | None, list[ToolCall]] | None]
"""Returns content and calls of a text, given the request's tools; None if no calls can be read in the text."""
ReasoningParser = Callable[[str, Mapping[str, Any]], Thought]
"""Returns the reasoning and the rest of a text, given the variables of the chat template."""

TOOL_CALL_PARSERS: Mapping[str, ToolCallParser] = {
    "hermes": parse_hermes,
    "llama3_json": parse_llama3_json,
    "llama4_json": parse_llama3_json,
    "qwen3_coder": parse_qwen3_xml,
    "qwen3_json": parse_hermes,
    "qwen3_xml": parse_qwen3_xml,
}
REASONING_PARSERS: Mapping[str, ReasoningParser] = {"deepseek_r1": split_deepseek_r1, "qwen3": split_qwen3}
DEFAULT_TOOL_CALL_PARSER = "hermes"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCompletion:
    """The parts of a completion's text."""

    content: str | None
    reasoning: str | None = None
    calls: Sequence[ToolCall] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParsers:
    """The parsers of an engine, by name."""

    tool_calls: str = DEFAULT_TOOL_CALL_PARSER
    reasoning: str | None = None
    has_auto_tool_choice: bool = True
    """Whether a request with tools may leave it to the model to call one."""

    def check(self, *, tools: Tools) -> None:
        """Raise InvalidSpecError if the request has tools, and this engine does not let the model choose to call
        one.
        """
        if tools and not self.has_auto_tool_choice:
            message = (
                "is auto, which this engine is configured not to do; send tool_choice = 'none', or leave "
                "`inference.model.enable_auto_tool_choice` out of its config"
            )
            raise InvalidSpecError([Violation(field="tool_choice", message=message)], reason="REQUEST_INVALID")

    def parse_completion(
        self, text: str, *, tools: Tools, template_kwargs: Mapping[str, Any]
    ) -> ParsedCompletion | None:
        """Split the text of a completion into reasoning, content and tool calls; None if it is content alone.

        `template_kwargs` are the request's variables of the chat template. Calls are looked for only if there are
        `tools`, and only after the thought. There is one exception: if the thought is not closed, and the text ends as
        a call may end, the calls within the thought are returned, and the rest of the thought is the reasoning.
        """
        thought, shown = Thought(None, text or None), ""
        if self.reasoning is not None:
            thought = REASONING_PARSERS[self.reasoning](text, template_kwargs)
        elif tools:
            shown = text[: self._thought_end(text, tools)]  # stays in the content, and has no calls
            thought = Thought(None, text[len(shown) :] or None)
        parsed = self._parse(thought.rest, tools)
        if parsed is not None:
            content, calls = parsed
            # Templates put their own whitespace around a call: what stayed would be twice in the next turn's prompt.
            return ParsedCompletion(
                reasoning=thought.reasoning, content=(shown + (content or "")).strip() or None, calls=calls
            )
        if thought.is_open and _ends_in_call(text) and (parsed := self._parse(thought.reasoning, tools)):
            return ParsedCompletion(reasoning=parsed[0] or None, content=None, calls=parsed[1])
        is_content = self.reasoning is None or thought.rest == text
        return None if is_content else ParsedCompletion(reasoning=thought.reasoning, content=thought.rest)

    def _parse(self, text: str | None, tools: Tools) -> tuple[str | None, list[ToolCall]] | None:
        """Return (content, calls) of a text by the engine's parser of tool calls; None without a text, tools or
        calls.
        """
        return TOOL_CALL_PARSERS[self.tool_calls](text, tools) if text and tools else None

    def _thought_end(self, text: str, tools: Tools) -> int:
        """Return the index in the text at which the answer begins: after a `</think>`, unless that is within a call.

        0 if the text has no thought.
        """
        end = thought_end(text)
        if not end or begins_with_thought(text):
            return end
        # Cut at a tag that is in the value of a call, the text after it has fewer calls than the whole text. Calls that
        # are whole before the tag are only thought of, and stay in the thought.
        whole, after = self._parse(text, tools), self._parse(text[end:], tools)
        is_lost = whole is not None and (after is None or len(after[1]) < len(whole[1]))
        return 0 if is_lost and self._parse(text[: end - len(END_THINK)], tools) is None else end

    def may_find(self, *, tools: Tools) -> bool:
        """Return whether a completion can have reasoning or tool calls, so that its text has to be parsed."""
        return bool(tools) or self.reasoning is not None


def _ends_in_call(text: str) -> bool:
    """Return whether the end of a text can be the end of a call."""
    return text.rstrip().endswith(("</tool_call>", "</function>", "}"))
