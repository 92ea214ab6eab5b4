"""Conversations as the text that a chat template makes of them.

A chat template renders only whole conversations. The place of a message in the text is found by rendering the
conversation up to it.
"""

import json
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError
from millrace.models.vocabulary import TEMPLATE_ERRORS
from millrace.policies.stops import common_prefix

Message = Mapping[str, Any]

_SHOWN = 60  # characters of a rendering in an error message


class BadRowError(ValueError):
    """A row that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a row, and the other arguments of its template."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def render(
    tokenizer: Any, conversation: Conversation, count: int | None = None, *, opens_turn: bool = False, **options: Any
) -> Any:
    """Render the first `count` messages (None: all) with the chat template; return the text.

    `opens_turn` adds the header of the next assistant's turn. `options` are those of `apply_chat_template`; with
    `tokenize` the result is not text. Raises what a template raises (`TEMPLATE_ERRORS`).
    """
    return tokenizer.apply_chat_template(
        list(conversation.messages[:count]),
        tools=conversation.tools,
        add_generation_prompt=opens_turn,
        **({"tokenize": False} | options),
        **conversation.template_arguments,
    )


class Rendering:
    """A conversation rendered by a template: as a whole, and up to each of its messages."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        """Render the whole conversation into `whole`; raise what the template raises."""
        self._tokenizer = tokenizer
        self._conversation = conversation
        self.whole: str = render(tokenizer, conversation)

    def beginning(self, index: int, *, opens_turn: bool = False) -> str | None:
        """Return the rendering of the messages up to `index`, included.

        None if the template cannot render one that ends there. With `opens_turn` the result is the prompt with which an
        engine samples the next message.
        """
        try:
            return render(self._tokenizer, self._conversation, index + 1, opens_turn=opens_turn)
        except TEMPLATE_ERRORS:
            return None

    def what_changed(self, index: int) -> str:
        """Return a sentence that says which message up to `index` is rendered differently when others follow.

        It says how, and which message causes it.
        """
        messages = self._conversation.messages
        texts = {at: text for at in range(index + 1) if (text := self._text_to(at)) is not None}
        for at, text in texts.items():
            if self.whole.startswith(text):
                continue
            cause = next(
                (later for later in range(at + 1, len(messages)) if not self._keeps(later, text)), len(messages) - 1
            )
            other = self._text_to(cause) or self.whole
            before, after = _difference(text, other)
            return (
                f"the chat template renders message {at} ({messages[at]['role']}) as {before!r}, "
                f"but as {after!r} once message {cause} ({messages[cause]['role']}) follows"
            )
        opened = self.beginning(index, opens_turn=True)
        if opened is None:
            return f"the chat template renders no conversation that ends with message {index}"
        before, after = _difference(opened, self.whole)
        return (
            f"the chat template opens the turn of message {index + 1} ({messages[index + 1]['role']}) with {before!r}, "
            f"but renders the message with {after!r}"
        )

    def _text_to(self, index: int) -> str | None:
        """Return the text of the messages up to `index`; None if it cannot be determined.

        That is if the template renders no such conversation, or if the next message is of a tool like this one, because
        templates render successive tool messages as one.
        """
        messages = self._conversation.messages
        is_within = index + 1 < len(messages) and messages[index]["role"] == messages[index + 1]["role"] == "tool"
        return None if is_within else self.beginning(index)

    def _keeps(self, index: int, text: str) -> bool:
        """Return whether the rendering up to `index` begins with `text`; True if it cannot be determined."""
        longer = self._text_to(index)
        return longer is None or longer.startswith(text)


def _difference(left: str, right: str) -> tuple[str, str]:
    """Return excerpts of two texts from where they begin to differ, with a few characters of context."""
    start = max(common_prefix(left, right) - _SHOWN // 3, 0)
    return _shown(left, start), _shown(right, start)


def _shown(text: str, start: int) -> str:
    """Return some characters of a text from `start` on, for a message."""
    return text[start : start + _SHOWN] + ("…" if len(text) > start + _SHOWN else "")


# A text as tokens, cut where an engine begins to sample.
#
# An engine gets a prompt tokenised by itself. If the prompt's last token would be merged with the text after it ("\n"
# and "\n" are one token in many vocabularies), the tokens of the whole text do not begin with the prompt's: then the
# rest is tokenised separately.


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens of the text from character `start` on; `ends[i]` is the character after token i, None without offsets.

    The text was tokenised with `anchor` before it.
    """

    start: int
    token_ids: list[int]
    ends: list[int] | None
    anchor: str = ""


