"""Messages through the chat template."""

import pytest

from millrace.errors import InvalidSpecError
from millrace.inference.http.chat import encode_chat
from millrace.inference.model_files import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir):
    return load_tokenizer(model_dir)


def test_content_parts_nulls_and_tool_calls_reach_the_template(tokenizer):
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 7}'}}],
        },
    ]
    text = tokenizer.decode(encode_chat(tokenizer, messages))
    assert text == (
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\n<tool_call>7</tool_call><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_part_of_the_prompt(tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    text = tokenizer.decode(encode_chat(tokenizer, [{"role": "user", "content": "x"}], tools=tools))
    assert '"name": "add"' in text


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"content": "x"}, "role"),
        ({"role": "user", "content": 3}, "content"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}, "tool_calls"),
    ],
)
def test_bad_messages_are_named(tokenizer, message, field):
    with pytest.raises(InvalidSpecError, match=rf"messages\[0\]\.{field}"):
        encode_chat(tokenizer, [message])


def test_a_thought_reaches_the_template_under_both_of_its_names(tokenizer, monkeypatch):
    monkeypatch.setattr(
        tokenizer, "chat_template", "{% for m in messages %}{{ m.reasoning_content }}{{ m.reasoning }}.{% endfor %}"
    )
    messages = [{"role": "assistant", "content": "x", key: "so"} for key in ("reasoning", "reasoning_content")]
    assert tokenizer.decode(encode_chat(tokenizer, messages)) == "soso.soso."
