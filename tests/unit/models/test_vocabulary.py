"""A tokenizer that is not the model's, or not there, is refused with token, id and key before anything trains."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from millrace.config import RLConfig
from millrace.config.sections.rl import plays_conversations
from millrace.errors import MillraceError
from millrace.models.served import look_at
from millrace.models.vocabulary import check_tokenizer, require_tokenizer
from millrace.policies.stops import turn_stops
from millrace_testing.model_files import TEMPLATE, write_tokenizer

CONFIG = "tokenizer_config.json"
ROWS = 48
"""Rows of the embedding of the model that these tests take."""


def _require(directory: Path, *, needs_template: bool = True) -> Any:
    return require_tokenizer(directory, model=directory, needs_template=needs_template)


def test_a_tokenizer_that_fits_is_given(copy: Path) -> None:
    assert len(_require(write_tokenizer(copy, num_tokens=ROWS))) == ROWS


def _edit(name: str, **changes: Any) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / name
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **changes}))

    return edit


def _words(num_tokens: int, **changes: Any) -> Callable[[Path], object]:
    return lambda directory: write_tokenizer(directory, num_tokens=num_tokens, **changes)


SMALL: dict[str, tuple[Callable[[Path], object], str]] = {
    "a word": (_words(ROWS + 1), f'ids 0 to {ROWS - 1}, and token "t{ROWS}" has id {ROWS}'),
    "many words": (_words(ROWS + 20), "; and 17 more"),
    "a special token": (_words(ROWS, pad_token="<pad>"), f'token "<pad>" has id {ROWS}'),
    "an added token": (_words(ROWS, extra_special_tokens=["<tool>"]), f'token "<tool>" has id {ROWS}'),
    "the end by the config": (_edit("config.json", eos_token_id=99), "eos_token_id of config.json is 99"),
    "one of the ends": (
        _edit("generation_config.json", eos_token_id=[1, 48]),
        "eos_token_id of generation_config.json",
    ),
    "padding": (_edit("generation_config.json", pad_token_id=4096), "pad_token_id of generation_config.json is 4096"),
}


@pytest.mark.parametrize("case", SMALL)
def test_an_id_without_a_row_is_refused(copy: Path, case: str) -> None:
    write_tokenizer(copy, num_tokens=ROWS)
    damage, said = SMALL[case]
    damage(copy)
    with pytest.raises(MillraceError) as raised:
        _require(copy)
    assert raised.value.reason == "VOCABULARY_TOO_SMALL" and said in str(raised.value)
    assert "model.name" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("value", ["t1", 1.0, True, [1, "t1"]])
def test_what_is_no_id_of_a_token_is_refused(copy: Path, value: Any) -> None:
    write_tokenizer(copy, num_tokens=ROWS)
    _edit("generation_config.json", eos_token_id=value)(copy)
    with pytest.raises(MillraceError, match=r"generation_config\.json.*eos_token_id is .*not the id") as raised:
        _require(copy)
    assert raised.value.reason == "MODEL_FILE_UNUSABLE"


def test_ids_of_nothing_are_no_ids(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS)
    _edit("config.json", pad_token_id=-1, bos_token_id=None, eos_token_id=-1)(copy)
    assert -1 not in turn_stops(_require(copy), copy).token_ids


def test_a_token_of_images_needs_no_row_of_a_model_of_text(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS, extra_special_tokens={"image_token": "<image_soft_token>"})
    tokenizer = _require(copy)
    assert tokenizer.convert_tokens_to_ids("<image_soft_token>") == ROWS


ABSENT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no file": (lambda directory: None, "TOKENIZER_MISSING"),
    "a config alone": (_edit(CONFIG), "TOKENIZER_MISSING"),
    "an empty object": (_edit("tokenizer.json"), "TOKENIZER_MISSING"),
    "no JSON": (lambda directory: (directory / "tokenizer.json").write_text("[1"), "TOKENIZER_MISSING"),
    "a list": (lambda directory: (directory / CONFIG).write_text("[]"), "MODEL_FILE_UNUSABLE"),
    "latin-1": (
        lambda directory: (directory / "tokenizer_config.json").write_bytes(b'{"\xe9": 1}'),
        "MODEL_FILE_UNUSABLE",
    ),
    "a directory": (lambda directory: (directory / CONFIG).mkdir(), "MODEL_FILE_UNUSABLE"),
}


@pytest.mark.parametrize("case", ABSENT)
def test_a_tokenizer_that_is_not_there_is_refused(copy: Path, case: str) -> None:
    damage, reason = ABSENT[case]
    damage(copy)
    with pytest.raises(MillraceError) as raised:
        _require(copy)
    assert raised.value.reason == reason and str(copy) in str(raised.value) and raised.value.remedy


def test_a_tokenizer_may_lie_elsewhere(copy: Path, tmp_path: Path) -> None:
    other = write_tokenizer(tmp_path / "other", num_tokens=ROWS)
    require_tokenizer(other, model=copy, needs_template=True)
    with pytest.raises(MillraceError, match=f'token "t{ROWS}" has id {ROWS}'):
        require_tokenizer(write_tokenizer(other, num_tokens=ROWS + 1), model=copy, needs_template=True)


def test_a_template_is_asked_for_where_conversations_are_played(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS, template=None)
    _require(copy, needs_template=False)
    with pytest.raises(MillraceError, match=r"no chat template.*inference\.model\.chat_template") as raised:
        _require(copy)
    assert raised.value.reason == "CHAT_TEMPLATE_MISSING"


USELESS: dict[str, tuple[Any, str]] = {
    "of no Jinja": ("{% for message in messages %}{{ message.content ", "cannot be read"),
    "of an unknown filter": ("{{ messages | nonsense }}", "cannot be read.*nonsense"),
    "for tools alone": ({"tool_use": TEMPLATE}, r"without tools \(it has tool_use\)"),
}


@pytest.mark.parametrize("case", USELESS)
def test_a_template_that_takes_no_conversation_is_none(copy: Path, case: str) -> None:
    template, said = USELESS[case]
    write_tokenizer(copy, num_tokens=ROWS, template=template)
    _require(copy, needs_template=False)
    with pytest.raises(MillraceError, match=said) as raised:
        _require(copy)
    assert raised.value.reason == "CHAT_TEMPLATE_MISSING"


def test_a_template_that_is_particular_about_messages_is_one(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS, template="{{ raise_exception('begin with a system message') }}")
    _require(copy)


CONVERSATIONS: dict[str, tuple[Mapping[str, Any], bool]] = {
    "by default": ({}, True),
    "with vLLM's key": ({"inference": {"model": {"chat_template": "t.jinja"}}}, False),
    "with vLLM's flag": ({"inference": {"vllm": {"chat-template": "t.jinja"}}}, False),
    "texts": ({"orchestrator": {"env": [{"id": "a", "args": {"message_type": "completion"}}]}}, False),
    "texts and chats": (
        {"orchestrator": {"env": [{"id": "a", "args": {"message_type": "completion"}}, {"id": "b"}]}},
        True,
    ),
}


@pytest.mark.parametrize("case", CONVERSATIONS)
def test_the_config_says_whether_conversations_are_played(case: str) -> None:
    changes, expected = CONVERSATIONS[case]
    orchestrator = {"rollouts_per_example": 2, "batch_size": 4, "env": [{"id": "a"}], **changes.get("orchestrator", {})}
    config = RLConfig.model_validate({**changes, "orchestrator": orchestrator})
    assert plays_conversations(config) is expected


def test_an_adapter_is_no_model_to_look_at(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS)
    assert look_at(copy, tokenizer=copy, needs_template=True) == []
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(MillraceError, match="millrace merge") as raised:
        look_at(copy, tokenizer=copy, needs_template=True)
    assert raised.value.reason == "MODEL_IS_ADAPTER"


def test_no_file_of_the_tokenizer_is_taken_from_a_directory_of_that_name(copy: Path) -> None:
    write_tokenizer(copy, num_tokens=ROWS)
    shutil.copytree(copy, copy / "tokenizer_old")
    _require(copy)


def test_a_tokenizer_whose_code_only_engines_run_is_left_to_them(copy: Path) -> None:
    with pytest.raises(MillraceError, match="tokenizer"):
        check_tokenizer(copy, model=copy, needs_template=True)
    _edit(CONFIG, auto_map={"AutoTokenizer": ["code.Tokenizer", None]}, tokenizer_class="OwnTokenizer")(copy)
    check_tokenizer(copy, model=copy, needs_template=True)
    with pytest.raises(MillraceError, match="tokenizer"):
        require_tokenizer(copy, model=copy, needs_template=True)
