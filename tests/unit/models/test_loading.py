"""A model is made of all of its tensors and no others, whoever loads it, and what is wrong is named."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace.errors import CorruptObjectError, MillraceError
from millrace.inference.embedded import loader as engine
from millrace.models.loading import check_weights, empty_model, fill_model
from millrace.trainer.model.pretrained import load_model
from millrace_testing.model_files import Change, Tensors, rewrite
from millrace_testing.trainer.families import FAMILIES, make_family

CPU = torch.device("cpu")
DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def _gang(directory: Path) -> None:
    check_weights(directory)
    fill_model(empty_model(directory), directory, device=CPU)


LOADERS: dict[str, Callable[[Path], object]] = {
    "one process": load_model,
    "a gang": _gang,
    "the embedded engine": lambda directory: engine.load_model(directory, None, context_length=64),
}


def _without(*names: str) -> Change:
    return lambda tensors: {name: each for name, each in tensors.items() if name not in names}


def _with(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


DAMAGE: dict[str, tuple[Change, str]] = {
    "a weight is missing": (_without(DOWN), f"1 tensor missing: {DOWN}"),
    "the head is missing": (_without("lm_head.weight"), "1 tensor missing: lm_head.weight"),
    "names behind a prefix": (
        lambda tensors: {f"base_model.model.{name}": each for name, each in tensors.items()},
        "25 tensors missing: lm_head.weight, model.embed_tokens.weight, .* and 15 more; 25 tensors unexpected: base_m",
    ),
    "an unexpected tensor": (_with("extra.weight", torch.zeros(2)), "1 tensor unexpected: extra.weight"),
    "another shape": (_with(NORM, torch.zeros(3)), rf"of another shape: {NORM} \(\[3\] instead of \[16\]\)"),
    "more rows": (_with(EMBEDDING, torch.zeros(50, 16)), rf"{EMBEDDING} \(\[50, 16\] instead of \[48, 16\]\)"),
    "nan": (_with(NORM, torch.full((16,), float("nan"))), f"1 tensor not finite: {NORM}"),
    "one infinity": (_with(EMBEDDING, torch.eye(48, 16) / torch.eye(48, 16).sub(1).clamp(-0.0, 1)), "not finite"),
}


@pytest.mark.parametrize("who", LOADERS)
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_not_the_model_is_refused_by_name(copy: Path, damage: str, who: str) -> None:
    change, said = DAMAGE[damage]
    rewrite(copy, change)
    with pytest.raises(CorruptObjectError, match=said) as raised:
        LOADERS[who](copy)
    assert raised.value.reason == "MODEL_CORRUPT" and str(copy) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_names_and_shapes_are_compared_without_reading_numbers(copy: Path) -> None:
    rewrite(copy, DAMAGE["a weight is missing"][0])
    with pytest.raises(CorruptObjectError, match=f"1 tensor missing: {DOWN}"):
        check_weights(copy)
    rewrite(copy, _with(DOWN, torch.full((16, 24), float("nan"))))
    check_weights(copy)


SAME: dict[str, Change] = {
    "a tied head that is written, too": lambda tensors: {**tensors, "lm_head.weight": tensors[EMBEDDING].clone()},
    "the head alone of a tied pair": lambda tensors: {
        ("lm_head.weight" if name == EMBEDDING else name): each for name, each in tensors.items()
    },
    "without the prefix of the base model": lambda tensors: {
        name.removeprefix("model."): each for name, each in tensors.items()
    },
    "a buffer of older releases": _with("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4)),
}


@pytest.mark.parametrize("who", ["one process", "a gang"])
@pytest.mark.parametrize("case", SAME)
def test_what_the_class_knows_of_its_files_loads_as_it_always_did(
    tied: Path, tmp_path: Path, case: str, who: str
) -> None:
    directory = rewrite(shutil.copytree(tied, tmp_path / "model"), SAME[case])
    model = empty_model(directory)
    if who == "a gang":
        check_weights(directory)
    fill_model(model, directory, device=CPU)
    expected = AutoModelForCausalLM.from_pretrained(tied).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_a_head_that_is_tied_and_has_numbers_of_its_own_is_refused(tied: Path, tmp_path: Path) -> None:
    """transformers unties it without touching the config, and engines drop it: two different models."""
    directory = shutil.copytree(tied, tmp_path / "model")
    rewrite(directory, lambda tensors: {**tensors, "lm_head.weight": tensors[EMBEDDING] + 1})
    with pytest.raises(CorruptObjectError, match=r"tied by config.json \(tie_word_embeddings\).*: lm_head.weight"):
        load_model(directory)


def _config(**changes: object) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


CONFIGS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "no object": (lambda d: (d / "config.json").write_text("[1]"), "MODEL_FILE_UNUSABLE", "JSON list"),
    "no UTF-8": (lambda d: (d / "config.json").write_bytes(b'{"a": "\xe9"}'), "MODEL_FILE_UNUSABLE", "config.json"),
    "huge": (lambda d: os.truncate(d / "config.json", 65 << 20), "MODEL_FILE_UNUSABLE", "at most"),
    "a link to nothing": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").symlink_to("nowhere")),
        "MODEL_NOT_FOUND",
        "no config.json",
    ),
    "text for a number": (_config(hidden_size="x"), "MODEL_NOT_FOUND", "hidden_size"),
    "an unknown type": (_config(model_type="nonsense"), "MODEL_NOT_FOUND", "nonsense"),
    "no heads": (_config(num_key_value_heads=0), "MODEL_NOT_FOUND", "config.json"),
    "padding without a row": (_config(pad_token_id=5000), "MODEL_NOT_FOUND", "[Pp]adding"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_describes_no_model_is_refused(copy: Path, case: str) -> None:
    damage, reason, said = CONFIGS[case]
    damage(copy)
    with pytest.raises(MillraceError, match=said) as raised:
        load_model(copy)
    assert raised.value.reason == reason and raised.value.remedy and "\n" not in str(raised.value)


def test_the_engine_keeps_the_format_of_the_files(copy: Path) -> None:
    rewrite(copy, lambda tensors: {name: each.bfloat16() for name, each in tensors.items()})
    _config(dtype="bfloat16")(copy)
    model = engine.load_model(copy, None, context_length=64)
    assert {each.dtype for each in model.parameters()} == {torch.bfloat16}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_what_transformers_makes_of_it(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = make_family(family, tmp_path)
    check_weights(directory)
    fill_model(model := empty_model(directory, dtype=dtype), directory, device=CPU)
    expected = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    assert _values(model).keys() == _values(expected).keys()
    assert all(
        torch.equal(tensor, _values(expected)[name]) and tensor.dtype == _values(expected)[name].dtype
        for name, tensor in _values(model).items()
    )


def _values(model: torch.nn.Module) -> Tensors:
    return {**model.state_dict(), **dict(model.named_buffers())}


def test_what_is_read_is_what_is_in_the_file(sound: Path) -> None:
    stored = load_file(sound / "model.safetensors")
    assert all(torch.equal(tensor, stored[name]) for name, tensor in load_model(sound).state_dict().items())
