"""Messages through the chat template."""

import pytest

from millrace.errors import InvalidSpecError
from millrace.inference.http.chat import encode_chat
from millrace.inference.http.schema import GenerateSampling, with_stop_tokens
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
        ({"role": "assistant", "tool_calls": [{"name": "f"}]}, "tool_calls"),
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


AS_IT_IS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
BY_ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ["[1, 2]", '"x"', "7", "null", "true", "{broken", "", None])
def test_arguments_that_are_no_object_are_the_policys_mistake_and_no_400(tokenizer, monkeypatch, arguments):
    """A template that writes them gets them as the policy wrote them; one that wants an object gets an empty one."""
    good = {"function": {"name": "g", "arguments": '{"a": 1}'}}
    odd = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [odd, good]}]
    monkeypatch.setattr(tokenizer, "chat_template", BY_ITEMS)
    assert tokenizer.decode(encode_chat(tokenizer, messages)) == "fga=1;"
    monkeypatch.setattr(tokenizer, "chat_template", AS_IT_IS)
    written = {"{broken": '"{broken"', "": "{}", None: "{}", "null": "{}"}.get(arguments, arguments)
    assert tokenizer.decode(encode_chat(tokenizer, messages)) == f'{written}{{"a": 1}}'


def test_a_template_that_takes_no_calls_at_all_still_says_so(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('no calls') }}")
    call = {"function": {"name": "f", "arguments": "[]"}}
    with pytest.raises(InvalidSpecError, match="no calls"):
        encode_chat(tokenizer, [{"role": "assistant", "tool_calls": [call]}])


def test_stop_strings_that_are_special_tokens_are_their_ids_or_refused(tokenizer):
    start, end = (tokenizer.convert_tokens_to_ids(text) for text in ("<|im_start|>", "<|im_end|>"))
    asked = GenerateSampling(stop=["ab", "<|im_end|>"], stop_token_ids=[start])
    found = with_stop_tokens(asked, tokenizer)
    assert (found.stop, found.stop_token_ids) == (["ab"], [start, end])
    alone = with_stop_tokens(GenerateSampling(stop="<|im_end|>"), tokenizer)
    assert (alone.stop, alone.stop_token_ids) == (None, [end])
    with pytest.raises(InvalidSpecError, match=r"stop.*'a<\|im_end\|>' would never match.*skip_special_tokens = false"):
        with_stop_tokens(GenerateSampling(stop="a<|im_end|>"), tokenizer)
    for as_text in (GenerateSampling(stop="a<|im_end|>", skip_special_tokens=False), GenerateSampling(stop="ab")):
        assert with_stop_tokens(as_text, tokenizer) is as_text