class TextTokens:
    """The tokens of a text, which change so that they begin with the prompts of `begin_with_prompt`."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        """Tokenise the text; raise BadRowError if it has half of a surrogate pair."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadRowError(f"{text[error.start : error.end]!r} is half of a surrogate pair, and no text") from error
        self._tokenizer = tokenizer
        self._text = text
        self._prompts: list[list[int]] = []
        whole = self._tokenized(text, start=0)
        assert whole is not None, "nothing is before it"
        self._pieces = [whole]

    @property
    def token_ids(self) -> list[int]:
        """Return the token ids of the whole text."""
        return [token for piece in self._pieces for token in piece.token_ids]

    def before(self, end: int) -> int:
        """Return how many tokens end at or before character `end` of the text."""
        piece = next(piece for piece in reversed(self._pieces) if piece.start <= end)
        count = sum(len(each.token_ids) for each in self._pieces[: self._pieces.index(piece)])
        if piece.ends is not None:
            return count + bisect_right(piece.ends, end)
        part = self._tokenized(self._text[piece.start : end], start=piece.start, anchor=piece.anchor)
        return count + (0 if part is None else common_prefix(part.token_ids, piece.token_ids))

    def begin_with_prompt(self, end: int) -> int:
        """Make the tokens begin with those of the text up to character `end`, tokenized alone.

        Return how many those are. That is how an engine tokenizes a prompt. If the whole text's tokens do not begin
        with them, the text after `end` is tokenized separately. Raises BadRowError if no sequence of tokens begins with
        this prompt and with those of earlier calls.
        """
        prompt = self._encoded(self._text[:end])
        if self.token_ids[: len(prompt)] != prompt:
            is_one = len(self._pieces) == 1 and all(prompt[: len(each)] == each for each in self._prompts)
            following = self._apart(prompt, end) if is_one else None
            if following is None:
                raise BadRowError(self._melted(prompt, end))
            before = self._tokenized(self._text[:end], start=0)
            assert before is not None, "nothing is before it"
            self._pieces = [before, following]
        self._prompts.append(prompt)
        return len(prompt)

    def _apart(self, prompt: Sequence[int], end: int) -> _Piece | None:
        """Tokenize the text after a prompt separately; return None if both together do not decode to the text.

        Some tokenizers put a space before a text: therefore anchors are tried, texts before it whose tokens are
        removed.
        """
        whole = self._decoded(self._pieces[0].token_ids)
        for anchor in ("", self._tokenizer.eos_token or "", "\n", "a"):
            piece = self._tokenized(self._text[end:], start=end, anchor=anchor)
            if piece is not None and self._decoded([*prompt, *piece.token_ids]) == whole:
                return piece
        return None

    def _tokenized(self, text: str, *, start: int, anchor: str = "") -> _Piece | None:
        """Tokenize `text` after the text `anchor`, whose tokens are removed.

        None if the result does not begin with them. `start` is the character of the whole text at which `text` begins.
        """
        (token_ids, ends), lead = self._measured(anchor + text), self._encoded(anchor) if anchor else []
        if token_ids[: len(lead)] != lead:
            return None
        if ends is not None:
            ends = [end - len(anchor) + start for end in ends[len(lead) :]]
        return _Piece(start, token_ids[len(lead) :], ends, anchor)

    def _measured(self, text: str) -> tuple[list[int], list[int] | None]:
        """Return a text's tokens, and each token's end offset, or None if the tokenizer reports no offsets."""
        if not getattr(self._tokenizer, "is_fast", False):
            return self._encoded(text), None
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        # Made ascending, for the bisection in `before`.
        return list(encoded["input_ids"]), list(accumulate((end for _, end in encoded["offset_mapping"]), max))

    def _encoded(self, text: str) -> list[int]:
        """Return the token ids of a text alone, without special tokens at its ends."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _decoded(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _melted(self, prompt: Sequence[int], end: int) -> str:
        """Return the message for a row whose tokens cannot begin with the prompt up to character `end`."""
        shown, at = self._text[max(end - 20, 0) : end], common_prefix(prompt, self.token_ids)
        if not self._prompts:
            return f"an engine begins to sample after {shown!r}, but the text there cannot be tokenised by itself"
        sampled, given = (self._words(each[max(at - 1, 0) : at + 2]) for each in (self.token_ids, prompt))
        return (
            f"before a later turn (after {shown!r}) an engine is given the tokens {given}, where it samples {sampled} "
            "in the turn itself: one row cannot have both"
        )

    def _words(self, token_ids: Sequence[int]) -> str:
        """Return the texts of tokens, quoted, for a message."""
        return " ".join(repr(self._decoded([token])) for token in token_ids)


# Which parts of a conversation a chat template writes, and which it silently leaves out.
#
# That is tested by changing the parts: an unused word is put into every part of the conversation, and each word has to
# be in the rendered text.

REASONING = ("reasoning_content", "reasoning", "thinking")
"""Keys of a message's thought; a thought under one of them is passed to templates under all."""

