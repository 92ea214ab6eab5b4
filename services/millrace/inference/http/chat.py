"""Chats as tokens: messages through the model's chat template. `parsers` converts completions back."""

import contextlib
import hashlib
import inspect
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

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
) -> list[int]:
    """Return the prompt's token ids; raise InvalidSpecError if the chat template cannot take the messages.

    Arguments of tool calls that are no JSON object become `{}` if the template fails with them.
    """
    _check_kwargs(tokenizer, template_kwargs or {})
    prepared = [_prepare(message, index) for index, message in enumerate(messages)]

    def apply() -> Any:
        return tokenizer.apply_chat_template(
            prepared,
            tools=tools or None,  # pyright: ignore[reportArgumentType] - JSON schemas, as the template wants them
            tokenize=True,
            return_dict=False,
            add_generation_prompt=add_generation_prompt and not continue_final_message,
            continue_final_message=continue_final_message,
            **(template_kwargs or {}),
        )

    try:
        return list(apply())
    except _TEMPLATE_ERRORS as error:
        if not (odd := _odd_calls(prepared)):
            raise _invalid("messages", f"the chat template cannot take them: {str(error)[:500]}") from error
    # The policy's own mistake of an earlier turn: the conversation goes on without these arguments, as vLLM has it.
    for function in odd:
        function["arguments"] = {}
    try:
        return list(apply())
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
    """Return the functions of calls, in prepared messages, whose arguments are no object."""
    functions = [call["function"] for message in messages for call in message.get("tool_calls") or ()]
    return [function for function in functions if not isinstance(function.get("arguments"), Mapping)]


def _check_kwargs(tokenizer: PreTrainedTokenizerBase, kwargs: Mapping[str, Any]) -> None:
    """Raise InvalidSpecError for an argument that is one of `apply_chat_template` itself, and no variable of the
    template.

    The template's text is code, and the method's other arguments are set by Millrace.
    """
    if not kwargs:
        return
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters)
    if taken := sorted(own & kwargs.keys()):
        raise _invalid(f"chat_template_kwargs.{taken[0]}", "is no variable of a chat template; leave it out")


def _prepare(message: dict[str, Any], index: int) -> dict[str, Any]:
    """Return a message in the form that templates expect: text content, tool-call arguments as objects, no null
    fields.
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
    """Return a call with its arguments decoded from JSON; a text that is no JSON stays as the policy wrote it."""
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
        self._tokenizer: object = None
        self._chats: OrderedDict[str, list[int]] = OrderedDict()
        self._num_tokens = 0

    def get(self, tokenizer: object, chat: Any) -> tuple[str, list[int] | None]:
        """Return the chat's key for `put`, and its tokens if they are cached.

        `chat` is everything that the rendering depends on. Another tokenizer empties the cache.
        """
        if tokenizer is not self._tokenizer:
            self._tokenizer, self._num_tokens = tokenizer, 0
            self._chats.clear()
        digest = hashlib.sha256(repr(chat).encode()).hexdigest()  # a chat may be as large as a body
        key = f"{int(time.time() / _VALID_S)} {digest}"
        tokens = self._chats.get(key)
        if tokens is not None:
            self._chats.move_to_end(key)
        return key, tokens

    def put(self, tokenizer: object, key: str, tokens: list[int]) -> None:
        """Keep a chat's tokens, unless the tokenizer was replaced while they were made.

        The oldest are dropped beyond a limit.
        """
        if tokenizer is not self._tokenizer or key in self._chats:
            return
        self._chats[key] = tokens
        self._num_tokens += len(tokens)
        while len(self._chats) > _MAX_CHATS or self._num_tokens > _MAX_TOKENS:
            _, oldest = self._chats.popitem(last=False)
            self._num_tokens -= len(oldest)
