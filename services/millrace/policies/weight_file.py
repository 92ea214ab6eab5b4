"""One safetensors file as tensors over its mapped bytes, without torch."""

import mmap
from pathlib import Path

from millrace.policies.tensors import TensorBytes, read_places


def read_tensors(path: Path) -> dict[str, TensorBytes]:
    """The tensors of a file by name; CorruptObjectError (SAFETENSORS_INVALID)."""
    with path.open("rb") as file:
        size = path.stat().st_size
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    return {
        place.name: TensorBytes(
            dtype=place.dtype, shape=place.shape, data=data[place.offset : place.offset + place.length_bytes]
        )
        for place in read_places(data, source=str(path))
    }
