"""Which tokens of a conversation are trained on, and what happens where a template rewrites it."""

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.data import LossMaskConfig
from millrace.errors import InvalidSpecError
from millrace.models.vocabulary import load_tokenizer
from millrace.trainer.sft.conversation import BadRowError, ConversationEncoder
from millrace.trainer.sft.data import RowEncoder
from millrace.trainer.sft.rows import conversation_of

# Tools at the top, answers of several tools in one turn, and thinking in every turn, as templates have them.
PLAIN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\\n' }}<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<c>{{ c.function.name }} {{ c.function.arguments | tojson }}</c>{% endfor %}"
    "<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if mood %}({{ mood }}){% endif %}{% endif %}"
)
# Strips the thinking from every turn of the assistant but the last, as reasoning models' templates do.
STRIPS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if loop.last %}{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}<|im_end|>"
    "{% endgeneration %}\n{% else %}{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def base(example: Path) -> Path:
    return example / "base"


def tokenizer_with(base: Path, template: str | None) -> Any:
    tokenizer = load_tokenizer(base)
    tokenizer.chat_template = template
    return tokenizer


def turns(*contents: str, first: str = "user") -> list[dict[str, Any]]:
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]


def trained_text(base: Path, row: dict[str, Any], template: str = PLAIN, **loss_mask: bool) -> tuple[str, list[str]]:
    """Return the whole text of the sample, and the stretches of it that are trained on."""
    tokenizer = tokenizer_with(base, template)
    token_ids, trained = ConversationEncoder(tokenizer, LossMaskConfig(**loss_mask)).encode(conversation_of(row))
    stretches: list[list[int]] = []
    for at, (token_id, flag) in enumerate(zip(token_ids, trained, strict=True)):
        if flag and (at == 0 or not trained[at - 1]):
            stretches.append([])
        if flag:
            stretches[-1].append(token_id)
    return tokenizer.decode(token_ids), [tokenizer.decode(stretch) for stretch in stretches]


def test_only_the_assistants_turns_of_a_conversation_are_trained_on(base: Path) -> None:
    text, trained = trained_text(base, {"messages": turns("a", "b", "c", "d")})
    assert trained == ["b<|im_end|>", "d<|im_end|>"]
    assert text.endswith("<|im_start|>assistant\nd<|im_end|>\n")


def test_users_and_tools_inside_a_completion_are_not_trained_on(base: Path) -> None:
    row = {
        "prompt": turns("a"),
        "completion": [
            {"role": "assistant", "content": "b", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
            {"role": "assistant", "content": "e"},
        ],
    }
    text, trained = trained_text(base, row)
    assert trained == ['b<c>f {"x": 1}</c><|im_end|>', "c<|im_end|>", "e<|im_end|>"]
    assert "<|im_start|>user\n<r>1</r>\n<r>2</r><|im_end|>" in text


def test_the_assistants_turns_in_a_prompt_are_trained_on_too(base: Path) -> None:
    row = {"prompt": turns("a", "b", "c"), "completion": turns("d", first="assistant")}
    assert trained_text(base, row)[1] == ["b<|im_end|>", "d<|im_end|>"]


TOOLS = "<|im_start|>user\n<r>1</r>\n<r>2</r><|im_end|>"


@pytest.mark.parametrize(
    ("loss_mask", "trained"),
    [
        ({"assistant": False, "user": True}, ["<|im_start|>user\na<|im_end|>", "<|im_start|>user\nd<|im_end|>"]),
        ({"assistant": False, "tool": True}, [TOOLS]),
        ({"assistant": False, "system": True}, ["<|im_start|>system\ns<|im_end|>"]),
        ({"tool": True}, ["b<|im_end|>", TOOLS, "c<|im_end|>", "e<|im_end|>"]),
        (
            {"system": True, "user": True},
            [
                "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\na<|im_end|>",
                *("b<|im_end|>", "c<|im_end|>", "<|im_start|>user\nd<|im_end|>", "e<|im_end|>"),
            ],
        ),
    ],
    ids=["user", "tool", "system", "assistant and tool", "all but tool"],
)
def test_the_loss_mask_chooses_the_roles(base: Path, loss_mask: dict[str, bool], trained: list[str]) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]
    assert trained_text(base, {"messages": messages}, **loss_mask)[1] == trained


@pytest.mark.parametrize("column", ["tools", "tool_defs"])
@pytest.mark.parametrize("as_text", [False, True], ids=["list", "JSON text"])
def test_tools_and_template_arguments_reach_the_template(base: Path, as_text: bool, column: str) -> None:
    tools, arguments = [{"type": "function", "function": {"name": "f"}}], {"mood": "glad"}
    row = {
        "messages": turns("a", "(glad)b"),
        column: json.dumps(tools) if as_text else tools,
        "chat_template_kwargs": json.dumps(arguments) if as_text else arguments,
    }
    text, trained = trained_text(base, row)
    assert text.startswith('<|im_start|>system\n[{"type": "function"') and trained == ["b<|im_end|>"]


