"""The small files of a model's directory, read within bounds: what is no plain file that opens is refused by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, decode_object, require_file_name
from millrace.errors import CorruptObjectError
from millrace.models.errors import model_file_unusable

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "normalizer.json",
    "*vocab*.json",
    "*vocab*.txt",
    "merges.txt",
    "*.tiktoken",
    "*.model",  # SentencePiece: tokenizer.model, spiece.model, sentencepiece.bpe.model
    "*.spm",
    "*.bpe",
    "tekken.json",
    "chat_template*",
    "additional_chat_templates/*.jinja",
    "*processor_config.json",  # processor_, preprocessor_, video_preprocessor_
)
"""Of tokenizers, templates and processors, as transformers and vLLM look for them."""
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.tiktoken", "*.model", "*.spm", "*.bpe")
"""What is fetched of a model from the Hub, at any depth."""
MAX_SMALL_BYTES = 256 << 20
"""Most bytes of one small file; the largest tokenizers of today have 40 MB."""


def small_files(directory: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The contents of the plain files that fit a pattern, by name, with `/` where one lies in a directory.

    Directories of such names are not files, and what is hidden is nobody's. CorruptObjectError (MODEL_FILE_UNUSABLE)
    for what cannot be read, is a broken link, is too large, or has a name that some filesystem does not take.
    """
    found = {path for pattern in patterns for path in directory.glob(pattern) if not path.is_dir()}
    return {_name_of(path, directory): read_small(path) for path in sorted(found) if not path.name.startswith(".")}


def _name_of(path: Path, directory: Path) -> str:
    try:
        return require_file_name(path.relative_to(directory).as_posix())
    except ValueError as error:
        raise model_file_unusable(path, error) from error


def read_small(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """The bytes of one file; CorruptObjectError (MODEL_FILE_UNUSABLE) if they cannot be had."""
    try:
        if not path.is_file():
            raise model_file_unusable(path, "it is a link to nothing" if path.is_symlink() else "it is no plain file")
        if (size := path.stat().st_size) > max_bytes:
            raise model_file_unusable(path, f"it has {size} bytes, and at most {max_bytes} are read")
        return path.read_bytes()
    except OSError as error:
        raise model_file_unusable(path, error.strerror or error) from error


def read_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file, infinities included; CorruptObjectError (MODEL_FILE_UNUSABLE) if it holds none."""
    data = read_small(path, max_bytes=max_bytes)
    try:
        return decode_object(
            data, what=path.name, reason="MODEL_FILE_UNUSABLE", max_bytes=max_bytes, allows_infinity=True
        )
    except CorruptObjectError as error:
        raise model_file_unusable(path, error.message) from error
