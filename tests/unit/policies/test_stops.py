"""The tokens that end a turn: found by rendering, named by configs, and said in what is published."""

import json
from pathlib import Path

import pytest

from millrace.errors import CorruptObjectError
from millrace.policies.stops import turn_stops, with_stops
from millrace_testing import turn_templates as templates
from millrace_testing.turn_templates import tokenizer_of


@pytest.mark.parametrize(
    ("template", "eos", "answer", "call"),
    [
        (templates.CHATML, "<|im_end|>", "<|im_end|>", "<|im_end|>"),
        (templates.CHATML, "<|endoftext|>", "<|im_end|>", "<|im_end|>"),
        (templates.CHATML, "</s>", "<|im_end|>", "<|im_end|>"),
        (templates.GEMMA, "<eos>", "<end_of_turn>", None),
        (templates.PHI, "<|endoftext|>", "<|end|>", None),
        (templates.GLM, "<|endoftext|>", "<|user|>", "<|observation|>"),
        (templates.HARMONY, "<|return|>", "<|return|>", None),
        (templates.COMMAND, "<|end_turn|>", "<|end_turn|>", None),
        (templates.RESPONDS, "<|eos|>", "<|turn_end|>", "<|response|>"),
        (templates.CHATML.replace("<|im_end|>", "</t>"), "</s>", None, None),
        (None, "</s>", None, None),
    ],
    ids=["chatml", "base-chatml", "chatml-s", "gemma", "phi", "glm", "harmony", "command", "responds", "words", "none"],
)
def test_the_end_of_a_turn_is_the_templates(
    template: str | None, eos: str, answer: str | None, call: str | None
) -> None:
    tokenizer = tokenizer_of(template, eos=eos, bos="<bos>")
    stops = turn_stops(tokenizer)
    found = [None if stop is None else tokenizer.convert_ids_to_tokens(stop) for stop in (stops.answer, stops.call)]
    assert found == [answer, call]
    assert set(tokenizer.convert_ids_to_tokens(list(stops.token_ids))) == {eos, answer, call} - {None}


def test_a_template_that_takes_lists_of_parts_only_shows_its_end(tmp_path: Path) -> None:
    template = templates.CHATML.replace(
        "{{ m.content }}", "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_of(template, eos="</s>")
    assert turn_stops(tokenizer).answer == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_an_end_that_was_added_as_a_plain_word_is_one() -> None:
    tokenizer = tokenizer_of(None, eos="</s>")
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>", "<call>", "</call>"])
    tokenizer.chat_template = templates.CHATML
    stops = turn_stops(tokenizer)
    assert stops.answer == stops.call == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_configs_name_stops_too_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3, "text_config": {"eos_token_id": [4]}}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    tokenizer = tokenizer_of(templates.CHATML)
    assert turn_stops(tokenizer, tmp_path).token_ids == {3, 4, 5, tokenizer.eos_token_id}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CorruptObjectError, match=r"generation_config\.json.*copy or download"):
        turn_stops(tokenizer, tmp_path)


def test_what_is_published_names_every_stop_and_keeps_what_it_has() -> None:
    config = {"temperature": 0.6, "eos_token_id": 7}
    files = {"config.json": b'{"eos_token_id": 7}', "generation_config.json": json.dumps(config).encode()}
    said = json.loads(with_stops(files, {9, 7})["generation_config.json"])
    assert said == {"temperature": 0.6, "eos_token_id": [7, 9]}
    assert with_stops(files, {7}) == files and with_stops(files, ()) == files
    del files["generation_config.json"]
    assert with_stops(files, {7}) == files
    assert json.loads(with_stops(files, {9})["generation_config.json"]) == {"eos_token_id": 9}
