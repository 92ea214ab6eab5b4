"""Chats as tokens: messages through the model's chat template. `parsers` converts completions back."""

import contextlib
import hashlib
import inspect
import logging
import re
import string
import sys
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

logger = logging.getLogger(__name__)

# The names of a message's thought in the engine's API and in chat templates.
_REASONING = ("reasoning", "reasoning_content")


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    template_kwargs: dict[str, Any] | None = None,
    pieces: "PieceCache | None" = None,
) -> list[int]:
    """Return the token ids of a chat, rendered by the tokenizer's chat template.

    `tools` are shown to the model; None is the same as no tools. With `continue_final_message` the last message is left
    open, and no generation prompt follows it. `template_kwargs` are further variables of the template. `pieces`, if
    given, has tokens of earlier chats, and gets those of this one. Raises InvalidSpecError if the template cannot take
    the messages. Arguments of tool calls that are no JSON object become `{}` if the template fails with them.
    """
    _check_kwargs(tokenizer, template_kwargs or {})
    prepared = [_prepare(message, index) for index, message in enumerate(messages)]

    by_pieces = pieces is not None and pieces.can_cut(tokenizer)

    def apply() -> list[int]:
        """Render the prepared messages and return their token ids."""
        made: Any = tokenizer.apply_chat_template(
            prepared,
            tools=tools or None,  # pyright: ignore[reportArgumentType] - JSON schemas, as the template wants them
            tokenize=not by_pieces,
            return_dict=False,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )
        return pieces.encode(tokenizer, made) if pieces is not None and by_pieces else list(made)

    try:
        return apply()
    except _TEMPLATE_ERRORS as error:
        if not (odd := _odd_calls(prepared)):
            raise _invalid("messages", f"the chat template cannot take them: {str(error)[:500]}") from error
    # The policy's own mistake of an earlier turn: the conversation goes on without these arguments, as vLLM has it.
    for function in odd:
        function["arguments"] = {}
    try:
        return apply()
    except _TEMPLATE_ERRORS as error:
        raise _invalid("messages", f"the chat template cannot take them: {str(error)[:500]}") from error


# The template is the model's own code, run on untrusted messages: any error of these types is the messages' fault.
_TEMPLATE_ERRORS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


def _odd_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the functions of those tool calls, in prepared messages, whose arguments are no object."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return [function for function in functions if not isinstance(function.get("arguments"), Mapping)]


def _check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidSpecError if a variable for the template has the name of a parameter of `apply_chat_template`
    itself.

    The template's text, one of these parameters, is code, and the others are set by Millrace.
    """
    if not kwargs:
        return
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := sorted(own & kwargs.keys()):
        raise _invalid(f"chat_template_kwargs.{taken[0]}", "is no variable of a chat template; leave it out")


def _prepare(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return message number `index` in the form that chat templates expect; raise InvalidSpecError if it is malformed.

    Its content is text, arguments of tool calls are objects, and it has no null fields.
    """
    prepared = {key: value for key, value in message.items() if value is not None}
    if not isinstance(prepared.get("role"), str):
        raise _invalid(f"messages[{index}].role", "must be a string")
    prepared["content"] = _text(prepared.get("content", ""), index)
    if thought := next((prepared[key] for key in _REASONING if key in prepared), None):
        prepared |= dict.fromkeys(_REASONING, thought)
    if calls := prepared.get("tool_calls"):
        prepared["tool_calls"] = [_prepare_call(call, index) for call in calls]
    return prepared


def _text(content: Any, index: int) -> str:
    """Return the text of a message's content, its parts joined by line ends; raise InvalidSpecError for other parts.

    `index` is the message's number.
    """
    match content:
        case str():
            return content
        case list():
            texts = []
            for part in content:
                if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                    raise _invalid(f"messages[{index}].content", "only text parts are supported")
                texts.append(part["text"])
            return "\n".join(texts)
        case _:
            raise _invalid(f"messages[{index}].content", "must be a string or a list of text parts")


def _prepare_call(call: Any, index: int) -> dict[str, Any]:
    """Return a tool call with its arguments decoded from JSON; a text that is no JSON stays as the policy wrote it.

    `index` is the message's number. Raises InvalidSpecError if it is no function call.
    """
    try:
        function = dict(call["function"])
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(f"messages[{index}].tool_calls", f"not a function call: {error}") from error
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(CorruptObjectError):
            arguments = decode_json(arguments or "{}", what="arguments", reason="REQUEST_INVALID")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _invalid(field: str, message: str) -> InvalidSpecError:
    """Make the InvalidSpecError of a request's field."""
    return InvalidSpecError([Violation(field=field, message=message)], reason="REQUEST_INVALID")


