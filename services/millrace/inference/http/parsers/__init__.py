"""Splits the text of a chat's completion into reasoning, content and tool calls, by parsers with vLLM's names.

A parser looks at text only, after everything was sampled: tokens, log-probs and policy spans stay what they are. What a
model writes is untrusted, so a parser never fails: what it cannot read in full is content, as it was written.

What is well formed becomes what vLLM 0.32 makes of it. Where the two differ no thought, answer or call is lost here: a
call that is only thought of is not made, and a tag that is only mentioned, or half a call, stays text. The table
`millrace_testing/inference/parser_replies.json` has what both make of some 500 replies, and why; both are held to it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.errors import InvalidSpecError, Violation
from millrace.inference.http.parsers.calls import ToolCall, parse_hermes, parse_llama3_json
from millrace.inference.http.parsers.qwen3_xml import parse_qwen3_xml
from millrace.inference.http.parsers.reasoning import (
    CLOSE,
    Thought,
    begins_with_thought,
    split_deepseek_r1,
    split_qwen3,
    thought_end,
)

Tools = Sequence[Mapping[str, Any]]
ToolCallParser = Callable[[str, Tools], tuple[str | None, list[ToolCall]] | None]
"""Returns content and calls of a text, given the request's tools; None if no calls can be read in the text."""
ReasoningParser = Callable[[str, Mapping[str, Any]], Thought]
"""Returns the reasoning and the rest of a text, given the variables of the chat template."""

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
class ParsedCompletion:
    """The parts of a completion's text."""

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
        """Raise InvalidSpecError if a request with these tools needs automatic tool choice, and the engine has it
        switched off.
        """
        if tools and not self.has_auto_tool_choice:
            message = (
                "is auto, which this engine is configured not to do; send tool_choice = 'none', or leave "
                "`inference.model.enable_auto_tool_choice` out of its config"
            )
            raise InvalidSpecError([Violation(field="tool_choice", message=message)], reason="REQUEST_INVALID")

    def parse_completion(
        self, text: str, *, tools: Tools, template_kwargs: Mapping[str, Any]
    ) -> ParsedCompletion | None:
        """Return the parts of a completion; None if it is content alone.

        Calls are looked for only if there are `tools`. They are looked for after the thought. If a thought does not
        end, and the text ends in what can be a call, the calls in the thought are made.
        """
        thought, shown = Thought(None, text or None), ""
        if self.reasoning is not None:
            thought = REASONING_PARSERS[self.reasoning](text, template_kwargs)
        elif tools:
            shown = text[: self._thought_end(text, tools)]  # stays in the content, and has no calls
            thought = Thought(None, text[len(shown) :] or None)
        parsed = self._parse(thought.rest, tools)
        if parsed is not None:
            content, calls = parsed
            # Templates put their own whitespace around a call: what stayed would be twice in the next turn's prompt.
            return ParsedCompletion(
                reasoning=thought.reasoning, content=(shown + (content or "")).strip() or None, calls=calls
            )
        if thought.is_open and _ends_in_call(text) and (parsed := self._parse(thought.reasoning, tools)):
            return ParsedCompletion(reasoning=parsed[0] or None, content=None, calls=parsed[1])
        is_content = self.reasoning is None or thought.rest == text
        return None if is_content else ParsedCompletion(reasoning=thought.reasoning, content=thought.rest)

    def _parse(self, text: str | None, tools: Tools) -> tuple[str | None, list[ToolCall]] | None:
        return TOOL_CALL_PARSERS[self.tool_calls](text, tools) if text and tools else None

    def _thought_end(self, text: str, tools: Tools) -> int:
        """Return the index at which the answer begins: after a `</think>`, unless that is within a call."""
        end = thought_end(text)
        if not end or begins_with_thought(text):
            return end
        whole, after = self._parse(text, tools), self._parse(text[end:], tools)
        is_lost = whole is not None and (after is None or len(after[1]) < len(whole[1]))
        return 0 if is_lost and self._parse(text[: end - len(CLOSE)], tools) is None else end

    def may_find(self, *, tools: Tools) -> bool:
        """Return whether a completion can have other parts than content."""
        return bool(tools) or self.reasoning is not None


def _ends_in_call(text: str) -> bool:
    """Return whether the end of a text can be the end of a call."""
    return text.rstrip().endswith(("</tool_call>", "</function>", "}"))