_THOUGHT_BEGIN, _THOUGHT_END = "<think>", "</think>"


class MessagePart(NamedTuple):
    """A part of a message that a template should write; `at` is the index of the text or tool call in the message."""

    message: int
    kind: Literal["text", "reasoning", "tool call", "arguments"]
    at: int = 0

    def __str__(self) -> str:
        call = f"tool call {self.at} of message {self.message}"
        named = {"tool call": call, "arguments": f"the arguments of {call}"}
        return named.get(self.kind, f"the {self.kind} of message {self.message}")


def with_calls(conversation: Conversation) -> Iterator[Conversation]:
    """Yield the forms of a conversation to try: as given, then as engines pass it to templates, if that differs.

    If it has tool calls, each of the two is yielded with arguments as objects, and then as JSON text, which some
    templates need.
    """
    plain = replace(conversation, messages=[_as_engines_give(message) for message in conversation.messages])
    for form in (conversation, plain) if plain.messages != list(conversation.messages) else (conversation,):
        yield _with_arguments(form, as_text=False)
        if any(_calls(message) for message in form.messages):
            yield _with_arguments(form, as_text=True)


def _as_engines_give(message: Message) -> Message:
    """Return a message as engines pass it to templates.

    Its content is one text, its thought is under every key, and its calls are functions.
    """
    given = dict(message)
    content = given.get("content")
    if isinstance(content, list) and content:
        texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
        given["content"] = "\n".join(text or "" for text in texts)
    # Templates differ in which of the keys they read.
    if thought := next((given[name] for name in REASONING if given.get(name)), None):
        given |= dict.fromkeys(REASONING, thought)
    if calls := _calls(message):
        given["tool_calls"] = [
            call if "function" in call or "name" not in call else {"type": "function", "function": call}
            for call in calls
        ]
    return given


def writes_calls_badly(conversation: Conversation, text: str) -> bool:
    """Return whether the rendered `text` has arguments of tool calls as Python's repr or as quoted JSON.

    That is an error of the template.
    """
    for message in conversation.messages:
        for arguments in call_arguments(message):
            plain = json.dumps(arguments, ensure_ascii=False)
            # Wrong are Python's repr of an object, and quoted JSON of arguments that are text already. An empty object
            # is written alike in all forms.
            bad = {repr(arguments), *((plain, json.dumps(arguments)) if isinstance(arguments, str) else ())}
            if any(shown in text for shown in bad - {"{}"} if shown != plain or isinstance(arguments, str)):
                return True
    return False


def call_arguments(message: Message) -> list[Any]:
    """Return the arguments of a message's tool calls, without calls that have none."""
    found = [_function(call).get("arguments") for call in _calls(message)]
    return [arguments for arguments in found if arguments is not None]


