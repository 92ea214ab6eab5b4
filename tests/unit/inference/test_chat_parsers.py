"""What the parsers of tool calls and reasoning make of what models write, well formed and hostile."""

import json
import time
from collections import Counter

import orjson
import pytest

from millrace.config.sections.inference import EMBEDDED_PARSERS
from millrace.errors import InvalidSpecError
from millrace.inference.http.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, ChatParsers
from millrace_testing.inference import parser_replies
from millrace_testing.inference.parser_cases import CASES, NOW, NOW_XML, TOOLS
from millrace_testing.patience import patient

KINDS = [(calls, None) for calls in ("hermes", "llama3_json", "qwen3_xml")] + [
    ("hermes", kind) for kind in REASONING_PARSERS
]
MEGABYTE = 1 << 20


def parse_completion(
    text: str, tool_calls: str = "hermes", reasoning: str | None = None, tools=TOOLS, **template_kwargs
):
    """Reasoning, content and calls with their arguments decoded."""
    parsers = ChatParsers(tool_calls=tool_calls, reasoning=reasoning)
    said = parsers.parse_completion(text, tools=tools, template_kwargs=template_kwargs)
    if said is None:
        return None, text, []
    return said.reasoning, said.content, [(call.name, json.loads(call.arguments)) for call in said.calls]


def test_the_config_knows_every_parser():
    assert {
        "tool_call_parser": tuple(sorted(TOOL_CALL_PARSERS)),
        "reasoning_parser": tuple(sorted(REASONING_PARSERS)),
    } == EMBEDDED_PARSERS


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tool_calls}-{case.reasoning}-{case.text[:40]}")
def test_what_is_well_formed_becomes_what_vllm_makes_of_it(case):
    """That vLLM makes this of it: tests/integration/inference_vllm/test_vllm_parsers.py."""
    reasoning, content, calls = parse_completion(case.text, case.tool_calls, case.reasoning, **case.template_kwargs)
    assert (reasoning, (content or "").strip() or None, calls) == case.said


def test_every_reply_of_the_table_is_taken_apart_as_it_says():
    """What vLLM makes of them, and why ours differ: `parser_replies`."""
    table = parser_replies.replies()
    for reply in table:
        found = parse_completion(reply.text, reply.tool_calls, reply.reasoning, **reply.template_kwargs)
        reasoning, content, calls = json.loads(json.dumps(found))
        assert [reasoning, (content or "").strip() or None, calls] == reply.expected, (reply.why, reply.text)
    assert {reply.why for reply in table if reply.why} == parser_replies.REASONS.keys()
    assert all(reply.ours != reply.vllm for reply in table if reply.why)
    counts = Counter((reply.reasoning or reply.tool_calls) for reply in table)
    assert min(counts.values()) >= 60 and counts.keys() >= {"hermes", "llama3_json", "qwen3_coder", *REASONING_PARSERS}


def test_a_call_that_is_only_thought_of_is_not_made():
    call = f"<tool_call>{NOW}</tool_call>"
    for reasoning in (None, *REASONING_PARSERS):
        for text in (f"<think>say {call}, or not</think>it is 4", f"say {call}, or not</think>it is 4"):
            said = parse_completion(text, reasoning=reasoning)
            assert said[2] == [] and said[1].endswith("it is 4")
            assert (said[0] or said[1]).count(call) == 1, "and is not lost either"
    made = parse_completion(f"<think>say {call}?</think>{call}", reasoning="qwen3")
    assert made == (f"say {call}?", None, [("now", {})])
    assert parse_completion(f"<think>so {call}", reasoning="qwen3") == ("so ", None, [("now", {})]), (
        "it forgot to end it"
    )
    assert parse_completion(f"<think>so {call}, or", reasoning="qwen3") == (f"so {call}, or", None, []), "it thinks on"


def test_an_argument_may_hold_the_end_of_a_thought():
    for parser, call in (
        ("hermes", '<tool_call>{"name": "find", "arguments": {"text": "</think>"}}</tool_call>'),
        ("llama3_json", '{"name": "find", "parameters": {"text": "</think>"}}'),
        ("qwen3_xml", "<function=find><parameter=text></think></parameter></function>"),
    ):
        assert parse_completion(call, parser) == (None, None, [("find", {"text": "</think>"})])


@pytest.mark.parametrize("parser", ["qwen3_xml", "qwen3_coder"])
@pytest.mark.parametrize(
    "value",
    [
        *("</parameter>", "a</parameter>b</parameter>c", "</function>", "</tool_call>", "</function></tool_call>"),
        *(
            "</parameter></function>",
            "</parameter>\n</function>\n</tool_call>",
            "x</parameter></function></tool_call>y",
        ),
        *("<tool_call>", "<function=now></function>", "<parameter=other>1</parameter>", "<think>a</think>", "a < b"),
    ],
)
def test_values_may_hold_their_own_closing_tags(parser, value):
    first = f"<function=find>\n<parameter=text>\n{value}\n</parameter>\n<parameter=count>\n7\n</parameter>\n</function>"
    last = f"<function=find>\n<parameter=count>\n7\n</parameter>\n<parameter=text>\n{value}\n</parameter>\n</function>"
    wanted = ("find", {"text": value, "count": 7})
    text = f"so\n<tool_call>\n{first}\n</tool_call>\n<tool_call>\n{last}\n</tool_call>"
    assert parse_completion(text, parser) == (None, "so", [wanted, wanted])


