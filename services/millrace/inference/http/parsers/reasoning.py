"""Reasoning parsers: what stands before `</think>` is reasoning, what follows is for the tool parser and the reader."""

from collections.abc import Mapping
from typing import Any

OPEN, CLOSE = "<think>", "</think>"
TOOL_CALL = "<tool_call>"


def split_deepseek_r1(text: str, _: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The thought behind the first `<think>`, which the template may have opened already, and what follows it.

    Without an end all is thought: the model was cut off, and has not begun to answer.
    """
    before, is_opened, behind = text.partition(OPEN)
    thought, _end, rest = (behind if is_opened else before).partition(CLOSE)
    return thought or None, rest or None


def split_qwen3(text: str, template_kwargs: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The thought with which a text begins, and what follows it, both without the tags, however many there are.

    A tool call ends a thought, too. With `enable_thinking = false` the template has closed the thought already.
    """
    if template_kwargs.get("enable_thinking") is False:
        return None, text or None
    ends = [at for mark in (CLOSE, TOOL_CALL) if (at := text.find(mark)) >= 0]
    end = min(ends, default=len(text))
    before, call, behind = text[end:].partition(TOOL_CALL)
    return text[:end].replace(OPEN, "") or None, before.replace(CLOSE, "") + call + behind or None
