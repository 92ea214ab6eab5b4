"""A model's directory before another program serves it as it is: what a run would refuse of it, but for its classes.

vLLM reads whole files: all that its index names, or every `*.safetensors` where there is no index; and those of
Mistral instead as soon as one `consolidated*.safetensors` is beside them. It is given a directory without what does
not count.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.models.files import (
    INDEX,
    SINGLE,
    WeightFiles,
    first_names,
    model_corrupt,
    read_object,
    require_no_adapter,
)
from millrace.models.loading import check_stored, check_weights
from millrace.models.vocabulary import check_tokenizer

_INDICES = "*.index.json"
_PIECE = 1 << 22
"""Elements that are looked at together: what fits a processor's cache."""
_MOST_THREADS = 8
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_CODES = {torch.float8_e4m3fn: 0xFE, torch.float8_e5m2: 0xF8}
"""The least code of eight bits that is no finite number, shifted by the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The directory to be served, and what is to be told about it."""

    directory: Path
    notes: tuple[str, ...]


def validate_served(
    directory: Path, *, place: Path, needs_tokenizer: bool, needs_template: bool, tell: Callable[[str], None]
) -> CheckedModel:
    """Validate all of a model: its files, names, shapes, tokenizer, and every number.

    What does not count is left out of `place`, which becomes a directory of links, where it would be read. `tell` is
    told how far it is. Raises as `millrace.models.served.look_at`, and CorruptObjectError (MODEL_CORRUPT) for numbers
    that are not finite and for files that hold more than their index says.
    """
    require_no_adapter(directory)
    config = read_object(directory / "config.json")
    weights = _listed(directory, config)
    notes = [note for note in (check_stored(directory),) if note]
    if needs_tokenizer:
        check_tokenizer(directory, model=directory, needs_template=needs_template)
    require_finite(weights, tell=tell)
    if weights.beside:
        notes.append(f"{first_names(weights.beside)} beside the model's own weight files: not read")
    return CheckedModel(directory=_cleared(weights, place), notes=tuple(notes))


def validate_other_weights(directory: Path, *, model: Path, place: Path) -> Path:
    """Validate weights that replace those of a served model; returns the directory to load.

    CorruptObjectError (MODEL_CORRUPT) as `validate_served`, and where they are not of the same names, formats and
    shapes as those of `model`, if that is a directory here.
    """
    weights = _listed(directory, {})
    if (model / "config.json").is_file():
        held = WeightFiles.find(model, read_object(model / "config.json")).tensors
        found = {name: (each.dtype, each.shape) for name, each in weights.tensors.items()}
        wanted = {name: (each.dtype, each.shape) for name, each in held.items()}
        if odd := {name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)}:
            problem = "it is not the model that is served: missing, unexpected or of another shape or format are"
            raise model_corrupt(directory, f"{problem} {first_names(odd)}")
    require_finite(weights)
    weights.tell_beside()
    return _cleared(weights, place)


def _listed(directory: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Return the weights, of files that hold nothing else."""
    weights = WeightFiles.find(directory, config)
    if weights.unlisted:
        what = f"its files hold what {weights.name} does not give to them: {first_names(weights.unlisted)}"
        raise model_corrupt(directory, f"{what}. Programs differ in what they read")
    return weights


def require_finite(weights: WeightFiles, *, tell: Callable[[str], None] = lambda how_far: None) -> None:
    """Raise CorruptObjectError (MODEL_CORRUPT) naming the tensors that have a number which is infinite or NaN.

    Whole numbers are not looked at. One thread reads and looks at some gigabytes a second, so that a disk is slower.
    """
    left, bad = len(weights.tensors), list[str]()

    def look(name: str) -> None:
        nonlocal left
        if not _is_finite(slices[name][...]):
            bad.append(name)
        left -= 1
        tell(f"{len(weights.tensors) - left} of {len(weights.tensors)} tensors looked at")

    with weights.open() as slices, ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        for _ in pool.map(look, weights.tensors):
            pass
    if bad:
        number = f"{len(bad)} tensor{'s' if len(bad) > 1 else ''}"
        raise model_corrupt(weights.directory, f"{number} not finite: {first_names(bad)}")


def _is_finite(tensor: torch.Tensor) -> bool:
    return all(_is_finite_piece(piece) for piece in tensor.reshape(-1).split(_PIECE)) if tensor.numel() else True


def _is_finite_piece(piece: torch.Tensor) -> bool:
    if piece.dtype in _PLAIN:
        least, most = torch.aminmax(piece)
        return bool(least.isfinite() & most.isfinite())
    if piece.dtype in _CODES:
        return int(piece.view(torch.uint8).bitwise_left_shift(1).max()) < _CODES[piece.dtype]
    if piece.dtype == torch.float8_e8m0fnu:
        return int(piece.view(torch.uint8).max()) < 0xFF
    return True


def _cleared(weights: WeightFiles, place: Path) -> Path:
    """Return the directory of the weights; `place` with links to all that counts of it, where there is more."""
    directory = weights.directory
    others = {path.name for path in directory.glob(_INDICES)} - {weights.name}
    if not (weights.beside or others or weights.name not in (SINGLE, INDEX)):
        return directory
    place.mkdir()
    for path in directory.iterdir():
        if path.name not in {*weights.beside, *others}:
            (place / path.name).symlink_to(path.absolute())
    return place


# A look at a local model before anything starts: what a run would refuse of it, but for its numbers.


def look_at(directory: Path, *, tokenizer: Path, needs_template: bool) -> list[str]:
    """Raise what a run would end with, as `require_no_adapter`, `check_weights` and `check_tokenizer` do; the notes.

    `tokenizer` is the directory that the tokenizer is in.
    """
    require_no_adapter(directory)
    check_weights(directory)
    check_tokenizer(tokenizer, model=directory, needs_template=needs_template)
    beside = WeightFiles.find(directory, read_object(directory / "config.json")).beside
    return [f"{first_names(beside)} beside the model's own weight files: not read"] if beside else []
