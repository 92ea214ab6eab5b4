"""Of a row, that is trained which the policy would sample, in contexts that an engine makes, and nothing is lost."""

import json
from collections.abc import Mapping
from itertools import groupby
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from millrace.config.sections.data import LossMaskConfig
from millrace.trainer.sft.conversation import ConversationEncoder
from millrace.trainer.sft.data import RowEncoder
from millrace.trainer.sft.rendering import BadRowError
from millrace.trainer.sft.rows import JsonRow, conversation_of
from millrace_testing import turn_templates as templates
from millrace_testing.turn_templates import tokenizer_of

CALL = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}


def turns(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]


def shown(tokenizer: Any, token_ids: Any, trained: Any) -> str:
    """Return the tokens' text, with what is trained on in brackets."""
    runs = groupby(zip(token_ids, trained, strict=True), key=lambda each: bool(each[1]))
    texts = [(flag, tokenizer.decode([token_id for token_id, _ in run])) for flag, run in runs]
    return "".join(f"[{text}]" if flag else text for flag, text in texts)


def encoded(tokenizer: Any, row: Mapping[str, Any], **loss_mask: bool) -> str:
    return shown(tokenizer, *ConversationEncoder(tokenizer, LossMaskConfig(**loss_mask)).encode(conversation_of(row)))


@pytest.mark.parametrize(
    ("template", "eos", "trained"),
    [
        (templates.CHATML, "<|endoftext|>", ["b<|im_end|>", "d<|im_end|>"]),
        (templates.CHATML, "</s>", ["b<|im_end|>", "d<|im_end|>"]),
        (templates.GEMMA, "<eos>", ["b<end_of_turn>", "d<end_of_turn>"]),
        (templates.PHI, "<|endoftext|>", ["b<|end|>", "d<|end|>"]),
        (templates.GLM, "<|endoftext|>", ["\nb<|user|>", "\nd<|user|>"]),
        (templates.COMMAND, "<|end_turn|>", ["b<|end_response|><|end_turn|>", "d<|end_response|><|end_turn|>"]),
        (templates.CHATML.replace("<|im_end|>", "</t>"), "</s>", ["b</t>\n", "d</t>\n</s>"]),
    ],
    ids=["base-chatml", "chatml-s", "gemma", "phi", "glm", "command", "words"],
)
def test_a_turn_is_trained_up_to_its_own_stop(template: str, eos: str, trained: list[str]) -> None:
    text = encoded(tokenizer_of(template, eos=eos, bos="<bos>"), {"messages": turns("a", "b", "c", "d")})
    assert [part.partition("]")[0] for part in text.split("[")[1:]] == trained


def test_a_call_ends_with_what_opens_its_result() -> None:
    messages = [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [CALL]}]
    answered = [*messages, {"role": "tool", "content": "3"}, {"role": "assistant", "content": "b"}]
    glm, responds = (tokenizer_of(each, eos="<|eos|>") for each in (templates.GLM, templates.RESPONDS))
    called = '<call>add {"x": 1}</call>'
    assert encoded(glm, {"messages": messages}).endswith(f"[\n{called}<|observation|>]")
    assert f"[\n{called}<|observation|>]\n3<|assistant|>[\nb<|user|>]" in encoded(glm, {"messages": answered})
    assert encoded(responds, {"messages": messages}).endswith(f"[{called}<|response|>]")
    assert f"[{called}<|response|>]3<|response_end|>[b<|turn_end|>]" in encoded(responds, {"messages": answered})


def test_users_turns_that_open_with_a_stop_are_trained_whole() -> None:
    text = encoded(tokenizer_of(templates.GLM), {"messages": turns("a", "b")}, user=True, assistant=False)
    assert text == "[<|user|>\na]<|assistant|>\nb"


def test_a_thought_ends_no_turn() -> None:
    messages = [*turns("a"), {"role": "assistant", "reasoning_content": "x", "content": "b"}]
    assert encoded(tokenizer_of(templates.HARMONY, eos="<|return|>"), {"messages": messages}).endswith(
        "<|start|>assistant[<|message|>x<|end|><|start|>assistant<|message|>b<|return|>]"
    )


