"""Reasoning parsers: where a text's thought ends, and what of it is markup.

A thought ends at the first `</think>`. What is written within it is thought, also `<think>` and `<tool_call>`; what
follows it is the answer, also another `</think>`. Only the tag that opens the thought and the one that closes it are
taken out.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class Thought(NamedTuple):
    """A text in two: what is thought, and what follows. Each is None where there is nothing."""

    reasoning: str | None
    rest: str | None
    is_open: bool = False
    """Nothing ended it: the model was cut off, or forgot the tag and went on with a call."""


def split_deepseek_r1(text: str, _: Mapping[str, Any]) -> Thought:
    """Return the thought with which a text begins, whose `<think>` the template may have written already.

    Without an end all of it is thought, whatever it ends in.
    """
    return _split(text)._replace(is_open=False)


def split_qwen3(text: str, template_kwargs: Mapping[str, Any]) -> Thought:
    """Return the same; with `enable_thinking = false` the template has closed the thought already."""
    return Thought(None, text or None) if template_kwargs.get("enable_thinking") is False else _split(text)


def thought_end(text: str) -> int:
    """Return where the answer begins in a text that still has its thought; 0 if it has none that has ended."""
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
