"""Spellings of config.json that programs write: each is read as what it says, or refused with a reason that is true."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from millrace.errors import CorruptObjectError, NotFoundError
from millrace.inference.embedded import loader as engine
from millrace.models.loading import load_config
from millrace.models.vocabulary import load_tokenizer
from millrace.trainer.model.pretrained import load_model, policy_files
from millrace_testing.inference.tiny import tiny_tokenizer
from millrace_testing.trainer.families import make_family
from millrace_testing.trainer.saved import logits_of

READ: dict[str, dict[str, Any]] = {
    "a prefix": {"dtype": "torch.bfloat16"},
    "an older key with a prefix": {"dtype": None, "torch_dtype": "torch.bfloat16"},
    "auto": {"dtype": "auto"},
    "no name of torch": {"dtype": "bf16"},
    "another case": {"dtype": "BFloat16"},
    "empty": {"dtype": ""},
    "a number": {"dtype": 16},
    "a list": {"dtype": ["bfloat16"]},
    "no format of weights": {"dtype": "float8_e4m3fn"},
    "null": {"dtype": None, "torch_dtype": None},
    "an infinity": {"time_step_limit": [0.0, float("inf")], "floor": float("-inf"), "none": float("nan")},
    "several stops": {"eos_token_id": [1, 2]},
    "no class": {"architectures": None},
    "no quantization": {"quantization_config": None, "compression_config": None},
    "whole numbers": {"attention_dropout": 0, "rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
    "what other classes have": {"sliding_window": 4, "use_sliding_window": False, "text_config": None, "@": {"a": [1]}},
    "what older releases wrote": {
        "pretraining_tp": 1,
        "torchscript": False,
        "_name_or_path": "/gone",
        "rope_scaling": {},
    },
}
REFUSED: dict[str, tuple[bytes, str]] = {
    "a mark of byte order": (b"\xef\xbb\xbf{}", "BOM"),
    "something behind it": (b"{}\xef\xbb\xbf", "Extra data"),
    "a key twice": (b'{"hidden_size": 8, "hidden_size": 16}', "a key twice: 'hidden_size'"),
    "a comment": (b"// of a model\n{}", "Expecting value"),
    "UTF-16": ("{}".encode("utf-16"), "utf-8"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_family("llama", tmp_path_factory.mktemp("model"))
    tiny_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def respelled(plain: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    directory = shutil.copytree(plain, tmp_path / "model")
    said = json.loads((plain / "config.json").read_text()) | READ[request.param]
    (directory / "config.json").write_text(json.dumps(said))
    return directory


@pytest.mark.parametrize("respelled", READ, indirect=True, ids=list(READ))
def test_it_is_the_same_model_with_the_same_tokenizer(respelled: Path, plain: Path) -> None:
    model = load_model(respelled)
    torch.testing.assert_close(logits_of(model), logits_of(load_model(plain)), atol=0, rtol=0)
    assert load_tokenizer(respelled).get_vocab() == load_tokenizer(plain).get_vocab()
    said = json.loads(policy_files(model, respelled, dtype=torch.bfloat16)["config.json"])
    assert said["dtype"] == said["torch_dtype"] == "bfloat16" and said["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("respelled", "dtype"),
    [("a prefix", torch.bfloat16), ("an older key with a prefix", torch.bfloat16), ("auto", torch.float32)],
    indirect=["respelled"],
)
def test_the_engine_has_the_format_that_is_said_or_that_of_the_files(respelled: Path, dtype: torch.dtype) -> None:
    assert engine.load_model(respelled, None, context_length=32).dtype == dtype


@pytest.mark.parametrize("respelled", ["what other classes have"], indirect=True)
def test_the_engine_asks_for_windows_of_classes_that_have_them(respelled: Path) -> None:
    assert engine.load_model(respelled, None, context_length=32).config.sliding_window == 4


@pytest.mark.parametrize("respelled", ["an infinity"], indirect=True)
def test_an_infinity_is_saved_as_it_was(respelled: Path) -> None:
    model = load_model(respelled)
    said = json.loads(policy_files(model, respelled, dtype=torch.float32)["config.json"])
    assert (said["time_step_limit"], said["floor"]) == ([0.0, float("inf")], float("-inf"))


def test_formats_within_a_part_of_a_config_are_read_as_well(tmp_path: Path) -> None:
    said = {
        "model_type": "gemma3",
        "text_config": {"torch_dtype": "torch.bfloat16"},
        "vision_config": {"dtype": "auto"},
    }
    (tmp_path / "config.json").write_text(json.dumps(said))
    config = load_config(tmp_path)
    assert (config.text_config.dtype, config.vision_config.dtype) == (torch.bfloat16, None)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_reader_takes_is_refused_with_the_cause(case: str, tmp_path: Path) -> None:
    data, said = REFUSED[case]
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(CorruptObjectError, match=said) as raised:
        load_config(tmp_path)
    assert raised.value.reason == "MODEL_FILE_UNUSABLE"


@pytest.mark.parametrize(("key", "value"), [("num_attention_heads", 4.0), ("tie_word_embeddings", 0)])
def test_a_number_of_the_wrong_kind_is_refused_by_its_field(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", key: value}))
    with pytest.raises(NotFoundError, match=f"Field '{key}' expected"):
        load_config(tmp_path)