def test_a_stop_within_a_turns_text_is_refused_and_one_at_its_end_is_trained_once() -> None:
    tokenizer = tokenizer_of(templates.CHATML)
    assert "[b<|im_end|>]<|im_end|>" in encoded(tokenizer, {"messages": turns("a", "b<|im_end|>")})
    with pytest.raises(BadRowError, match=r"message 1 \(assistant\) has '<\|im_end\|>', which ends a turn"):
        encoded(tokenizer, {"messages": turns("a", "b<|im_end|>c")})


def test_the_first_message_is_no_turn_of_the_assistant_that_an_engine_samples() -> None:
    tokenizer, greeting = tokenizer_of(templates.CHATML), {"role": "assistant", "content": "hi"}
    text = encoded(tokenizer, {"messages": [greeting, *turns("a", "b")]})
    assert text.startswith("<|im_start|>assistant\nhi<|im_end|>") and text.count("[") == 1
    with pytest.raises(BadRowError, match="begins with the assistant's turn"):
        encoded(tokenizer, {"messages": [greeting]})


MARKED = (  # marks the header and the line break after the end, too, and ends earlier turns otherwise
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|start|>assistant\n{{ m.content }}"
    "{{ '<|return|>\n' if loop.last else '<|end|>\n' }}{% endgeneration %}"
    "{% else %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def test_markers_are_narrowed_to_what_is_sampled() -> None:
    text = encoded(tokenizer_of(MARKED, eos="<|return|>"), {"messages": turns("a", "b", "c", "d")})
    header = "<|start|>assistant\n"
    assert text.endswith(f"{header}[b]<|end|>\n<|start|>user\nc<|end|>\n{header}[d<|return|>]\n")


def test_a_marked_turn_that_no_engine_opens_so_is_not_trained() -> None:
    template = MARKED.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}").replace(
        "{{ m.content }}{{ '<|return|>", "{% if loop.last %}<think>\n{% endif %}{{ m.content }}{{ '<|return|>"
    )
    text = encoded(tokenizer_of(template, eos="<|return|>"), {"messages": turns("a", "b", "c", "d")})
    assert text.endswith("\nb<|end|>\n<|start|>user\nc<|end|>\n<|start|>assistant\n<think>\n[d<|return|>]\n")
    never = template.replace("{% if loop.last %}<think>", "{% if false %}<think>")
    with pytest.raises(BadRowError, match="opens the turn of message 1"):
        encoded(tokenizer_of(never, eos="<|return|>"), {"messages": turns("a", "b")})


