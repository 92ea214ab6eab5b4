"""What parsers make of well-formed texts: one table that ours are held to, and vLLM's own.

Run in the interpreter that has vLLM, `parser_cases.py TOKENIZER OUT` writes what vLLM's parsers make of the table.
"""

import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "deep": {"type": "boolean"},
                    "where": {"type": "object"},
                    "parts": {"type": "array"},
                    "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                    "order": {"enum": ["up", 3, None]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


class Case(NamedTuple):
    """A text with the names of the parsers, and what it becomes."""

    tool_calls: str | None
    reasoning: str | None
    text: str
    said: tuple[str | None, str | None, list[tuple[str, Any]]]
    """Reasoning, content without the whitespace around it, and calls with their arguments decoded."""
    template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - of a tuple that nobody changes


def _xml(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


NOW = '{"name": "now", "arguments": {}}'
FIND = '{"name": "find", "arguments": {"text": "a \\"}\\" é", "where": {"x": [1, {}]}}}'
FOUND = ("find", {"text": 'a "}" é', "where": {"x": [1, {}]}})
FIND_XML = (
    "<function=find>\n<parameter=text>\n7 < 8\nand so on\n</parameter>\n<parameter=count>\n7\n</parameter>\n"
    "<parameter=ratio>\n0.5\n</parameter>\n<parameter=deep>\nTrue\n</parameter>\n"
    '<parameter=where>\n{"x": [1, null]}\n</parameter>\n<parameter=parts>\n["a"]\n</parameter>\n'
    "<parameter=limit>\nnull\n</parameter>\n<parameter=order>\n3\n</parameter>\n</function>"
)
FOUND_XML = (
    "find",
    {
        "text": "7 < 8\nand so on",
        "count": 7,
        "ratio": 0.5,
        "deep": True,
        "where": {"x": [1, None]},
        "parts": ["a"],
        "limit": None,
        "order": 3,
    },
)
NOW_XML = "<function=now>\n</function>"

HERMES = [
    Case("hermes", None, "no call at all", (None, "no call at all", [])),
    Case("hermes", None, f"<tool_call>{NOW}</tool_call>", (None, None, [("now", {})])),
    Case("hermes", None, f"Let me see.\n{_xml(FIND, NOW)}", (None, "Let me see.", [FOUND, ("now", {})])),
    Case("hermes", None, f"<tool_call>\n{NOW}", (None, None, [("now", {})])),
    Case("hermes", None, f"{_xml(NOW)} and then", (None, None, [("now", {})])),
    Case("hermes", None, '<tool_call>{"name": "now", "arguments": "x"}</tool_call>', (None, None, [("now", "x")])),
    Case("hermes", None, "<tool_call>{broken</tool_call>", (None, "<tool_call>{broken</tool_call>", [])),
    Case("hermes", None, f"{_xml(NOW)}<tool_call>?", (None, f"{_xml(NOW)}<tool_call>?", [])),
    Case("qwen3_json", None, _xml(NOW), (None, None, [("now", {})])),
]
LLAMA = [
    Case("llama3_json", None, "no call at all", (None, "no call at all", [])),
    Case("llama3_json", None, NOW, (None, None, [("now", {})])),
    Case("llama3_json", None, '<|python_tag|>{"name": "now", "parameters": {}}', (None, None, [("now", {})])),
    Case("llama3_json", None, f"{FIND}; {NOW}", (None, None, [FOUND, ("now", {})])),
    Case("llama3_json", None, f"I call {NOW} now", (None, None, [("now", {})])),
    Case("llama3_json", None, 'a set is {"x": 1}', (None, 'a set is {"x": 1}', [])),
    Case("llama3_json", None, "open {", (None, "open {", [])),
    Case("llama4_json", None, NOW, (None, None, [("now", {})])),
]
XML = [
    Case(name, reasoning, text, (None, content, calls), {"enable_thinking": False} if reasoning else {})
    for name, reasoning in (("qwen3_coder", None), ("qwen3_xml", None), ("qwen3_xml", "qwen3"))
    for text, content, calls in (
        ("no call at all", "no call at all", []),
        (_xml(FIND_XML), None, [FOUND_XML]),
        (f"Let me see.\n{_xml(NOW_XML, FIND_XML)}", "Let me see.", [("now", {}), FOUND_XML]),
        (NOW_XML, None, [("now", {})]),
        (f"<tool_call>\n{NOW_XML}", None, [("now", {})]),
        (_xml(f"{NOW_XML}\n{NOW_XML}"), None, [("now", {}), ("now", {})]),
        (f"so{_xml(NOW_XML)}or{_xml(NOW_XML)} and then", "so", [("now", {}), ("now", {})]),
        ("a </tool_call> b </function> c", "a </tool_call> b </function> c", []),
        (f"<tool_call>hm{NOW_XML}ha</tool_call>", None, [("now", {})]),
        ("<function=find>hello</function>", None, [("find", {})]),
        ("<function=find><parameter=text></parameter></function>", None, [("find", {"text": ""})]),
        (
            "<function=find><parameter=text>a<tool_call>b</parameter></function>",
            None,
            [("find", {"text": "a<tool_call>b"})],
        ),
        (
            "<function=find><parameter=count>5<parameter=text>x</parameter></function>",
            None,
            [("find", {"count": 5, "text": "x"})],
        ),
        (
            "<function=find><parameter=count>7</parameter><parameter=count>8</parameter></function>",
            None,
            [("find", {"count": 8})],
        ),
        (_xml("<function=other>\n<parameter=count>\n7\n</parameter>\n</function>"), None, [("other", {"count": "7"})]),
        (_xml("<function=find><parameter=count>seven</parameter></function>"), None, [("find", {"count": "seven"})]),
        (
            _xml("<function=find><parameter=text><b>x</b>\n\n</parameter></function>"),
            None,
            [("find", {"text": "<b>x</b>\n"})],
        ),
    )
]
THOUGHTS = [
    Case("hermes", "deepseek_r1", "<think>so</think>it is", ("so", "it is", [])),
    Case("hermes", "deepseek_r1", "so</think>it is", ("so", "it is", [])),
    Case("hermes", "deepseek_r1", "<think>so", ("so", None, [])),
    Case("hermes", "deepseek_r1", "so", ("so", None, [])),
    Case("hermes", "deepseek_r1", "<think>so</think>", ("so", None, [])),
    Case("hermes", "deepseek_r1", f"<think>so</think>\n\n{_xml(NOW)}", ("so", None, [("now", {})])),
    Case("hermes", "deepseek_r1", f"<think>{_xml(NOW)}</think>done", (_xml(NOW), "done", [])),
    Case("hermes", "qwen3", "<think>\nso\n</think>\n\nit is", ("\nso\n", "it is", [])),
    Case("hermes", "qwen3", "so</think>it is", ("so", "it is", [])),
    Case("hermes", "qwen3", "<think>so", ("so", None, [])),
    Case("hermes", "qwen3", "so", ("so", None, [])),
    Case("hermes", "qwen3", f"<think>so</think>{_xml(NOW)}", ("so", None, [("now", {})])),
    Case("hermes", "qwen3", f"<think>so\n{_xml(NOW)}", ("so\n", None, [("now", {})])),
    Case("qwen3_xml", "qwen3", f"<think>so</think>ok\n{_xml(FIND_XML)}", ("so", "ok", [FOUND_XML])),
    Case("qwen3_xml", "qwen3", f"<think>so\n{_xml(NOW_XML)}", ("so\n", None, [("now", {})])),
    Case("hermes", "qwen3", "so", (None, "so", []), {"enable_thinking": False}),
    Case("hermes", "qwen3", "so</think>it is", (None, "so</think>it is", []), {"enable_thinking": False}),
    Case("hermes", "qwen3", "<think></think>it is", (None, "it is", [])),
    Case("hermes", "qwen3", "", (None, None, [])),
    Case("hermes", "deepseek_r1", "", (None, None, [])),
]
CASES = [*HERMES, *LLAMA, *XML, *THOUGHTS]


def vllm_said(case: Case, tokenizer: Any) -> tuple[str | None, str | None, list[tuple[str, Any]]]:
    """Return what vLLM's parsers return for the text of a case, called as its server calls them."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    made = ParserManager.get_parser(
        tool_parser_name=case.tool_calls, reasoning_parser_name=case.reasoning, enable_auto_tools=True
    )
    request = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], tools=TOOLS, chat_template_kwargs=case.template_kwargs
    )
    parser = made(tokenizer, request.tools, chat_template_kwargs=case.template_kwargs)
    reasoning, content, calls = parser.parse(case.text, request, enable_auto_tools=True)
    found = [(call.name, json.loads(call.arguments)) for call in calls or ()]
    return reasoning or None, (content or "").strip() or None, found


def _main() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
    Path(sys.argv[2]).write_text(json.dumps([vllm_said(case, tokenizer) for case in CASES]))


if __name__ == "__main__":
    _main()
