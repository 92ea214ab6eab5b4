"""The errors of model directories: what is wrong with which file, and what to do."""

from collections.abc import Collection
from pathlib import Path

from millrace.errors import CorruptObjectError, InvalidStateError, NotFoundError

MOST_NAMES = 10
"""Names that a message lists; of the rest it says how many they are."""
_MOST_CHARACTERS = 2000


def model_corrupt(directory: Path, problem: object) -> CorruptObjectError:
    """The error of weights that are not those of their config."""
    return CorruptObjectError(
        f"model {str(directory)!r} cannot be loaded: its *.safetensors are damaged or do not fit its config.json: "
        f"{_one_line(problem)}",
        reason="MODEL_CORRUPT",
        remedy="copy, download or make the model again, or set model.name to another one",
        metadata={"model": str(directory)},
    )


def model_not_found(name: str, problem: object) -> NotFoundError:
    """The error of a model that is not there, or that nothing here can load."""
    return NotFoundError(
        f"model {name!r} cannot be loaded: {_one_line(problem)}",
        reason="MODEL_NOT_FOUND",
        remedy="set model.name to a directory with config.json, tokenizer and *.safetensors that the trainer can read, "
        "or to a Hub id that it can reach",
        metadata={"model": name},
    )


def model_file_unusable(path: Path, problem: object, *, remedy: str | None = None) -> CorruptObjectError:
    """The error of a small file of a model that cannot be read as what it must be."""
    return CorruptObjectError(
        f"{path} cannot be used: {_one_line(problem)}",
        reason="MODEL_FILE_UNUSABLE",
        remedy=remedy or "copy, download or make the model again, or take the file out of its directory",
        metadata={"model": str(path.parent), "file": path.name},
    )


def model_quantized(directory: Path, problem: str) -> InvalidStateError:
    """The error of weights that are stored in a format from which they are not known to come back as they were."""
    return InvalidStateError(
        f"model {str(directory)!r} is quantized: {problem}",
        reason="MODEL_QUANTIZED",
        remedy="set model.name to the model's files in bfloat16 or float32, or make them: load these with transformers "
        "or the library that quantized them, call dequantize(), and save without quantization_config",
        metadata={"model": str(directory)},
    )


def first_names(names: Collection[str]) -> str:
    """The first names in order, and how many more there are."""
    shown = sorted(names)[:MOST_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _one_line(problem: object) -> str:
    """What is said, on one line and not at length: libraries write whole reports."""
    text = " ".join(str(problem).split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …"