# A cache of the tokens of chats that were rendered a moment ago: a group's members send the same messages.
#
# Rendering and tokenizing a short chat costs as much CPU as all its decoding steps of a small model.

_VALID_S = 60  # some templates print the date
_MAX_CHATS = 1024
_MAX_TOKENS = 4 * 2**20  # 32 MiB of a list's pointers; the numbers themselves are shared or small


class PromptCache:
    """The newest chats of one tokenizer and their tokens. Used by one thread."""

    def __init__(self) -> None:
        """Make an empty cache."""
        self._tokenizer: object = None
        self._chats: OrderedDict[str, list[int]] = OrderedDict()
        self._num_tokens = 0

    def get(self, tokenizer: object, chat: Any) -> tuple[str, list[int] | None]:
        """Return (the chat's key for `put`, the chat's tokens if they are cached, else None).

        `chat` is everything that the rendering depends on. Another tokenizer than before empties the cache.
        """
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._num_tokens = tokenizer, 0
            self._chats.clear()
        digest = hashlib.sha256(repr(chat).encode()).hexdigest()  # a chat may be as large as a body
        # The minute is part of the key, so that a cached chat with a date expires.
        key = f"{int(time.time() / _VALID_S)} {digest}"
        tokens = self._chats.get(key)
        if tokens is not None:
            self._chats.move_to_end(key)
        return key, tokens

    def put(self, tokenizer: object, key: str, tokens: list[int]) -> None:
        """Cache a chat's tokens under the key from `get`, unless the tokenizer was replaced while they were made.

        The oldest chats are dropped beyond a limit.
        """
        if tokenizer is not self._tokenizer or key in self._chats:
            return
        self._chats[key] = tokens
        self._num_tokens += len(tokens)
        while len(self._chats) > _MAX_CHATS or self._num_tokens > _MAX_TOKENS:
            _, oldest = self._chats.popitem(last=False)
            self._num_tokens -= len(oldest)


# A cache of the tokens of parts of chats: each turn of a rollout sends all turns before it.
#
# The part of a text from one special token up to the next is encoded by itself, whatever is around it, so a chat's
# tokens are those of its parts in order. Without this cache a rollout of fifty turns is encoded twenty-five times.

_MAX_PIECE_BYTES = 32 * 2**20  # of texts, tokens and what the interpreter needs for each piece
_PIECE_BYTES = 400  # of one piece besides its text and tokens: the entry in the cache, an array, a tuple, a number
_WHOLE_CHARS = 2048  # shorter texts are encoded at once: that costs less than a few parts


