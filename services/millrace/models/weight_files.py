"""Which *.safetensors of a directory hold the weights, and which of them holds each tensor.

The index decides, or the one file `model.safetensors`. Whatever else lies beside is not read, and is told.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.models.errors import first_names, model_corrupt, model_not_found
from millrace.models.small_files import read_object

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANTIZATION = "quantization_config"
_OTHER_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model.bin", "consolidated*.pth", "*.gguf")
CONFIGURED = "transformers_weights"
"""A key of config.json by which transformers reads another file, or another index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """What a file's header says of a tensor: the format as safetensors names it (`BF16`), and the shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The weights of a directory: what each tensor's file says of it, and weight files that do not count.

    `name` is that of the one file or of the index. `unlisted` are tensors in the files that count which the index
    gives to no file, or to another one.
    """

    directory: Path
    name: str
    tensors: Mapping[str, StoredTensor]
    beside: tuple[str, ...]
    unlisted: tuple[str, ...] = ()

    @classmethod
    def find(cls, directory: Path, config: Mapping[str, Any]) -> "WeightFiles":
        """Read the headers of the files that hold the weights of the model with this config.json.

        NotFoundError (MODEL_NOT_FOUND) without weights in safetensors; CorruptObjectError (MODEL_CORRUPT) for files
        that are damaged, that contradict their index, or of which it is not clear which ones are meant.
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
        """The files that are read."""
        return tuple(self.directory / name for name in sorted({each.file for each in self.tensors.values()}))

    def tell_beside(self) -> None:
        """Log the names of weight files in the directory that are not read, if there are any."""
        if self.beside:
            read = sorted({path.name for path in self.files})
            logger.warning(
                "weight files beside the model's own are not read",
                extra={"model": str(self.directory), "read": first_names(read), "not_read": first_names(self.beside)},
            )

    @contextmanager
    def open(self, framework: str = "pt") -> Iterator[dict[str, Any]]:
        """The tensors as safetensors' slices, by name, while the block lasts."""
        from safetensors import safe_open

        with ExitStack() as opened:
            files = {path.name: opened.enter_context(safe_open(path, framework=framework)) for path in self.files}
            yield {name: files[tensor.file].get_slice(name) for name, tensor in self.tensors.items()}


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What config.json says of how its weights are stored; None where it says nothing."""
    text = config.get("text_config")
    found = config.get(QUANTIZATION) or (text.get(QUANTIZATION) if isinstance(text, dict) else None)
    return found or config.get("compression_config") or None


def _chosen(directory: Path, configured: object) -> str:
    """The name of the one file, or of the index."""
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
    """The file of each tensor, by the index."""
    named = read_object(directory / name).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()) or not named:
        raise model_corrupt(directory, f"{name} has no weight_map from tensors to files")
    files = set(named.values())
    if foreign := [file for file in files if Path(file).name != file or not file.endswith(".safetensors")]:
        raise model_corrupt(directory, f"{name} names what is no *.safetensors beside it: {first_names(foreign)}")
    if absent := [file for file in files if not (directory / file).is_file()]:
        raise model_corrupt(directory, f"{name} names files that are not there: {first_names(absent)}")
    return named


def _read_header(directory: Path, name: str) -> dict[str, StoredTensor]:
    """What a file holds; safetensors checks that its bytes are as many as its header says."""
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
