"""The index of a checkpoint: which bytes of which file hold which elements of which tensor. A stored format.

    {"tensors": [{"name": "model.a", "dtype": "float32", "shape": [8, 3],
                  "pieces": [["rank-00000.bin", 0, 0, 12], ["rank-00001.bin", 0, 12, 12]]}, …]}

A piece is a contiguous range of a tensor's row-major elements: its file, the first byte there, the first element, the
number of elements. The files hold little-endian elements and nothing else. An index is read only if the pieces of every
tensor are the whole of it, each element once, and the tensors' pieces the whole of every file, each byte once.
"""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from millrace.decoding import Fields, decode_object, require_integer, require_text
from millrace.errors import CorruptObjectError
from millrace.policies.tensors import MAX_DIMENSIONS, element_bytes, tensor_bytes

_REMEDY = "the run resumes from the checkpoint before; `millrace run audit` says what else is damaged"


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Elements `start` to `start + count` of a tensor, at byte `offset` of `file`."""

    file: str
    offset: int
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardTensor:
    """One tensor of a checkpoint; `dtype` is torch's name of it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[ShardPiece, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return element_bytes(self.dtype)


ShardIndex = Mapping[str, ShardTensor]
"""The tensors by name."""


def merge_tensors(shares: Iterable[Iterable[ShardTensor]]) -> dict[str, ShardTensor]:
    """The tensors of all ranks, each with the pieces of every rank that has some."""
    merged: dict[str, ShardTensor] = {}
    for tensor in (tensor for share in shares for tensor in share):
        known = merged.get(tensor.name)
        pieces = tensor.pieces if known is None else known.pieces + tensor.pieces
        merged[tensor.name] = ShardTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, pieces=pieces)
    return merged


def encode_index(tensors: Iterable[ShardTensor]) -> bytes:
    """The index as it is stored; also how ranks tell each other what they wrote."""
    rows = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "pieces": [[piece.file, piece.offset, piece.start, piece.count] for piece in tensor.pieces],
        }
        for tensor in tensors
    ]
    return json.dumps({"tensors": rows}, separators=(",", ":")).encode()


def decode_index(data: bytes, *, sizes: Mapping[str, int], source: str) -> dict[str, ShardTensor]:
    """An index whose files have these `sizes` (bytes); CorruptObjectError naming `source` if it is none of them."""
    tensors = decode_tensors(data, source=source)
    try:
        _require_tiled_tensors(tensors)
        _require_tiled_files(tensors, sizes)
    except ValueError as error:
        raise _invalid(source, str(error)) from error
    return {tensor.name: tensor for tensor in tensors}


def decode_tensors(data: bytes, *, source: str) -> list[ShardTensor]:
    """The tensors that an index, or a rank's share of it, names, each once; CorruptObjectError if it is none."""
    raw = decode_object(data, what=f"checkpoint index {source}", reason="CHECKPOINT_INDEX_INVALID", remedy=_REMEDY)
    try:
        tensors = [_tensor(fields) for fields in Fields(raw).objects("tensors")]
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("a tensor is named twice")
    except ValueError as error:
        raise _invalid(source, str(error)) from error
    return tensors


def _tensor(fields: Fields) -> ShardTensor:
    tensor = ShardTensor(
        name=fields.text("name"),
        dtype=fields.text("dtype"),
        shape=fields.integers("shape", most=MAX_DIMENSIONS),
        pieces=tuple(_piece(row) for row in fields.items("pieces")),
    )
    tensor_bytes(tensor.dtype, tensor.shape)
    return tensor


def _piece(row: object) -> ShardPiece:
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a piece is not a row of file, offset, start and count")
    file, *numbers = row
    offset, start, count = (require_integer(number, what="a number of a piece") for number in numbers)
    return ShardPiece(require_text(file, what="the file of a piece"), offset, start, count)


def _require_tiled_tensors(tensors: Iterable[ShardTensor]) -> None:
    for tensor in tensors:
        end = 0
        for piece in sorted(tensor.pieces, key=lambda piece: piece.start):
            if piece.start != end or not piece.count:
                raise ValueError(
                    f"a piece of tensor {tensor.name} has the elements {piece.start} to {piece.start + piece.count}, "
                    f"and those before it end at {end}"
                )
            end += piece.count
        if end != tensor.num_elements:
            raise ValueError(f"tensor {tensor.name} has {tensor.num_elements} elements, and its pieces {end}")


def _require_tiled_files(tensors: Iterable[ShardTensor], sizes: Mapping[str, int]) -> None:
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors:
        width = tensor.element_bytes
        for piece in tensor.pieces:
            ranges[piece.file].append((piece.offset, piece.offset + piece.count * width))
    if unknown := sorted(ranges.keys() - sizes.keys()):
        raise ValueError(f"it names the files {unknown[:3]}, which the manifest does not")
    for file, size in sizes.items():
        held = [(0, 0), *sorted(ranges[file]), (size, size)]
        if any(before[1] != after[0] for before, after in pairwise(held)):
            raise ValueError(f"its pieces are not the {size} bytes of {file}, each once")


def _invalid(source: str, what: str) -> CorruptObjectError:
    return CorruptObjectError(
        f"checkpoint index {source} is not readable: {what}", reason="CHECKPOINT_INDEX_INVALID", remedy=_REMEDY
    )
