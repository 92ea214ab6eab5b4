"""A model that another program serves as it is: refused for what a run would refuse, without what does not count."""

import json
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from millrace.errors import CorruptObjectError, InvalidStateError, MillraceError, NotFoundError
from millrace.models.served import CheckedModel, validate_other_weights, validate_served
from millrace_testing.model_files import Change, Tensors, make_qwen3, rewrite, write_tokenizer

DOWN = "model.layers.1.mlp.down_proj.weight"
NORM = "model.norm.weight"
STALE = "model-00009-of-00009.safetensors"


def look(directory: Path, *, needs_template: bool = True, needs_tokenizer: bool = True) -> CheckedModel:
    """With links in a directory beside it."""
    place = directory.with_name("links")
    return validate_served(
        directory,
        place=place,
        needs_tokenizer=needs_tokenizer,
        needs_template=needs_template,
        report=lambda how_far: None,
    )


@pytest.fixture
def served(copy: Path) -> Path:
    """Return a sound model with a tokenizer."""
    return write_tokenizer(copy, num_tokens=48)


def test_a_sound_model_is_served_where_it_lies(served: Path) -> None:
    assert look(served) == CheckedModel(directory=served, notes=())


def test_the_progress_counts_every_tensor_once_and_in_order(served: Path) -> None:
    told: list[tuple[int, str]] = []

    def report(how_far: str) -> None:
        if "tensors looked at" in how_far:
            told.append((threading.get_ident(), how_far))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads that counted for themselves would be changed between the count and its text
    try:
        for _ in range(20):
            validate_served(served, place=served / "links", needs_tokenizer=False, needs_template=False, report=report)
    finally:
        sys.setswitchinterval(before)
    number = len(load_file(served / "model.safetensors"))
    expected = [f"{count} of {number} tensors looked at" for count in range(1, number + 1)]
    assert [text for _, text in told] == 20 * expected
    assert {thread for thread, _ in told} == {threading.get_ident()}, "who asks need not guard what it does with them"


def _with(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


WRONG: dict[str, tuple[Callable[[Path], object], type[MillraceError], str, str]] = {
    "a weight is missing": (
        lambda at: rewrite(at, lambda found: {name: each for name, each in found.items() if name != DOWN}),
        CorruptObjectError,
        "MODEL_CORRUPT",
        f"1 tensor missing: {DOWN}",
    ),
    "names behind a prefix": (
        lambda at: rewrite(at, lambda found: {f"base_model.model.{name}": each for name, each in found.items()}),
        CorruptObjectError,
        "MODEL_CORRUPT",
        "25 tensors missing",
    ),
    "nan": (
        lambda at: rewrite(at, _with(NORM, torch.full((16,), float("nan")))),
        CorruptObjectError,
        "MODEL_CORRUPT",
        f"1 tensor not finite: {NORM}",
    ),
    "one infinity in bfloat16": (
        lambda at: rewrite(at, _with(DOWN, torch.eye(16, 24).bfloat16() * float("inf"))),
        CorruptObjectError,
        "MODEL_CORRUPT",
        f"1 tensor not finite: {DOWN}",
    ),
    "numbers of a format that nothing says": (
        lambda at: rewrite(at, _with(DOWN, torch.ones(16, 24).to(torch.float8_e4m3fn))),
        InvalidStateError,
        "MODEL_QUANTIZED",
        "does not say how weights are stored",
    ),
    "a vocabulary that is too small": (
        lambda at: write_tokenizer(at, num_tokens=50),
        InvalidStateError,
        "VOCABULARY_TOO_SMALL",
        'token "t48" has id 48',
    ),
    "no tokenizer": (
        lambda at: [path.unlink() for path in (*at.glob("tokenizer*"), at / "chat_template.jinja")],
        NotFoundError,
        "TOKENIZER_MISSING",
        "tokenizer files",
    ),
    "no chat template": (
        lambda at: (at / "chat_template.jinja").unlink(),
        InvalidStateError,
        "CHAT_TEMPLATE_MISSING",
        "no chat template",
    ),
    "an adapter": (
        lambda at: (at / "adapter_config.json").write_text("{}"),
        InvalidStateError,
        "MODEL_IS_ADAPTER",
        "adapter_config.json",
    ),
    "no weights": (lambda at: (at / "model.safetensors").unlink(), NotFoundError, "MODEL_NOT_FOUND", "neither"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_run_would_refuse_is_refused(served: Path, case: str) -> None:
    damage, kind, reason, said = WRONG[case]
    damage(served)
    with pytest.raises(kind, match=said) as raised:
        look(served)
    assert raised.value.reason == reason and str(served) in str(raised.value) and raised.value.remedy


def test_a_template_and_a_tokenizer_are_asked_for_where_they_are_needed(served: Path) -> None:
    (served / "chat_template.jinja").unlink()
    assert look(served, needs_template=False).directory == served
    (served / "tokenizer.json").unlink()
    with pytest.raises(NotFoundError):
        look(served, needs_template=False)
    assert look(served, needs_tokenizer=False).directory == served


@pytest.mark.parametrize("shard", [None, "5KB"], ids=["one file", "shards"])
@pytest.mark.parametrize("name", [STALE, "consolidated.safetensors", "pytorch_model.bin"])
def test_weight_files_that_do_not_count_are_told_and_not_served(tmp_path: Path, name: str, shard: str | None) -> None:
    model = write_tokenizer(make_qwen3(tmp_path / "model", is_tied=False, shard=shard), num_tokens=48)
    (model / "additional").mkdir()
    stale = {each: tensor + 1 for path in model.glob("*.safetensors") for each, tensor in load_file(path).items()}
    save_file(stale, model / name)
    found = look(model)
    assert found.directory != model and [name in note for note in found.notes] == [True]
    assert {path.name for path in found.directory.iterdir()} == {path.name for path in model.iterdir()} - {name}
    assert all(path.resolve() == model / path.name for path in found.directory.iterdir())


def test_files_that_the_config_names_are_served_alone(served: Path) -> None:
    """vLLM does not know that key, and reads every file."""
    shutil.copy(served / "model.safetensors", served / "other.safetensors")
    config = json.loads((served / "config.json").read_text())
    (served / "config.json").write_text(json.dumps({**config, "transformers_weights": "other.safetensors"}))
    found = look(served)
    assert [path.name for path in found.directory.glob("*.safetensors")] == ["other.safetensors"]


def test_a_tensor_that_lies_in_two_files_is_refused(tmp_path: Path) -> None:
    """The index says which one is meant, and vLLM takes the one that it reads last."""
    model = write_tokenizer(make_qwen3(tmp_path / "model", is_tied=False, shard="5KB"), num_tokens=48)
    index = json.loads((model / "model.safetensors.index.json").read_text())["weight_map"]
    other = model / next(file for file in sorted(set(index.values())) if file != index[NORM])
    save_file({**load_file(other), NORM: torch.zeros(16)}, other, metadata={"format": "pt"})
    with pytest.raises(CorruptObjectError, match=NORM) as raised:
        look(model)
    assert raised.value.reason == "MODEL_CORRUPT"


def _fp8(scale: float, *, code: int | None = None) -> Change:
    def change(tensors: Tensors) -> Tensors:
        codes = tensors[DOWN].to(torch.float8_e4m3fn)
        if code is not None:
            codes.view(torch.uint8)[3, 5] = code
        return {**tensors, DOWN: codes, f"{DOWN}_scale_inv": torch.full((2, 3), scale)}

    return change


def _say(directory: Path, **said: object) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **said}))