def test_the_policy_begins_where_the_prompts_tokens_end() -> None:
    tokenizer = tokenizer_of(templates.THINKS)
    row = {"messages": turns("a", "b")}
    token_ids, trained = ConversationEncoder(tokenizer, LossMaskConfig()).encode(conversation_of(row))
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False)
    assert token_ids[: len(prompt)] == prompt and trained.index(True) == len(prompt)
    assert shown(tokenizer, token_ids, trained).endswith("<think>\n[\n</think>\n\nb<|im_end|>]\n")
    # The second turn's prompt has the first one's line breaks as one token, which the policy did not sample so.
    messages = turns("a", "b", "c", "d")
    with pytest.raises(
        BadRowError, match=r'one row cannot have both.*"chat_template_kwargs": {"enable_thinking": false}'
    ):
        encoded(tokenizer, {"messages": messages})
    mended = encoded(tokenizer, {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    assert mended.count("</think>\n\n[") == 2


def test_a_header_that_an_argument_mends_is_refused_with_the_argument() -> None:
    template = templates.CHATML.replace(
        "assistant\n{% endif %}", "assistant\n{% if enable_thinking | default(true) %}<think>\n{% endif %}{% endif %}"
    )
    with pytest.raises(BadRowError, match=r'opens the turn.*kwargs": {"enable_thinking": false} in the row it can be'):
        encoded(tokenizer_of(template), {"messages": turns("a", "b")})


def text_row(tokenizer: Any, prompt: str, completion: str) -> str:
    encoder = RowEncoder(tokenizer, seq_len=64)
    sample = encoder.encode({"prompt": prompt, "completion": completion})
    assert sample is not None and sample.ce_weights is not None
    return shown(tokenizer, sample.token_ids, sample.ce_weights)


def spaced_tokenizer() -> Any:
    """Return one that puts a space before a text, as SentencePiece does."""
    vocabulary = {"▁": 0, **{letter: at + 1 for at, letter in enumerate("abcdef")}, "<unk>": 7, "</s>": 8, "<s>": 9}
    made = Tokenizer(models.BPE(vocab={**vocabulary, "▁c": 10}, merges=[("▁", "c")], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first")
    made.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>", unk_token="<unk>")


def test_text_rows_are_tokenised_joined_and_end_once(monkeypatch: pytest.MonkeyPatch) -> None:
    adds = tokenizer_of(None, eos="</s>", adds_eos=True)
    assert text_row(adds, "ab", "cd") == "ab[cd</s>]"
    assert text_row(adds, "ab", "cd</s>") == "ab[cd</s>]"
    assert text_row(adds, "a\n", "\nb") == "a\n[\nb</s>]"  # as one text they have one token for both
    spaced = spaced_tokenizer()
    sample = RowEncoder(spaced, seq_len=64).encode({"prompt": "ab", "completion": "cd"})
    assert sample is not None and spaced.convert_ids_to_tokens(sample.token_ids) == ["▁", "a", "b", "c", "d", "</s>"]
    sample = RowEncoder(spaced, seq_len=64).encode({"prompt": "ab ", "completion": "cd"})  # "▁c" is across the border
    assert sample is not None and spaced.convert_ids_to_tokens(sample.token_ids) == [*"▁ab▁cd", "</s>"]
    assert sample.ce_weights is not None and sample.ce_weights.tolist() == [0, 0, 0, 0, 1, 1, 1]
    monkeypatch.setattr(type(spaced), "is_fast", False)  # without offsets
    assert RowEncoder(spaced, seq_len=64).encode({"prompt": "ab ", "completion": "cd"}) == sample
    assert text_row(adds, "a\n", "\nb") == "a\n[\nb</s>]"


def test_text_rows_begin_as_the_tokenizers_texts_do_once() -> None:
    spaced = spaced_tokenizer()
    begins = {"single": "<s> $A", "special_tokens": [("<s>", 9)]}
    spaced.backend_tokenizer.post_processor = processors.TemplateProcessing(**begins)
    assert text_row(spaced, "", "ab") == "<s>[ab</s>]"
    assert text_row(spaced, "ab", "cd") == "<s> ab[cd</s>]"
    assert text_row(spaced, "<s>ab", "cd") == "<s>ab[cd</s>]"


def test_a_completion_without_a_token_of_its_own_is_refused() -> None:
    spaced = spaced_tokenizer()
    spaced.backend_tokenizer.model.fuse_unk = True
    encoder = RowEncoder(spaced, seq_len=64)
    assert encoder.encode({"prompt": "ü", "completion": "é"}) is None and encoder.num_bad == 1


def test_a_text_with_an_end_in_its_midst_is_refused() -> None:
    encoder = RowEncoder(tokenizer_of(None, eos="</s>"), seq_len=64)
    assert encoder.encode({"prompt": "a", "completion": "b</s>c"}) is None and encoder.num_bad == 1


@pytest.mark.parametrize(
    ("template", "message", "lost"),
    [
        (
            templates.GEMMA,
            {"content": "b", "tool_calls": [CALL]},
            r"the arguments of tool call 0 of message 1 \(assistant\)",
        ),
        (
            templates.GEMMA,
            {"content": "b", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            r"tool call 0 of message 1",
        ),
        (
            templates.CHATML.replace("m.content", "m.content.split('</think>')[-1]"),
            {"content": "<think>x</think>b"},
            r"the reasoning of message 1",
        ),
        (templates.CHATML, {"content": "b", "reasoning_content": "x"}, r"the reasoning of message 1 \(assistant\)"),
        (
            templates.CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"),
            {"content": "b"},
            r"the text of message 0 \(user\), the text of message 1 \(assistant\)",
        ),
    ],
    ids=["arguments", "calls", "thought", "reasoning", "text"],
)
def test_what_the_template_does_not_write_is_said(template: str, message: dict[str, Any], lost: str) -> None:
    messages = [*turns("a"), {"role": "assistant", **message}]
    with pytest.raises(BadRowError, match=f"does not write {lost}"):
        encoded(tokenizer_of(template, bos="<bos>"), {"messages": messages})


def test_every_part_of_a_message_is_looked_for() -> None:
    one = templates.CHATML.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    called = {"role": "assistant", "content": "b", "tool_calls": [CALL, CALL]}
    with pytest.raises(BadRowError, match=r"does not write the arguments of tool call 1 of message 1 \(assistant\)$"):
        encoded(tokenizer_of(one), {"messages": [*turns("a"), called]})
    first = templates.CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
    parts = [{"type": "text", "text": text} for text in "xy"]
    with pytest.raises(BadRowError, match=r"does not write the text of message 0 \(user\), the text of message 1"):
        encoded(tokenizer_of(first), {"messages": [{"role": role, "content": parts} for role in ("user", "assistant")]})


def test_tools_that_the_template_does_not_write_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    encoder = RowEncoder(tokenizer_of(templates.CHATML), seq_len=64)
    row = {"messages": turns("a", "b"), "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert encoder.encode(row) is not None
    encoder.warn_of_losses()
    assert ["does not write which tools" in record.getMessage() for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("template", "messages", "trained", "lost"),
    [
        (
            templates.CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'system' }}"),
            [{"role": "system", "content": "s"}, *turns("a", "b")],
            "[b<|im_end|>]\n",
            "the text of message 0 (system)",
        ),
        (
            templates.CHATML,
            [
                {**message, "reasoning_content": "x"} if at == 1 else message
                for at, message in enumerate(turns(*"abcd"))
            ],
            "[d<|im_end|>]\n",
            "the reasoning of message 1 (assistant)",
        ),
    ],
    ids=["system", "earlier thought"],
)
def test_context_that_the_template_leaves_out_is_warned_of(
    template: str, messages: Any, trained: str, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    encoder = RowEncoder(tokenizer_of(template), seq_len=64)
    for at in range(2):
        sample = encoder.encode({"messages": messages}, place=f"rows.jsonl:{at}")
        assert sample is not None and encoder.num_bad == 0
    whole = shown(tokenizer_of(template), sample.token_ids, sample.ce_weights)
    assert whole.endswith(trained.strip()) and "b" in whole
    encoder.warn_of_losses()
    first, count = caplog.records
    assert vars(first)["lost"] == lost and vars(first)["row"] == "rows.jsonl:0" and vars(count)["poorer"] == 2


def test_a_conversation_is_given_as_engines_give_it_where_that_writes_more() -> None:
    tokenizer = tokenizer_of(templates.CHATML.replace("{{ m.content }}", "{{ m.reasoning_content + m.content }}"))
    parts = [{"type": "text", "text": text} for text in "xy"]
    flat = {"name": "add", "arguments": {"x": 1}}
    messages = [
        {"role": "user", "content": parts, "reasoning_content": ""},
        {"role": "assistant", "content": parts, "thinking": "t", "tool_calls": [flat]},
    ]
    assert "user\nx\ny<|im_end|>" in (text := encoded(tokenizer, {"messages": messages}))
    assert '[tx\ny<call>add {"x": 1}</call><|im_end|>]' in text


@pytest.mark.parametrize(
    ("arguments", "trained"),
    [(None, "{}"), ("", "{}"), ([1], "[1]"), ("3", "3"), ("{bad", "no JSON: '{bad'"), ('{"a":1,"a":2}', "no JSON")],
)
def test_odd_arguments_are_written_as_they_are_or_refused(arguments: Any, trained: str) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    row = {"messages": [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    try:
        assert f"[<call>f {trained}</call><|im_end|>]" in encoded(tokenizer_of(templates.CHATML), JsonRow(row))
    except BadRowError as error:
        assert trained in str(error)


def test_a_stop_within_arguments_is_refused() -> None:
    call = {"function": {"name": "f", "arguments": {"x": "a<|im_end|>b"}}}
    with pytest.raises(BadRowError, match="ends a turn, within its text"):
        encoded(
            tokenizer_of(templates.CHATML),
            {"messages": [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]},
        )


def test_a_tokenizer_with_several_templates_and_no_default_refuses_the_row() -> None:
    tokenizer = tokenizer_of(templates.CHATML)
    tokenizer.chat_template = {"rag": templates.CHATML, "chat": templates.CHATML}
    with pytest.raises(BadRowError, match="multiple chat templates"):
        encoded(tokenizer, {"messages": turns("a", "b")})
    row = {"messages": turns("a", "b"), "chat_template_kwargs": {"chat_template": "chat"}}
    assert encoded(tokenizer, row).endswith("[b<|im_end|>]\n")


def test_parts_that_are_no_text_are_refused() -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": "x"}]}, *turns("a", "b")[1:]]
    with pytest.raises(BadRowError, match=r"message 0 has a part of type 'image'"):
        encoded(tokenizer_of(templates.CHATML), {"messages": messages})


@pytest.mark.parametrize("given", [{"x": 1, "y": "é"}, '{"x": 1, "y": "é"}'], ids=["object", "text"])
@pytest.mark.parametrize(
    "written",
    [
        "{{ c.function.arguments | tojson }}",
        "{{ c.function.arguments }}",
        "{{ 'args ' + c.function.arguments }}",
        "{{ c.function.arguments | tojson if c.function.arguments is mapping else c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}",
    ],
    ids=["tojson", "printed", "joined", "either", "items"],
)
def test_arguments_are_given_as_the_template_writes_them(written: str, given: Any) -> None:
    template = templates.CHATML.replace("{{ c.function.arguments | tojson }}", written)
    call = {"function": {"name": "add", "arguments": given}}
    text = encoded(
        tokenizer_of(template), {"messages": [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}
    )
    whole = "x=1;y=é;" if "items" in written else '{"x": 1, "y": "é"}'
    assert whole in text and text.endswith("</call><|im_end|>]\n")


def test_a_message_without_content_is_given_as_engines_give_it() -> None:
    template = templates.CHATML.replace("{{ m.content }}", "{{ 'text: ' + m.content }}")
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    assert '[text: <call>add {"x": 1}</call><|im_end|>]' in encoded(
        tokenizer_of(template), {"messages": [*turns("a"), calls]}
    )
    template = templates.CHATML.replace("{{ m.content }}", "{% if 'tool_calls' not in m %}{{ m.content }}{% endif %}")
    no_calls = [{**message, "tool_calls": []} for message in turns("a", "b")]
    assert "[b<|im_end|>]" in encoded(tokenizer_of(template), {"messages": no_calls})


def test_what_is_wrong_is_said_of_the_form_that_the_template_takes() -> None:
    template = templates.CHATML.replace("{{ c.function.arguments | tojson }}", "{{ 'args ' + c.function.arguments }}")
    messages = [*turns("a"), {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning": "x"}]
    with pytest.raises(BadRowError, match="does not write the reasoning of message 1"):
        encoded(tokenizer_of(template), {"messages": messages})


TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + templates.CHATML


def test_nulls_of_a_table_are_taken_out_at_every_depth_and_those_of_json_are_kept() -> None:
    tokenizer = tokenizer_of(TOOLS_TEMPLATE)
    parameters = {"properties": {"city": {"type": "string", "enum": ["X", None]}, "zone": None}}
    row = {
        "messages": [
            {"role": "user", "content": "a", "tool_calls": None},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": None, "function": {"name": "f", "arguments": {"city": "X", "zone": None}}}],
            },
        ],
        "tools": [{"function": {"name": "f", "parameters": parameters}}],
    }
    text = encoded(tokenizer, row)
    assert '{"city": "X"}' in text and "zone" not in text and '"enum": ["X", null]' in text
    text = encoded(tokenizer, JsonRow(row))
    assert '{"city": "X", "zone": null}' in text and '"zone": null}' in text
    as_text = {"messages": row["messages"], "tools": json.dumps(row["tools"])}
    assert '"zone": null' in encoded(tokenizer, as_text)  # no table writes into a text