def test_keys_that_a_table_filled_with_none_are_no_keys(base: Path) -> None:
    messages = [{**message, "tool_calls": None} for message in turns("a", "b")]
    assert trained_text(base, {"messages": messages, "prompt": None}) == trained_text(
        base, {"messages": turns("a", "b")}
    )


def test_a_last_turn_without_a_stop_token_gets_one(base: Path) -> None:
    template = PLAIN.replace("<|im_end|>\n{% endif %}{% endfor %}", "</t>\n{% endif %}{% endfor %}")
    assert template != PLAIN
    assert trained_text(base, {"messages": turns("a", "b")}, template)[1] == ["b</t>\n<|im_end|>"]


def test_a_template_that_rewrites_history_is_found_and_named(base: Path) -> None:
    row = {"messages": turns("a", "<think>x</think>b", "c", "d")}
    with pytest.raises(BadRowError) as raised:
        trained_text(base, row, STRIPS)
    message = str(raised.value)
    assert "renders message 1 (assistant) as" in message and "once message 2 (user) follows" in message
    assert "<think>x</think>b" in message and "generation %}" in message
    # Without thinking there is nothing to strip, and the last turn keeps its own.
    assert trained_text(base, {"messages": turns("a", "b", "c", "<think>x</think>d")}, STRIPS)[1] == [
        "b<|im_end|>",
        "<think>x</think>d<|im_end|>",
    ]


def test_a_header_that_differs_from_the_rendered_turn_is_named(base: Path) -> None:
    template = PLAIN.replace("{% if mood %}", "<think>\n{% if mood %}")
    with pytest.raises(BadRowError, match=r"opens the turn of message 1 \(assistant\) with .*<think>"):
        trained_text(base, {"messages": turns("a", "b")}, template)


def test_generation_markers_say_what_is_trained_where_history_is_rewritten(base: Path) -> None:
    row = {"messages": turns("a", "<think>x</think>b", "c", "<think>y</think>d")}
    text, trained = trained_text(base, row, MARKED)
    assert "<think>x" not in text and trained == ["b<|im_end|>", "<think>y</think>d<|im_end|>"]
    with pytest.raises(BadRowError, match=r"only what the assistant wrote.*loss_mask"):
        trained_text(base, row, MARKED, user=True)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "narrator", "content": "a"}], r"message 0 has role 'narrator'; roles are"),
        (turns("a", "boom"), "the chat template refuses it: boom"),
    ],
)
def test_what_a_row_has_wrong_is_said(base: Path, messages: list[dict[str, Any]], words: str) -> None:
    template = "{% if messages[-1].content == 'boom' %}{{ raise_exception('boom') }}{% endif %}" + PLAIN
    with pytest.raises(BadRowError, match=words):
        trained_text(base, {"messages": messages}, template)


def test_a_template_that_fails_in_python_refuses_the_row_only(base: Path) -> None:
    with pytest.raises(BadRowError, match="refuses it"):
        trained_text(
            base, {"messages": turns("a", "b")}, "{% for message in messages %}{{ message.content + 1 }}{% endfor %}"
        )
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}, *turns("b", first="assistant")]
    template = "{% for message in messages %}{{ message.content + '!' }}{% endfor %}"
    assert trained_text(base, {"messages": parts}, template)[1] == ["b!<|im_end|>"]


def test_few_bad_rows_are_left_out_and_many_are_refused(base: Path, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = {"messages": turns("a", "b")}, {"messages": turns("a", "<think>x</think>b", "c", "d")}
    encoder = RowEncoder(tokenizer_with(base, STRIPS), seq_len=64)
    encoder.require_completion([(good, "")] * 19 + [(bad, "rows.jsonl:20")])
    assert [record.row for record in caplog.records] == ["rows.jsonl:20"]  # type: ignore[attr-defined]
    assert [encoder.encode(row) is None for row in [good] * 9 + [bad]] == [False] * 9 + [True]
    with pytest.raises(InvalidSpecError, match=r"message 1 \(assistant\).*2 of 11 rows cannot be used"):
        encoder.encode(bad)
    with pytest.raises(InvalidSpecError, match="1 of 2 rows") as raised:
        RowEncoder(tokenizer_with(base, STRIPS), seq_len=64).require_completion([(good, "a:1"), (bad, "a:2")])
    assert raised.value.violations[0].source == "a:2" and raised.value.exit_code == 2


def test_a_tokenizer_without_offsets_gives_the_same_sample(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"messages": turns("a", "b", "c", "d")}
    fast = trained_text(base, row)
    monkeypatch.setattr(type(load_tokenizer(base)), "is_fast", False)
    assert trained_text(base, row) == fast
