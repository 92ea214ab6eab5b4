"""The files beside a model's weights: written to a directory, read as config and tokenizer. No torch, no network.

transformers is imported where it is used: it imports torch, which costs vLLM's launcher seconds at start and end.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millrace.errors import InvalidStateError
from millrace.models.configs import read_config, read_tokenizer
from millrace.storage.clean_up import TemporaryDirectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")

POLICY_NAME = "policy"
"""Model name under which every replica serves the run's policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model in the engine, as the HTTP API needs it.

    `names` are the model names that it answers to. `directory` has the files; with `owner` it is deleted with this
    object.
    """

    names: tuple[str, ...]
    directory: Path
    tokenizer: "PreTrainedTokenizerBase | None"
    owner: TemporaryDirectory | None = field(default=None, repr=False)


@dataclass(slots=True)
class ModelSlot:
    """The model that is being served; None while there is none."""

    current: ServedModel | None = None


def write_files(files: Mapping[str, bytes]) -> TemporaryDirectory:
    """Write a policy's files into a new temporary directory, which is deleted when the returned object is."""
    directory = TemporaryDirectory(prefix="millrace-model-")
    for name, data in files.items():
        path = Path(directory.name) / name  # the manifest's reader has checked the name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory


def load_config(model_dir: Path) -> Any:
    """Return the config of the model in a directory; raise InvalidStateError if there is none."""
    if not (model_dir / "config.json").is_file():
        found = ", ".join(sorted(path.name for path in model_dir.iterdir())) if model_dir.is_dir() else "no directory"
        raise InvalidStateError(
            f"the model has no config.json (found: {found or 'nothing'})",
            reason="MODEL_CONFIG_MISSING",
            remedy="publish the policy with its config.json and tokenizer files",
        )
    return read_config(model_dir)


def has_tokenizer(model_dir: Path) -> bool:
    """Return whether a directory has files of a tokenizer."""
    return any((model_dir / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(model_dir: Path) -> "PreTrainedTokenizerBase | None":
    """Return the tokenizer in a directory; None if there is none, with which only tokens in, tokens out works."""
    if not has_tokenizer(model_dir):
        return None
    return read_tokenizer(model_dir)
