"""The tensors of a model directory in Hugging Face format, by the rule of transformers and without torch."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.policies.tensors import TensorBytes, read_places

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 256 << 20
_REMEDY = "copy, download or make the model again"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFiles:
    """The files that a model's weights are in."""

    directory: Path
    names: tuple[str, ...]
    weight_map: Mapping[str, str] | None
    """The file of each tensor, as the index has it; None where there is one file."""
    beside: tuple[str, ...]
    """Other files of weights there, which are no part of the model."""

    def read(self) -> dict[str, TensorBytes]:
        """Every tensor by name, over the mapped files; CorruptObjectError (MODEL_CORRUPT) if one is missing."""
        found: dict[str, TensorBytes] = {}
        for file in self.names:
            path = self.directory / file
            if not path.is_file():
                raise _corrupt(path, f"the index {INDEX} names it, and it is not there")
            mapped = read_tensors(path)
            found |= {
                name: tensor
                for name, tensor in mapped.items()
                if self.weight_map is None or self.weight_map.get(name) == file
            }
        missing = sorted((self.weight_map or {}).keys() - found.keys())
        if missing:
            raise _corrupt(self.directory, f"{len(missing)} tensors of {INDEX} are not in its files: {missing[:10]}")
        return found


def find_weight_files(directory: Path) -> WeightFiles:
    """The one file, or those of the index; NotFoundError (MODEL_NOT_FOUND) if there is neither."""
    single, index = directory / WEIGHTS, directory / INDEX
    weight_map: dict[str, str] | None = None
    if single.is_file():
        names: tuple[str, ...] = (WEIGHTS,)
    elif index.is_file():
        weight_map = _weight_map(index)
        names = tuple(dict.fromkeys(weight_map.values()))
    else:
        raise NotFoundError(
            f"model {str(directory)!r} cannot be read: it has neither {WEIGHTS} nor {INDEX}",
            reason="MODEL_NOT_FOUND",
            remedy="save it with safetensors, or name another directory",
        )
    beside = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in names)
    return WeightFiles(directory=directory, names=names, weight_map=weight_map, beside=tuple(beside))


def read_tensors(path: Path) -> dict[str, TensorBytes]:
    """The tensors of one safetensors file by name, over its mapped bytes; CorruptObjectError (SAFETENSORS_INVALID)."""
    with path.open("rb") as file:
        size = path.stat().st_size
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    return {
        place.name: TensorBytes(
            dtype=place.dtype, shape=place.shape, data=data[place.offset : place.offset + place.length_bytes]
        )
        for place in read_places(data, source=str(path))
    }


def _weight_map(path: Path) -> dict[str, str]:
    raw = decode_object(
        path.read_bytes(), what=str(path), reason="MODEL_CORRUPT", remedy=_REMEDY, max_bytes=_MAX_INDEX_BYTES
    )
    found = raw.get("weight_map")
    if not isinstance(found, dict) or not all(_is_file_name(name) for name in found.values()):
        raise _corrupt(path, "its weight_map does not say the file of each tensor")
    return found


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name != "" and PurePath(name).name == name


def _corrupt(path: Path, problem: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"model file {str(path)!r} cannot be read: {problem}", reason="MODEL_CORRUPT", remedy=_REMEDY
    )
