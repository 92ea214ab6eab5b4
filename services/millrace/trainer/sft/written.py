"""What a chat template writes of a conversation, and what it leaves out without a word.

Whether something is written is seen by changing it: a word is put into every part of the conversation, and each has to
turn up in what the template renders.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError
from millrace.models.templates import TEMPLATE_ERRORS
from millrace.trainer.sft.rendering import Conversation, Message, render

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thought; templates are given one under the names of the others, too."""

_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"


class MessagePart(NamedTuple):
    """A part of a message that is to be written; `at` counts texts and tool calls of a message."""

    message: int
    kind: Literal["text", "reasoning", "tool call", "arguments"]
    at: int = 0

    def __str__(self) -> str:
        call = f"tool call {self.at} of message {self.message}"
        named = {"tool call": call, "arguments": f"the arguments of {call}"}
        return named.get(self.kind, f"the {self.kind} of message {self.message}")


def with_calls(conversation: Conversation) -> Iterator[Conversation]:
    """The conversation as it is given, and then as engines give it to templates.

    Of each one with the arguments of its tool calls as objects, and then as JSON text, which some templates want.
    """
    plain = replace(conversation, messages=[_as_engines_give(message) for message in conversation.messages])
    for form in (conversation, plain) if plain.messages != list(conversation.messages) else (conversation,):
        yield _with_arguments(form, as_text=False)
        if any(_calls(message) for message in form.messages):
            yield _with_arguments(form, as_text=True)


def _as_engines_give(message: Message) -> Message:
    """A message with parts of text as one text, its thought under every name, and what it calls as functions."""
    given = dict(message)
    content = given.get("content")
    if isinstance(content, list) and content:
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        given["content"] = "\n".join(text or "" for text in texts)
    if thought := next((given[name] for name in REASONING if given.get(name)), None):
        given |= dict.fromkeys(REASONING, thought)
    if calls := _calls(message):
        given["tool_calls"] = [
            call if "function" in call or "name" not in call else {"type": "function", "function": call}
            for call in calls
        ]
    return given


def writes_calls_badly(conversation: Conversation, text: str) -> bool:
    """Whether a rendering has arguments as no model is to write them: as Python's repr, or as JSON text in quotes."""
    for message in conversation.messages:
        for arguments in call_arguments(message):
            plain = json.dumps(arguments, ensure_ascii=False)
            bad = {repr(arguments), *((plain, json.dumps(arguments)) if isinstance(arguments, str) else ())}
            if any(shown in text for shown in bad - {"{}"} if shown != plain or isinstance(arguments, str)):
                return True
    return False


def call_arguments(message: Message) -> list[Any]:
    """The arguments of a message's tool calls, of those that have any."""
    found = [_function(call).get("arguments") for call in _calls(message)]
    return [arguments for arguments in found if arguments is not None]


def unwritten_parts(
    tokenizer: Any, conversation: Conversation, *, whole: str, thoughts: Collection[int]
) -> list[MessagePart]:
    """The parts of messages that the template does not write.

    `whole` is the conversation as rendered. `thoughts` are the messages whose reasoning is looked for.
    """
    parts = [
        part
        for index, message in enumerate(conversation.messages)
        for part in _parts(index, message, has_thought=index in thoughts)
    ]
    words = {part: f"{_unused_word(whole)}{at}q" for at, part in enumerate(parts)}
    shown = _rendered(tokenizer, conversation, words) or ""
    missing = [part for part in parts if words[part] not in shown]
    return [part for part in missing if not _changes(tokenizer, conversation, part, words[part], whole)]


def writes_tools(tokenizer: Any, conversation: Conversation, whole: str) -> bool:
    """Whether the template writes which tools there are."""
    try:
        return not conversation.tools or render(tokenizer, replace(conversation, tools=None)) != whole
    except TEMPLATE_ERRORS:
        return True


def texts_of(message: Message) -> Iterator[str]:
    """The texts of a message that the template may write, arguments of tool calls among them."""
    content = message.get("content")
    for part in [content] if isinstance(content, str) else content or []:
        if isinstance(text := part.get("text") if isinstance(part, Mapping) else part, str):
            yield text
    for name in REASONING:
        if isinstance(text := message.get(name), str):
            yield text
    for arguments in call_arguments(message):
        yield json.dumps(arguments, ensure_ascii=False)


