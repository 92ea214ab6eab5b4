"""Conversations as the text that a chat template makes of them.

A chat template renders whole conversations only. Where a message lies in one is found by rendering its beginnings.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.models.templates import TEMPLATE_ERRORS
from millrace.policies.stops import common_prefix

Message = Mapping[str, Any]

_SHOWN = 60  # characters of a rendering in a message


class BadRowError(ValueError):
    """A row that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a row, and what else its template takes."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def render(
    tokenizer: Any, conversation: Conversation, count: int | None = None, *, opens_turn: bool = False, **options: Any
) -> Any:
    """The text of the first `count` messages; `opens_turn` adds what begins the assistant's turn.

    `options` are those of `apply_chat_template`. Raises what a template raises (`TEMPLATE_ERRORS`).
    """
    return tokenizer.apply_chat_template(
        list(conversation.messages[:count]),
        tools=conversation.tools,
        add_generation_prompt=opens_turn,
        **({"tokenize": False} | options),
        **conversation.template_arguments,
    )


class Rendering:
    """A conversation as a template renders it: as a whole, and up to each of its messages."""

    def __init__(self, tokenizer: Any, conversation: Conversation) -> None:
        """Render the whole; raises what the template raises."""
        self._tokenizer = tokenizer
        self._conversation = conversation
        self.whole: str = render(tokenizer, conversation)

    def beginning(self, index: int, *, opens_turn: bool = False) -> str | None:
        """The text up to message `index`; None if the template renders no conversation that ends there.

        With `opens_turn` it is what an engine is given to sample the message behind it.
        """
        try:
            return render(self._tokenizer, self._conversation, index + 1, opens_turn=opens_turn)
        except TEMPLATE_ERRORS:
            return None

    def what_changed(self, index: int) -> str:
        """Which message up to `index` is rendered differently once others follow, how, and which one changes it."""
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
        """The text of the messages up to `index`; None where nothing can be said about it.

        That is so if the template renders no such conversation, or if tools go on answering: their answers are one.
        """
        messages = self._conversation.messages
        is_within = index + 1 < len(messages) and messages[index]["role"] == messages[index + 1]["role"] == "tool"
        return None if is_within else self.beginning(index)

    def _keeps(self, index: int, text: str) -> bool:
        """Whether the messages up to `index` still begin with a text."""
        longer = self._text_to(index)
        return longer is None or longer.startswith(text)


def _difference(left: str, right: str) -> tuple[str, str]:
    """Two texts from where they part, short, with a few characters before that."""
    start = max(common_prefix(left, right) - _SHOWN // 3, 0)
    return _shown(left, start), _shown(right, start)


def _shown(text: str, start: int) -> str:
    return text[start : start + _SHOWN] + ("…" if len(text) > start + _SHOWN else "")