def test_content_before_calls_loses_the_whitespace_that_templates_add_again():
    assert parse_completion(f"\nSo:\n\n<tool_call>{NOW}</tool_call>") == (None, "So:", [("now", {})])
    assert parse_completion("\n plain \n") == (None, "\n plain \n", []), "a text without calls stays as it is"


def test_without_tools_calls_are_text():
    assert parse_completion(f"<tool_call>{NOW}</tool_call>", tools=[]) == (None, f"<tool_call>{NOW}</tool_call>", [])
    assert parse_completion(f"<think>so</think>{NOW}", reasoning="qwen3", tools=[]) == ("so", NOW, [])


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["now", {}]</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "name": "find", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": "\x00"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>"),
        ("hermes", "<tool_call>"),
        ("llama3_json", '{"name": "now", "parameters": {"x": 1e999}}'),
        ("llama3_json", '{"name": "now", "parameters": {}} and {"x": 1}'),
        ("llama3_json", '{"name": "now", "parameters": {"x": "{'),
        ("llama3_json", '{"name": "no"w", "parameters": {}}'),
        ("qwen3_xml", "<tool_call>garbage</tool_call>"),
        ("qwen3_xml", f"<tool_call>{NOW}</tool_call><tool_call>{NOW_XML}</tool_call>"),
        ("qwen3_xml", f"<tool_call>{NOW_XML}</tool_call><tool_call>"),
        ("qwen3_xml", "<tool_call><function=find><parameter=count>5"),
        ("qwen3_xml", "<tool_call><function=find><parameter=count>5</function></tool_call>"),
        ("qwen3_xml", "<tool_call><function=find"),
        ("qwen3_xml", "<function=></function>"),
    ],
)
def test_what_is_malformed_is_text(parser, text):
    assert parse_completion(text, parser) == (None, text, [])


def test_values_that_do_not_fit_their_type_stay_text():
    def value(key: str, text: str):
        [(_, arguments)] = parse_completion(
            f"<function=find><parameter={key}>{text}</parameter></function>", "qwen3_xml"
        )[2]
        return arguments[key]

    for key, text in (
        ("count", "9" * 5000),
        ("count", "1.5"),
        ("ratio", "inf"),
        ("ratio", "nan"),
        ("deep", "maybe"),
        ("where", "{"),
        ("where", '{"x": NaN}'),
        ("parts", "[" * 5000),
    ):
        assert value(key, text) == text
    assert value("ratio", "2.0") == 2 and value("limit", "NULL") is None and value("order", "up") == "up"


def test_schemas_that_are_none_make_text_of_values():
    call = "<function=find><parameter=count>5</parameter></function>"
    for parameters in (
        None,
        [],
        {"properties": 7},
        {"properties": {"count": {"type": [None, {}], "enum": 3, "anyOf": 1}}},
    ):
        tools = [{"function": 3}, {"function": {"name": "find", "parameters": parameters}}]
        assert parse_completion(call, "qwen3_xml", tools=tools) == (None, None, [("find", {"count": "5"})])


@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call>{",
        "<think>",
        "</think>",
        "<function=",
        "<function=a>",
        "<function=a><parameter=",
        "<function=a><parameter=b>",
        "<parameter=b>",
        "{",
        "}",
        '{"',
        '"',
        '\\"',
        "\x00\x1b[",
        "�",
        "<tool_call>{}</tool_call>",
        NOW,
        f"<tool_call>{NOW}</tool_call>",
        NOW_XML,
    ],
)
def test_a_megabyte_of_anything_is_read_in_one_pass(unit):
    text = unit * (MEGABYTE // len(unit))
    for tool_calls, reasoning in KINDS:
        began = time.process_time()
        said = ChatParsers(tool_calls=tool_calls, reasoning=reasoning).parse_completion(
            text, tools=TOOLS, template_kwargs={}
        )
        assert time.process_time() - began < patient(10), (tool_calls, reasoning)
        if said is not None:
            orjson.dumps([said.reasoning, said.content, list(map(list, said.calls))])


def test_an_engine_without_automatic_choice_refuses_tools():
    ChatParsers(has_auto_tool_choice=False).check(tools=[])
    ChatParsers().check(tools=TOOLS)
    with pytest.raises(InvalidSpecError, match=r"tool_choice.*enable_auto_tool_choice"):
        ChatParsers(has_auto_tool_choice=False).check(tools=TOOLS)
