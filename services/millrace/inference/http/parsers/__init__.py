"""How the text of a chat's completion is taken apart: reasoning, content and tool calls, by parsers with vLLM's names.

A parser looks at text only, after everything was sampled: tokens, log-probs and policy spans stay what they are. What a
model writes is untrusted, so a parser never fails: what it cannot read in full is content, as it was written.

What is well formed becomes what vLLM 0.32 makes of it (`millrace_testing/inference/parser_cases.py` is
checked against both). Where vLLM would drop half a call, or hand on JSON that no JSON may be, it stays text here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import InvalidSpecError, Violation
from millrace.inference.http.parsers.calls import ToolCall
from millrace.inference.http.parsers.hermes import parse_hermes
from millrace.inference.http.parsers.llama3_json import parse_llama3_json
from millrace.inference.http.parsers.qwen3_xml import parse_qwen3_xml
from millrace.inference.http.parsers.reasoning import split_deepseek_r1, split_qwen3

Tools = Sequence[Mapping[str, Any]]
ToolCallParser = Callable[[str, Tools], tuple[str | None, list[ToolCall]] | None]
"""Content and calls of a text, given the tools of the request; None if the text holds no calls that can be read."""
ReasoningParser = Callable[[str, Mapping[str, Any]], tuple[str | None, str | None]]
"""Reasoning and the rest of a text, given the variables of the chat template; None for what is empty."""

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
class Said:
    """What a completion says."""

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
        """InvalidSpecError if a request with these tools cannot be served."""
        if tools and not self.has_auto_tool_choice:
            message = (
                "is auto, which this engine was told not to do; send tool_choice = 'none', or leave "
                "`inference.model.enable_auto_tool_choice` out of its config"
            )
            raise InvalidSpecError([Violation(field="tool_choice", message=message)], reason="REQUEST_INVALID")

    def take_apart(self, text: str, *, tools: Tools, template_kwargs: Mapping[str, Any]) -> Said | None:
        """What the text says, with calls of `tools` only if there are any; None if there is nothing but content."""
        reasoning, content = None, text
        if self.reasoning is not None:
            reasoning, content = REASONING_PARSERS[self.reasoning](text, template_kwargs)
        parsed = TOOL_CALL_PARSERS[self.tool_calls](content, tools) if tools and content else None
        if parsed is not None:
            content, calls = parsed
            # Templates put their own whitespace around a call: what stayed would stand twice in the next turn's prompt.
            return Said(reasoning=reasoning, content=(content or "").strip() or None, calls=calls)
        return None if content == text else Said(reasoning=reasoning, content=content)

    def may_find(self, *, tools: Tools) -> bool:
        """Whether a completion can be more than content."""
        return bool(tools) or self.reasoning is not None
