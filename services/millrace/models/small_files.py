"""The small files of a model's directory, read within bounds: what is no plain file that opens is refused by name."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError
from millrace.models.errors import model_file_unusable

MAX_SMALL_BYTES = 256 << 20
"""Most bytes of one small file; the largest tokenizers of today have 40 MB."""


def small_files(directory: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """The contents of the plain files that fit a pattern, by name; directories of such names are not files.

    CorruptObjectError (MODEL_FILE_UNUSABLE) for what cannot be read, is a broken link, or is too large.
    """
    found = {path for pattern in patterns for path in directory.glob(pattern) if not path.is_dir()}
    return {path.name: read_small(path) for path in sorted(found)}


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
    """The JSON object in a file; CorruptObjectError (MODEL_FILE_UNUSABLE) if it holds none."""
    data = read_small(path, max_bytes=max_bytes)
    try:
        return decode_object(data, what=path.name, reason="MODEL_FILE_UNUSABLE", max_bytes=max_bytes)
    except CorruptObjectError as error:
        raise model_file_unusable(path, error.message) from error