def test_fp8_is_served_as_it_is_and_its_numbers_are_looked_at(served: Path) -> None:
    _say(served, quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})
    plain = load_file(served / "model.safetensors")
    rewrite(served, lambda _: _fp8(1.0)(plain))
    assert look(served) == CheckedModel(directory=served, notes=())
    for change, named in (
        (_fp8(float("nan")), "_scale_inv"),
        (_fp8(1.0, code=0xFF), DOWN),
        (_fp8(1.0, code=0x7F), DOWN),
    ):
        rewrite(served, lambda _, change=change: change(plain))
        with pytest.raises(CorruptObjectError, match=f"not finite: .*{named}"):
            look(served)


@pytest.mark.parametrize(
    "said",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4}},
        {"model_type": "nobody_knows", "architectures": ["NobodyKnowsForCausalLM"]},
        {"architectures": ["NobodyKnowsForCausalLM"]},
    ],
    ids=["a format", "a type", "a class"],
)
def test_what_only_the_other_program_knows_is_left_to_it_and_told(served: Path, said: dict[str, object]) -> None:
    _say(served, **said)
    found = look(served)
    assert found.directory == served and "not compared" in found.notes[0]
    rewrite(served, _with(NORM, torch.full((16,), float("inf"))))
    with pytest.raises(CorruptObjectError, match="not finite"):
        look(served)


def test_weights_in_place_of_a_served_models_are_of_its_names_formats_and_shapes(served: Path, tmp_path: Path) -> None:
    other = make_qwen3(tmp_path / "other", is_tied=False, seed=5)
    assert validate_other_weights(other, model=served, place=tmp_path / "links") == other
    assert validate_other_weights(other, model=tmp_path / "an/id", place=tmp_path / "links") == other
    sound = load_file(other / "model.safetensors")
    for change in (_with(NORM, torch.ones(15)), _with(NORM, torch.ones(16).bfloat16()), _with("more", torch.ones(2))):
        rewrite(other, lambda _, change=change: change(sound))
        with pytest.raises(CorruptObjectError, match=f"the model that is served.* ({NORM}|more)"):
            validate_other_weights(other, model=served, place=tmp_path / "links")
    rewrite(other, lambda _: sound)
    shutil.copy(other / "model.safetensors", other / STALE)
    found = validate_other_weights(other, model=served, place=tmp_path / "links")
    assert [path.name for path in found.glob("*.safetensors")] == ["model.safetensors"]