def _parts(index: int, message: Message, *, has_thought: bool) -> Iterator[MessagePart]:
    """The parts of a message that are to be written."""
    content = message.get("content")
    for at, text in enumerate([content] if isinstance(content, str) else content or []):
        if _is_text(text):
            yield MessagePart(index, "text", at)
    named = (message.get(name) for name in REASONING)
    if has_thought and any(isinstance(text, str) and text.strip() for text in (*named, _thought(content))):
        yield MessagePart(index, "reasoning")
    for at, call in enumerate(_calls(message)):
        has_arguments = _function(call).get("arguments") not in (None, {}, "", "{}")
        yield MessagePart(index, "arguments" if has_arguments else "tool call", at)


def _thought(content: Any) -> str:
    """The thought at the beginning of a text; some templates cut it out."""
    before, end, _ = content.partition(_THOUGHT_END) if isinstance(content, str) else ("", "", "")
    return before.rpartition(_THOUGHT_BEGIN)[2] if end else ""


def _is_text(part: Any) -> bool:
    text = part.get("text") if isinstance(part, Mapping) else part
    return isinstance(text, str) and bool(text.strip())


def _changes(tokenizer: Any, conversation: Conversation, part: MessagePart, word: str, whole: str) -> bool:
    """Whether the rendering differs with a word in one part, or cannot be had."""
    for at_end in (True, False):
        text = _rendered(tokenizer, conversation, {part: word}, at_end=at_end)
        if text is None or text != whole:
            return True
    return False


def _rendered(
    tokenizer: Any, conversation: Conversation, words: Mapping[MessagePart, str], *, at_end: bool = True
) -> str | None:
    """The rendering of the conversation with words in its parts; None if the template does not take it."""
    messages = list(conversation.messages)
    for part, word in words.items():
        messages[part.message] = _with_word(messages[part.message], part, word, at_end=at_end)
    try:
        return render(tokenizer, replace(conversation, messages=messages))
    except TEMPLATE_ERRORS:
        return None


def _with_word(message: Message, part: MessagePart, word: str, *, at_end: bool) -> Message:
    def put(text: Any) -> Any:
        if isinstance(text, Mapping):
            return {**text, "text": put(text["text"])}
        return (text + word if at_end else word + text) if isinstance(text, str) else text

    content = message.get("content")
    if part.kind == "text":
        if isinstance(content, str):
            return {**message, "content": put(content)}
        return {**message, "content": [put(text) if at == part.at else text for at, text in enumerate(content or [])]}
    if part.kind == "reasoning":
        changed = {name: put(message[name]) for name in REASONING if name in message}
        if isinstance(content, str) and (thought := _thought(content)):
            changed["content"] = content.replace(thought + _THOUGHT_END, put(thought) + _THOUGHT_END, 1)
        return {**message, **changed}

    def change(function: Mapping[str, Any]) -> Mapping[str, Any]:
        if part.kind == "tool call":
            return {**function, "name": put(function.get("name"))}
        return {**function, "arguments": _longer(function, word)}

    return _with_functions(message, change, only=part.at)


def _longer(function: Mapping[str, Any], word: str) -> Any:
    """A function's arguments with another one."""
    arguments = function.get("arguments")
    decoded = decoded_arguments(arguments)
    if isinstance(decoded, Mapping):
        longer: Any = {**decoded, word: word}
    elif isinstance(decoded, list):
        longer = [*decoded, word]
    else:
        return arguments + word if isinstance(arguments, str) else word
    return json.dumps(longer, ensure_ascii=False) if isinstance(arguments, str) else longer


def decoded_arguments(arguments: Any) -> Any:
    """Arguments that are JSON text as what they say; what is no JSON stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return decode_json(arguments or "{}", what="arguments", reason="DATA_INVALID")
    except CorruptObjectError:
        return arguments


def _with_arguments(conversation: Conversation, *, as_text: bool) -> Conversation:
    def changed(function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = function.get("arguments")
        arguments = {} if arguments is None else arguments
        if not as_text:
            return {**function, "arguments": decoded_arguments(arguments)}
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {**function, "arguments": text or "{}"}

    return replace(conversation, messages=[_with_functions(message, changed) for message in conversation.messages])


def _with_functions(
    message: Message, change: Callable[[Mapping[str, Any]], Mapping[str, Any]], *, only: int | None = None
) -> Message:
    """The message with changed tool calls: all of them, or one."""
    calls = list(_calls(message))
    for at, call in enumerate(calls):
        if only in (None, at):
            function = _function(call)
            calls[at] = change(call) if function is call else {**call, "function": change(function)}
    return {**message, "tool_calls": calls} if calls else message


def _calls(message: Message) -> list[Mapping[str, Any]]:
    return message.get("tool_calls") or []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a call calls; some data sets have it without the layer `function`."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _unused_word(text: str) -> str:
    word = "qzwritten"
    while word in text:
        word += "q"
    return word
