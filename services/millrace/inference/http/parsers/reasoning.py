"""Reasoning parsers: they split a text into its thought and its answer, without the tags between.

A thought ends at the first `</think>`. All text before that is thought, also `<think>` and `<tool_call>`; all text
after it is the answer, also another `</think>`. Only the tag that opens the thought and the one that closes it are
removed.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    """A text in two parts: the thought, and what follows it. Each is None if it is empty."""

    reasoning: str | None
    rest: str | None
    is_open: bool = False
    """Whether no tag ended the thought: the model was cut off, or left the tag out and went on with a call."""


def split_deepseek_r1(text: str, _: Mapping[str, Any]) -> Thought:
    """Split a text that begins with a thought, whose `<think>` the template may have written already.

    Without an end all of it is thought, and counts as ended.
    """
    return _split(text)._replace(is_open=False)


def split_qwen3(text: str, template_kwargs: Mapping[str, Any]) -> Thought:
    """Split a text that begins with a thought.

    With `enable_thinking = false` in the template's variables it has none.
    """
    return Thought(None, text or None) if template_kwargs.get("enable_thinking") is False else _split(text)


def thought_end(text: str) -> int:
    """Return the index at which the answer begins in a text that still has its thought; 0 without a `</think>`."""
    end = text.find(CLOSE)
    return end + len(CLOSE) if end >= 0 else 0


def begins_with_thought(text: str) -> bool:
    """Return whether a text itself opens a thought."""
    return text.lstrip().startswith(OPEN)


def _split(text: str) -> Thought:
    thought, end, rest = text.partition(CLOSE)
    if begins_with_thought(thought):
        thought = thought.lstrip().removeprefix(OPEN)
    return Thought(thought or None, rest or None, is_open=not end)
