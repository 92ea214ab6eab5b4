"""The files of a model's directory: small files, read within bounds, those of an adapter, and weights.

A file that is no regular one, or cannot be read, is refused by name.
"""

import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, decode_object, require_file_name
from millrace.errors import CorruptObjectError, InvalidStateError, NotFoundError

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
"""Files of tokenizers, templates and processors, as transformers and vLLM look for them."""
DOWNLOADED = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.tiktoken", "*.model", "*.spm", "*.bpe")
"""Patterns of the files that are downloaded of a model of the Hub, at any depth."""
MAX_SMALL_BYTES = 256 << 20
"""Most bytes of one small file; the largest tokenizers have 40 MB."""


def small_files(directory: Path, patterns: Iterable[str]) -> dict[str, bytes]:
    """Return the contents of the files that match a pattern, by path relative to `directory`, with `/`.

    Directories and hidden files are left out. Raises CorruptObjectError (MODEL_FILE_UNUSABLE) for a match that cannot
    be read, is a broken link, is too large, or has a name that some filesystem does not allow.
    """
    found = {path for pattern in patterns for path in directory.glob(pattern) if not path.is_dir()}
    return {_name_of(path, directory): read_small(path) for path in sorted(found) if not path.name.startswith(".")}


def _name_of(path: Path, directory: Path) -> str:
    """Return the name of a file relative to `directory`.

    Raise CorruptObjectError if some filesystem does not allow it.
    """
    try:
        return require_file_name(path.relative_to(directory).as_posix())
    except ValueError as error:
        raise model_file_unusable(path, error) from error


def read_small(path: Path, *, max_bytes: int = MAX_SMALL_BYTES) -> bytes:
    """Return the bytes of one file of a model, at most `max_bytes`.

    Raises CorruptObjectError (MODEL_FILE_UNUSABLE) if it is larger, cannot be read, or is no plain file.
    """
    try:
        if not path.is_file():
            raise model_file_unusable(path, "it is a link to nothing" if path.is_symlink() else "it is no plain file")
        if (size := path.stat().st_size) > max_bytes:
            raise model_file_unusable(path, f"it has {size} bytes, and at most {max_bytes} are read")
        return path.read_bytes()
    except OSError as error:
        raise model_file_unusable(path, error.strerror or error) from error