def unwritten_parts(
    tokenizer: Any, conversation: Conversation, *, whole: str, thoughts: Collection[int]
) -> list[MessagePart]:
    """Return the parts of messages that the template leaves out of `whole`, the rendered conversation.

    `thoughts` are the indices of messages whose reasoning counts as a part.
    """
    parts = [
        part
        for index, message in enumerate(conversation.messages)
        for part in _parts(index, message, has_thought=index in thoughts)
    ]
    # All words in one rendering; only parts whose word is missing are then changed one by one.
    words = {part: f"{_unused_word(whole)}{at}q" for at, part in enumerate(parts)}
    shown = _rendered(tokenizer, conversation, words) or ""
    missing = [part for part in parts if words[part] not in shown]
    return [part for part in missing if not _changes(tokenizer, conversation, part, words[part], whole)]


def writes_tools(tokenizer: Any, conversation: Conversation, whole: str) -> bool:
    """Return whether the list of tools changes the rendering `whole`.

    True as well if there are no tools, or if nothing renders without them.
    """
    try:
        return not conversation.tools or render(tokenizer, replace(conversation, tools=None)) != whole
    except TEMPLATE_ERRORS:
        return True


def texts_of(message: Message) -> Iterator[str]:
    """Yield the texts of a message that the template may write, reasoning and tool call arguments included."""
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
    """Yield the parts of message `index` that should be rendered; reasoning only with `has_thought`."""
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
    """Return the text up to `</think>`, after `<think>` if there is one; empty without a thought."""
    before, end, _ = content.partition(_THOUGHT_END) if isinstance(content, str) else ("", "", "")
    return before.rpartition(_THOUGHT_BEGIN)[2] if end else ""


def _is_text(part: Any) -> bool:
    """Return whether a part of a content is text that is not blank."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return isinstance(text, str) and bool(text.strip())


def _changes(tokenizer: Any, conversation: Conversation, part: MessagePart, word: str, whole: str) -> bool:
    """Return whether the template writes a part: whether a rendering with `word` added to it differs from `whole`.

    `whole` is the rendering of the unchanged conversation, and `word` a text that does not occur in it. The word is
    added at the part's end, and if that changes nothing, at its beginning. A rendering that fails counts as changed.
    """
    for at_end in (True, False):
        text = _rendered(tokenizer, conversation, {part: word}, at_end=at_end)
        if text is None or text != whole:
            return True
    return False


def _rendered(
    tokenizer: Any, conversation: Conversation, words: Mapping[MessagePart, str], *, at_end: bool = True
) -> str | None:
    """Render the conversation with words added to its parts, at their end or beginning; None if the template raises."""
    messages = list(conversation.messages)
    for part, word in words.items():
        messages[part.message] = _with_word(messages[part.message], part, word, at_end=at_end)
    try:
        return render(tokenizer, replace(conversation, messages=messages))
    except TEMPLATE_ERRORS:
        return None


def _with_word(message: Message, part: MessagePart, word: str, *, at_end: bool) -> Message:
    """Return the message with `word` added to one of its parts, at its end or else at its beginning."""

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
    """Return a function's arguments with one more, named `word`, in the form that they have: object, list or text."""
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
    """Return the value of arguments that are JSON text, and other values, invalid text too, as they are."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return decode_json(arguments or "{}", what="arguments", reason="DATA_INVALID")
    except CorruptObjectError:
        return arguments


def _with_arguments(conversation: Conversation, *, as_text: bool) -> Conversation:
    """Return the conversation with the arguments of tool calls as JSON text, or else as objects."""

    def changed(function: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a function with its arguments as JSON text, or else as an object."""
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
    """Return the message with `change` applied to the functions of its tool calls: all, or the one at `only`."""
    calls = list(_calls(message))
    for at, call in enumerate(calls):
        if only in (None, at):
            function = _function(call)
            calls[at] = change(call) if function is call else {**call, "function": change(function)}
    return {**message, "tool_calls": calls} if calls else message


def _calls(message: Message) -> list[Mapping[str, Any]]:
    """Return the tool calls of a message; empty if it has none."""
    return message.get("tool_calls") or []


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool call; some data sets lack the level `function`."""
    function = call.get("function")
    return function if isinstance(function, Mapping) else call


def _unused_word(text: str) -> str:
    """Return a word that does not occur in a text."""
    word = "qzwritten"
    while word in text:
        word += "q"
    return word
