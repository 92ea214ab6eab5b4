"""Conversations as tokens, and which of the tokens are trained on.

A chat template renders whole conversations only. Where a message of a conversation lies is found by rendering its
beginnings, which works only if the rendering of each beginning is a prefix of the rendering of the whole: the prefix
property. A template that rewrites history (one that strips the thinking from earlier turns) breaks it; then its own
generation markers say which tokens are the assistant's, and without markers the row cannot be used.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError

from millrace.config.sections.sft import LossMaskConfig

Message = Mapping[str, Any]

_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SHOWN = 60  # characters of a rendering in a message


class BadRowError(ValueError):
    """A row that cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """The messages of a row, and what else its template takes."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


class ConversationEncoder:
    """Renders conversations with a tokenizer's chat template, and marks the tokens of trained messages.

    `num_marked` counts conversations that broke the prefix property and were marked by the template itself.
    """

    def __init__(self, tokenizer: Any, loss_mask: LossMaskConfig) -> None:
        self._tokenizer = tokenizer
        self._trained = loss_mask.model_dump()
        self.num_marked = 0

    def encode(self, conversation: Conversation) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are trained on; BadRowError if that cannot be told."""
        flags = [self._is_trained(index, message) for index, message in enumerate(conversation.messages)]
        if not any(flags):
            return [], []
        try:
            return self._encode(conversation, flags)
        except TemplateError as error:
            raise BadRowError(f"the chat template refuses it: {error}") from error

    def _encode(self, conversation: Conversation, flags: list[bool]) -> tuple[list[int], list[bool]]:
        whole = self._render(conversation)
        ends: list[tuple[int, bool]] = []  # where stretches of the text end, and whether they are trained on
        for index, opens_turn in self._cuts(conversation, flags):
            text = self._beginning(conversation, index, opens_turn=opens_turn)
            if text is None or not whole.startswith(text):
                return self._marked(conversation, why=self._what_changed(conversation, index, whole))
            ends.append((len(text), flags[index] and not opens_turn))
        ends.append((len(whole), flags[-1]))
        token_ids, bounds = self._tokenize(whole, [end for end, _ in ends])
        trained = [False] * len(token_ids)
        is_open = False
        for start, end, is_trained in zip([0, *bounds], bounds, (flag for _, flag in ends), strict=False):
            if is_trained:
                stop = self._stop(token_ids, start, end)
                is_open = stop is None
                stop = end if stop is None else stop
                trained[start:stop] = [True] * (stop - start)
        if is_open and flags[-1] and conversation.messages[-1]["role"] == "assistant":
            token_ids.append(self._tokenizer.eos_token_id)
            trained.append(True)
        return token_ids, trained

    def _cuts(self, conversation: Conversation, flags: list[bool]) -> Iterator[tuple[int, bool]]:
        """The messages behind which to cut: where what is trained on changes, and on both sides of each assistant's.

        With True the cut is behind the header of the assistant's turn that follows, which is not trained on.
        """
        roles = [message["role"] for message in conversation.messages]
        for index in range(len(roles) - 1):
            opens_turn = roles[index + 1] == "assistant"
            if flags[index] if opens_turn else (flags[index] != flags[index + 1] or roles[index] == "assistant"):
                yield index, False
            if opens_turn:
                yield index, True

    def _is_trained(self, index: int, message: Message) -> bool:
        role = _ROLES.get(str(message.get("role")))
        if role is None:
            raise BadRowError(f"message {index} has role {message.get('role')!r}; roles are {', '.join(_ROLES)}")
        return self._trained[role]

    def _render(self, conversation: Conversation, count: int | None = None, *, opens_turn: bool = False) -> str:
        """The text of the first `count` messages; `opens_turn` adds what begins the assistant's turn."""
        return self._tokenizer.apply_chat_template(
            list(conversation.messages[:count]),
            tools=conversation.tools,
            tokenize=False,
            add_generation_prompt=opens_turn,
            **conversation.template_arguments,
        )

    def _beginning(self, conversation: Conversation, index: int, *, opens_turn: bool) -> str | None:
        """The text up to message `index`; None if the template renders no conversation that ends there."""
        try:
            return self._render(conversation, index + 1, opens_turn=opens_turn)
        except TemplateError:
            return None

    def _tokenize(self, text: str, ends: Sequence[int]) -> tuple[list[int], list[int]]:
        """The token ids of a text, and for each end in characters the number of tokens that lie before it.

        A token across an end belongs behind it.
        """
        if not getattr(self._tokenizer, "is_fast", False):
            token_ids = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            parts = [self._tokenizer(text[:end], add_special_tokens=False)["input_ids"] for end in ends]
            return token_ids, [_common_prefix(part, token_ids) for part in parts]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        token_ids, offsets = list(encoded["input_ids"]), encoded["offset_mapping"]
        bounds: list[int] = []
        at = 0
        for end in ends:
            while at < len(offsets) and offsets[at][1] <= end:
                at += 1
            bounds.append(at)
        return token_ids, bounds

    def _stop(self, token_ids: Sequence[int], start: int, end: int) -> int | None:
        """Behind the last stop token of a stretch; None if it has none, `end` if the tokenizer has none.

        What templates write behind it, a line break, is not trained on: the policy never samples that.
        """
        eos = self._tokenizer.eos_token_id
        if eos is None:
            return end
        return next((at + 1 for at in range(end - 1, start - 1, -1) if token_ids[at] == eos), None)

    def _marked(self, conversation: Conversation, *, why: str) -> tuple[list[int], list[bool]]:
        """Token ids with the mask of the template's generation markers; BadRowError (`why`) if it has none."""
        template = self._tokenizer.get_chat_template(tools=conversation.tools)
        if not _MARKER.search(template):
            raise BadRowError(f"{why}; and the template has no `{{% generation %}}` markers that say what to train on")
        if self._trained != {**dict.fromkeys(self._trained, False), "assistant": True}:
            raise BadRowError(f"{why}; and the template's markers say only what the assistant wrote, see loss_mask")
        encoded = self._tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            **conversation.template_arguments,
        )
        self.num_marked += 1
        return list(encoded["input_ids"]), [bool(flag) for flag in encoded["assistant_masks"]]

    def _what_changed(self, conversation: Conversation, index: int, whole: str) -> str:
        """Which message is rendered differently once others follow, how, and which one changes it."""
        messages = conversation.messages
        texts = {at: text for at in range(index + 1) if (text := self._text_to(conversation, at)) is not None}
        for at, text in texts.items():
            if whole.startswith(text):
                continue
            cause = next(
                (later for later in range(at + 1, len(messages)) if not self._keeps(conversation, later, text)),
                len(messages) - 1,
            )
            other = self._text_to(conversation, cause) or whole
            before, after = _difference(text, other)
            return (
                f"the chat template renders message {at} ({messages[at]['role']}) as {before!r}, "
                f"but as {after!r} once message {cause} ({messages[cause]['role']}) follows"
            )
        opened = self._beginning(conversation, index, opens_turn=True)
        if opened is None:
            return f"the chat template renders no conversation that ends with message {index}"
        before, after = _difference(opened, whole)
        return (
            f"the chat template opens the turn of message {index + 1} ({messages[index + 1]['role']}) with {before!r}, "
            f"but renders the message with {after!r}"
        )

    def _text_to(self, conversation: Conversation, index: int) -> str | None:
        """The text of the messages up to `index`; None where nothing can be said about it.

        That is so if the template renders no such conversation, or if tools go on answering: their answers are one.
        """
        messages = conversation.messages
        is_within = index + 1 < len(messages) and messages[index]["role"] == messages[index + 1]["role"] == "tool"
        return None if is_within else self._beginning(conversation, index, opens_turn=False)

    def _keeps(self, conversation: Conversation, index: int, text: str) -> bool:
        """Whether the messages up to `index` still begin with a text."""
        longer = self._text_to(conversation, index)
        return longer is None or longer.startswith(text)


def _common_prefix(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many leading elements are equal."""
    pairs = zip(left, right, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _difference(left: str, right: str) -> tuple[str, str]:
    """Two texts from where they part, short, with a few characters before that."""
    start = max(_common_prefix(left, right) - _SHOWN // 3, 0)
    return _shown(left, start), _shown(right, start)


def _shown(text: str, start: int) -> str:
    return text[start : start + _SHOWN] + ("…" if len(text) > start + _SHOWN else "")
