"""Checks of a model's directory before another program, such as vLLM, serves it as it is.

vLLM reads whole files: all that the index names, or every `*.safetensors` without an index; and Mistral's instead as
soon as there is one `consolidated*.safetensors`. It gets a directory without weight files that do not belong to the
model.
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
"""Elements that are checked at a time, so that they fit into a processor's cache."""
_MOST_THREADS = 8
_PLAIN = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_CODES = {torch.float8_e4m3fn: 0xFE, torch.float8_e5m2: 0xF8}
"""The least code of eight bits that is no finite number, shifted left by one to drop the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedModel:
    """The directory to serve, and notes about it for the user."""

    directory: Path
    notes: tuple[str, ...]


def validate_served(
    directory: Path, *, place: Path, needs_tokenizer: bool, needs_template: bool, report: Callable[[str], None]
) -> CheckedModel:
    """Check all of a model (files, names, shapes, tokenizer, and every number), and return the directory to serve, with
    notes.

    If the directory has weight files that are not the model's, `place`, which must not exist, becomes a directory of
    links to the others, and is the one to serve. With `needs_tokenizer` the tokenizer is checked, with `needs_template`
    its chat template, too. `report` is called with texts on the progress. Raises as `look_at`, and CorruptObjectError
    (MODEL_CORRUPT) for numbers that are not finite and for files with tensors that the index does not assign to them.
    """
    require_no_adapter(directory)
    config = read_object(directory / "config.json")
    weights = _listed(directory, config)
    notes = [note for note in (check_stored(directory),) if note]
    if needs_tokenizer:
        check_tokenizer(directory, model=directory, needs_template=needs_template)
    require_finite(weights, report=report)
    if weights.beside:
        notes.append(f"{first_names(weights.beside)} beside the model's own weight files: not read")
    return CheckedModel(directory=_cleared(weights, place), notes=tuple(notes))


def validate_other_weights(directory: Path, *, model: Path, place: Path) -> Path:
    """Check weights that shall replace those of the served `model`; return the directory to load.

    It is `directory`, or `place`, which must not exist and becomes a directory of links, if `directory` has other
    weight files or indices as well, or if those of the model have unusual names. Raises CorruptObjectError
    (MODEL_CORRUPT) for numbers that are not finite, for files with tensors that the index does not assign to them, and
    if names, formats and shapes differ from those of `model`, which are compared if `model` is a local directory.
    """
    weights = _listed(directory, {})
    if (model / "config.json").is_file():
        held = WeightFiles.find(model, read_object(model / "config.json")).tensors
        found = {name: (each.dtype, each.shape) for name, each in weights.tensors.items()}
        served = {name: (each.dtype, each.shape) for name, each in held.items()}
        if odd := {name for name in found.keys() | served.keys() if found.get(name) != served.get(name)}:
            problem = "it is not the model that is served: missing, unexpected or of another shape or format are"
            raise model_corrupt(directory, f"{problem} {first_names(odd)}")
    require_finite(weights)
    weights.warn_of_beside()
    return _cleared(weights, place)


def _listed(directory: Path, config: Mapping[str, Any]) -> WeightFiles:
    """Return the weight files of a directory with this config.json.

    Raises CorruptObjectError if they have tensors that the index does not assign to them.
    """
    weights = WeightFiles.find(directory, config)
    if weights.unlisted:
        what = f"its files hold what {weights.name} does not give to them: {first_names(weights.unlisted)}"
        raise model_corrupt(directory, f"{what}. Programs differ in what they read")
    return weights


def require_finite(weights: WeightFiles, *, report: Callable[[str], None] = lambda how_far: None) -> None:
    """Raise CorruptObjectError (MODEL_CORRUPT) naming the tensors with a number that is infinite or NaN.

    Reads all weights, in several threads; `report` is called by the caller's thread, with a text on the progress after
    each tensor.
    """
    names, bad = list(weights.tensors), list[str]()
    with weights.open() as slices, ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        found = pool.map(lambda name: _is_finite(slices[name][...]), names)
        # Counted here: threads that count for themselves would report numbers twice, or in another order.
        for number, (name, is_finite) in enumerate(zip(names, found, strict=True), start=1):
            if not is_finite:
                bad.append(name)
            report(f"{number} of {len(names)} tensors looked at")
    if bad:
        number = f"{len(bad)} tensor{'s' if len(bad) > 1 else ''}"
        raise model_corrupt(weights.directory, f"{number} not finite: {first_names(bad)}")


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, piece by piece."""
    return all(_is_finite_piece(piece) for piece in tensor.reshape(-1).split(_PIECE)) if tensor.numel() else True


def _is_finite_piece(piece: torch.Tensor) -> bool:
    """Return whether all numbers are finite; True for formats that have no infinity and no NaN."""
    if piece.dtype in _PLAIN:
        # A NaN becomes both the least and the most, so that two numbers say whether all are finite.
        least, most = torch.aminmax(piece)
        return bool(least.isfinite() & most.isfinite())
    if piece.dtype in _CODES:
        return int(piece.view(torch.uint8).bitwise_left_shift(1).max()) < _CODES[piece.dtype]
    if piece.dtype == torch.float8_e8m0fnu:
        return int(piece.view(torch.uint8).max()) < 0xFF
    return True


def _cleared(weights: WeightFiles, place: Path) -> Path:
    """Return a directory whose weights no program can mistake: the weights' own, or `place` with links.

    It is `place`, which must not exist, if the directory has other weight files or indices, which are left out of the
    links, or if its index or file has an unusual name.
    """
    directory = weights.directory
    others = {path.name for path in directory.glob(_INDICES)} - {weights.name}
    if not (weights.beside or others or weights.name not in (SINGLE, INDEX)):
        return directory
    # Links and not copies: the weights may be hundreds of gigabytes.
    place.mkdir()
    for path in directory.iterdir():
        if path.name not in {*weights.beside, *others}:
            (place / path.name).symlink_to(path.absolute())
    return place


# Checks of a local model before anything starts, without reading its numbers.


def look_at(directory: Path, *, tokenizer: Path, needs_template: bool) -> list[str]:
    """Check a local model as a starting run does, except for its numbers; return notes for the user.

    `tokenizer` is the directory of the tokenizer; with `needs_template` it must have a chat template. Raises as
    `require_no_adapter`, `check_weights` and `check_tokenizer`.
    """
    require_no_adapter(directory)
    check_weights(directory)
    check_tokenizer(tokenizer, model=directory, needs_template=needs_template)
    beside = WeightFiles.find(directory, read_object(directory / "config.json")).beside
    return [f"{first_names(beside)} beside the model's own weight files: not read"] if beside else []