class PieceCache:
    """The newest pieces of one tokenizer's chats and their tokens; a piece begins with a special token. Threads may
    share it.
    """

    def __init__(self) -> None:
        """Make an empty cache."""
        self._of_one: _TokenizerPieces | None = None  # replaced as a whole with the tokenizer

    @property
    def num_bytes(self) -> int:
        """Return about how many bytes of memory all pieces in the cache take."""
        return self._of_one.num_bytes if self._of_one is not None else 0

    def can_cut(self, tokenizer: PreTrainedTokenizerBase) -> bool:
        """Return whether texts of this tokenizer may be encoded in pieces. Another tokenizer than before empties the
        cache.
        """
        pieces = self._of_one
        if pieces is None or pieces.tokenizer is not tokenizer:
            # Two threads may both make one, and the last one stays: no thread waits for a lock meanwhile.
            pieces = self._of_one = _TokenizerPieces(tokenizer)
        return pieces.cuts is not None

    def encode(self, tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
        """Return the token ids of a rendered chat, with no special tokens added; those of its pieces that are cached
        are not computed again.

        The first long text of a tokenizer is also encoded as a whole. If that gives other tokens, the tokenizer's texts
        are not cut from then on.
        """
        pieces = self._of_one
        if pieces is None or pieces.tokenizer is not tokenizer or len(text) < _WHOLE_CHARS:
            return encode_text(tokenizer, text)
        return pieces.encode(text)


class _TokenizerPieces:
    """The part of a PieceCache that belongs to one tokenizer. Threads may share it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Make an empty cache for a tokenizer."""
        self.tokenizer = tokenizer
        self.cuts = _cuts_of(tokenizer)
        """Where its texts may be cut; None if they must be encoded whole."""
        self.num_bytes = 0
        """Bytes of memory that all pieces take, about."""
        self._is_proved = False
        self._lock = threading.Lock()  # of the pieces and their bytes
        self._pieces: OrderedDict[str, tuple[array[int], int]] = OrderedDict()  # text: (tokens, bytes of memory)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a long text, as PieceCache.encode does."""
        if (cuts := self.cuts) is None:
            return encode_text(self.tokenizer, text)
        found: list[int] = []
        for piece in cuts.split(text):
            found.extend(self._piece(piece))
        if not self._is_proved:
            whole = encode_text(self.tokenizer, text)
            if whole != found:
                logger.warning("chats are encoded whole: the tokenizer gives other tokens for a text that is cut")
                self.cuts = None
                return whole
            self._is_proved = True
        return found

    def _piece(self, piece: str) -> Sequence[int]:
        """Return the token ids of a piece, from the cache if it has them; else they are added, and the oldest pieces
        are dropped beyond a limit.
        """
        with self._lock:
            if (known := self._pieces.get(piece)) is not None:
                self._pieces.move_to_end(piece)
                return known[0]
        made = array("i", encode_text(self.tokenizer, piece))
        # Measured afterwards: the interpreter keeps the UTF-8 that it made for the tokenizer with the text.
        size = sys.getsizeof(piece) + len(made) * made.itemsize + _PIECE_BYTES
        with self._lock:
            if piece not in self._pieces and size <= _MAX_PIECE_BYTES:
                self._pieces[piece] = made, size
                self.num_bytes += size
                while self.num_bytes > _MAX_PIECE_BYTES:
                    _, (_, freed) = self._pieces.popitem(last=False)
                    self.num_bytes -= freed
        return made


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the token ids of a text as `apply_chat_template` computes them: no special tokens are added."""
    return list(tokenizer(text, add_special_tokens=False, padding=False, truncation=False)["input_ids"])


class _TextCuts:
    """The tokens before which a text may be cut; no two of them overlap in a text.

    Not one pattern of all tokens: `re` tries the alternatives one by one, and no other thread runs meanwhile.
    """

    def __init__(self, tokens: set[str]) -> None:
        """Take the texts of one or more tokens, each of two or more characters."""
        self._tokens = tokens
        self._firsts = re.compile("[" + "".join(re.escape(first) for first in sorted({at[0] for at in tokens})) + "]")
        self._lengths: dict[str, set[int]] = {}  # of the tokens that begin with these two characters
        for token in tokens:
            self._lengths.setdefault(token[:2], set()).add(len(token))

    def split(self, text: str) -> list[str]:
        """Return the parts of a text, none of them empty, cut before each occurrence of a token."""
        parts: list[str] = []
        begin = 0
        for found in self._firsts.finditer(text):
            at = found.start()
            lengths = self._lengths.get(text[at : at + 2], ())
            if at > begin and any(text[at : at + length] in self._tokens for length in lengths):
                parts.append(text[begin:at])
                begin = at
        return [*parts, text[begin:]] if text else []


def _cuts_of(tokenizer: PreTrainedTokenizerBase) -> _TextCuts | None:
    """Return the special tokens before which a text may be cut; None if there is none, or for a tokenizer in Python.

    Such a token takes no space beside it, its text is not normalized and begins with ASCII punctuation other than `_`
    (so no token before it depends on what follows), and no added token overlaps it.
    """
    is_plain = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
    if not (tokenizer.is_fast and is_plain) or tokenizer.split_special_tokens:
        return None
    added = list(tokenizer.added_tokens_decoder.values())
    exact = {
        str(token.content)
        for token in added
        if token.special
        and len(token.content) > 1
        and token.content[0] in _CUT_FIRSTS
        and not (token.lstrip or token.rstrip or token.single_word or token.normalized)
    }
    exact -= _overlapped({str(token.content) for token in added}, exact)
    return _TextCuts(exact) if exact else None


_CUT_FIRSTS = frozenset(string.punctuation) - {"_"}


def _overlapped(added: set[str], tokens: set[str]) -> set[str]:
    """Return those of `tokens` that a text of `added` may overlap: one that begins before the token and ends inside or
    after it, or begins with it and is longer.
    """
    firsts, lengths = {token[0] for token in tokens}, {len(token) for token in tokens}
    found: set[str] = set()
    tails: set[str] = set()  # ends of added texts that may be a token's beginning
    for other in added:
        for at in range(len(other)):
            if other[at] not in firsts:
                continue
            parts = {other[at : at + length] for length in lengths}
            found |= (parts & tokens) - {other}
            if at and len(other) - at <= max(lengths):
                tails.add(other[at:])
    return found | {token for token in tokens if any(token[:size] in tails for size in range(1, len(token) + 1))}
