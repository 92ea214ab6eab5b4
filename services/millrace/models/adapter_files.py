"""The files of an adapter of PEFT, which are none of a model. No torch."""

from collections.abc import Mapping
from pathlib import Path

from millrace.errors import InvalidStateError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
"""What PEFT wrote before safetensors; no pickle is read."""


def adapter_files(directory: Path) -> tuple[str, ...]:
    """The names of the files of an adapter that are in a directory; empty if it is none."""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE)
    return tuple(name for name in names if (directory / name).is_file())


def adapter_small_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Of the small files of a whole model those that stand beside an adapter: all but what makes it a model."""
    return {name: data for name, data in files.items() if name not in ("config.json", ADAPTER_CONFIG)}


def why_no_model(directory: Path) -> str | None:
    """Why a directory is not taken as a model; None if it has no adapter.

    Programs read a model that has an adapter beside it with or without that, by whether PEFT is installed.
    """
    found = ", ".join(adapter_files(directory))
    return f"holds an adapter ({found}), which has to be merged into its base first" if found else None


def require_no_adapter(directory: Path) -> None:
    """InvalidStateError (MODEL_IS_ADAPTER) if a directory that is to be a model holds an adapter."""
    if (problem := why_no_model(directory)) is not None:
        raise InvalidStateError(
            f"model {str(directory)!r} {problem}",
            reason="MODEL_IS_ADAPTER",
            remedy=f"millrace merge {directory} --base BASE --to MODEL, and name MODEL",
            metadata={"model": str(directory)},
        )