def read_object(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file of at most `max_bytes`, which may have infinities and NaN.

    Raises CorruptObjectError (MODEL_FILE_UNUSABLE) if it has none.
    """
    data = read_small(path, max_bytes=max_bytes)
    try:
        return decode_object(
            data, what=path.name, reason="MODEL_FILE_UNUSABLE", max_bytes=max_bytes, allows_infinity=True
        )
    except CorruptObjectError as error:
        raise model_file_unusable(path, error.message) from error


# The files of an adapter of PEFT, which a model must not have. No torch.

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_PICKLE = "adapter_model.bin"
"""The file that PEFT wrote before safetensors, a pickle, which is never read."""


def adapter_files(directory: Path) -> tuple[str, ...]:
    """Return the names of an adapter's files that are in a directory; empty if there is no adapter."""
    names = (ADAPTER_CONFIG, ADAPTER_WEIGHTS, ADAPTER_PICKLE)
    return tuple(name for name in names if (directory / name).is_file())


def adapter_small_files(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return those small files (contents by name) that an adapter's directory gets: all but config.json and
    adapter_config.json.
    """
    return {name: data for name, data in files.items() if name not in ("config.json", ADAPTER_CONFIG)}


def why_no_model(directory: Path) -> str | None:
    """Return why a directory is refused as a model, as part of a message; None if it has no adapter.

    Programs differ in whether they load a model with an adapter in its directory with it or without it.
    """
    found = ", ".join(adapter_files(directory))
    return f"holds an adapter ({found}), which has to be merged into its base first" if found else None


def require_no_adapter(directory: Path) -> None:
    """Raise InvalidStateError (MODEL_IS_ADAPTER) if the directory of a model has an adapter."""
    if (problem := why_no_model(directory)) is not None:
        raise InvalidStateError(
            f"model {str(directory)!r} {problem}",
            reason="MODEL_IS_ADAPTER",
            remedy=f"millrace merge {directory} --base BASE --to MODEL, and name MODEL",
            metadata={"model": str(directory)},
        )


# The *.safetensors of a directory that have the weights, and the one that has each tensor.
#
# The index decides, or the one file `model.safetensors`. Other weight files in the directory are not read, but
# reported.

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION = "quantization_config"
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*.pth", "*.gguf")
CONFIGURED = "transformers_weights"
"""A key of config.json by which transformers reads another file, or another index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor as its file's header describes it; `dtype` is safetensors' name of the format (`BF16`)."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights of a directory: tensors by name, and weight files that are not read (`beside`).

    `name` is that of the one file or of the index. `unlisted` are tensors that are in the read files, but not assigned
    to them by the index.
    """

    directory: Path
    name: str
    tensors: Mapping[str, StoredTensor]
    beside: tuple[str, ...]
    unlisted: tuple[str, ...] = ()

    @classmethod
    def find(cls, directory: Path, config: Mapping[str, Any]) -> "WeightFiles":
        """Find the weight files of the model in `directory` with this config.json, and read their headers.

        Raises NotFoundError (MODEL_NOT_FOUND) without weights in safetensors, and CorruptObjectError for files that are
        damaged or contradict their index, or if it is ambiguous which ones are meant (MODEL_CORRUPT), and for an index
        that is no JSON object (MODEL_FILE_UNUSABLE).
        """
        name = _chosen(directory, config.get(CONFIGURED))
        promised = _read_index(directory, name) if name.endswith(".json") else None
        files = sorted({name} if promised is None else set(promised.values()))
        headers = {file: _read_header(directory, file) for file in files}
        tensors, unlisted = headers[files[0]], list[str]()
        if promised is not None:
            absent = [tensor for tensor, file in promised.items() if tensor not in headers[file]]
            if absent:
                raise model_corrupt(directory, f"{name} promises what is not in the files: {first_names(absent)}")
            tensors = {tensor: headers[file][tensor] for tensor, file in promised.items()}
            # An index decides which file holds a tensor; another copy of it elsewhere is ignored, and reported.
            unlisted = [each for file, found in headers.items() for each in found if promised.get(each) != file]
        if not tensors:
            raise model_corrupt(directory, f"{', '.join(files)} holds no tensor")
        present = {path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern)}
        return cls(
            directory=directory,
            name=name,
            tensors=tensors,
            beside=tuple(sorted(present - set(files))),
            unlisted=tuple(sorted(unlisted)),
        )

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the paths of the weight files that are read."""
        return tuple(self.directory / name for name in sorted({each.file for each in self.tensors.values()}))

    def warn_of_beside(self) -> None:
        """Log a warning with the names of weight files in the directory that are not read, if there are any."""
        if self.beside:
            read = sorted({path.name for path in self.files})
            logger.warning(
                "weight files beside the model's own are not read",
                extra={"model": str(self.directory), "read": first_names(read), "not_read": first_names(self.beside)},
            )

    @contextmanager
    def open(self, framework: str = "pt") -> Iterator[dict[str, Any]]:
        """Open the files during the block, and give the tensors as safetensors' slices, by name.

        `framework` is what safetensors makes tensors of: "pt" for torch, "np" for numpy.
        """
        from safetensors import safe_open

        with ExitStack() as opened:
            files = {path.name: opened.enter_context(safe_open(path, framework=framework)) for path in self.files}
            yield {name: files[tensor.file].get_slice(name) for name, tensor in self.tensors.items()}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the quantization that a config.json describes; None if it describes none."""
    text = config.get("text_config")
    found = config.get(QUANTIZATION) or (text.get(QUANTIZATION) if isinstance(text, dict) else None)
    return found or config.get("compression_config") or None


def _chosen(directory: Path, configured: object) -> str:
    """Return the name of the file from which the weights of a directory are read: the one weight file, or the index.

    `configured` is the `transformers_weights` of config.json, None without it. Raises NotFoundError (MODEL_NOT_FOUND)
    if the directory has neither, and CorruptObjectError (MODEL_CORRUPT) if it has both and the index is of other files,
    or if `configured` is no file of weights in the directory.
    """
    if configured is not None:
        if not isinstance(configured, str) or not configured.endswith((".safetensors", ".safetensors.index.json")):
            raise model_corrupt(directory, f"its config.json names {configured!r} as {CONFIGURED}")
        if Path(configured).name != configured or not (directory / configured).is_file():
            raise model_corrupt(directory, f"its config.json names {configured} as {CONFIGURED}, which is not there")
        return configured
    has_single, has_index = (directory / SINGLE).is_file(), (directory / INDEX).is_file()
    if has_single and has_index and set(_read_index(directory, INDEX).values()) != {SINGLE}:
        raise model_corrupt(
            directory,
            f"there are two models in it, {SINGLE} and that of {INDEX}: programs differ in which one they read. "
            "Take away the one that is not meant",
        )
    if has_index or has_single:
        return INDEX if has_index else SINGLE
    others = sorted({path.name for pattern in _OTHER_WEIGHTS for path in directory.glob(pattern)})
    found = f"; {first_names(others)} is not read" if others else ""
    hint = " (load it with transformers, and save_pretrained() writes them)" if others else ""
    raise model_not_found(str(directory), f"it has neither {SINGLE} nor {INDEX}{found}{hint}")


def _read_index(directory: Path, name: str) -> dict[str, str]:
    """Return the file of each tensor by the index `name`.

    Raise CorruptObjectError if it is malformed or a file is missing.
    """
    named = read_object(directory / name).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()) or not named:
        raise model_corrupt(directory, f"{name} has no weight_map from tensors to files")
    files = set(named.values())
    # A path could lead out of the directory.
    if foreign := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise model_corrupt(directory, f"{name} names what is no *.safetensors beside it: {first_names(foreign)}")
    if absent := [file for file in files if not (directory / file).is_file()]:
        raise model_corrupt(directory, f"{name} names files that are not there: {first_names(absent)}")
    return named


def _read_header(directory: Path, name: str) -> dict[str, StoredTensor]:
    """Return the tensors in the header of file `name`; raise CorruptObjectError if safetensors cannot open the file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(directory / name, framework="np") as file:
            found = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - no mapping
            return {
                key: StoredTensor(file=name, dtype=each.get_dtype(), shape=tuple(each.get_shape()))
                for key, each in found.items()
            }
    except (OSError, SafetensorError) as error:
        raise model_corrupt(directory, f"{name}: {json.dumps(str(error))}") from error


# The errors of model directories.

MOST_NAMES = 10
"""Most names that a message lists."""
_MOST_CHARACTERS = 2000


def model_corrupt(directory: Path, problem: object) -> CorruptObjectError:
    """Return the error (MODEL_CORRUPT) for weights in a directory that are damaged or do not fit their config."""
    return CorruptObjectError(
        f"model {str(directory)!r} cannot be loaded: its *.safetensors are damaged or do not fit its config.json: "
        f"{_one_line(problem)}",
        reason="MODEL_CORRUPT",
        remedy="copy, download or make the model again, or set model.name to another one",
        metadata={"model": str(directory)},
    )


def model_not_found(name: str, problem: object) -> NotFoundError:
    """Return the error (MODEL_NOT_FOUND) for a model, by its name, that is missing or cannot be loaded."""
    return NotFoundError(
        f"model {name!r} cannot be loaded: {_one_line(problem)}",
        reason="MODEL_NOT_FOUND",
        remedy="set model.name to a directory with config.json, tokenizer and *.safetensors that the trainer can read, "
        "or to a Hub id that it can reach",
        metadata={"model": name},
    )


def model_file_unusable(path: Path, problem: object, *, remedy: str | None = None) -> CorruptObjectError:
    """Return the error (MODEL_FILE_UNUSABLE) for a small file of a model that cannot be read, or is malformed.

    `remedy` replaces the usual one.
    """
    return CorruptObjectError(
        f"{path} cannot be used: {_one_line(problem)}",
        reason="MODEL_FILE_UNUSABLE",
        remedy=remedy or "copy, download or make the model again, or take the file out of its directory",
        metadata={"model": str(path.parent), "file": path.name},
    )


def model_quantized(directory: Path, problem: str) -> InvalidStateError:
    """Return the error (MODEL_QUANTIZED) for weights in a quantized format that is not supported."""
    return InvalidStateError(
        f"model {str(directory)!r} is quantized: {problem}",
        reason="MODEL_QUANTIZED",
        remedy="set model.name to the model's files in bfloat16 or float32, or make them: load these with transformers "
        "or the library that quantized them, call dequantize(), and save without quantization_config",
        metadata={"model": str(directory)},
    )


def first_names(names: Collection[str]) -> str:
    """Return the first ten names in alphabetical order, and how many more there are, in words."""
    shown = sorted(names)[:MOST_NAMES]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _one_line(problem: object) -> str:
    """Return a problem as one line of bounded length, because libraries write whole reports."""
    text = " ".join(str(problem).split())
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + " …"
