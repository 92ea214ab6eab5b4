"""The index of a checkpoint, a stored format, and the proof that it holds the weights that were published.

    {"tensors": [{"name": "model.a", "dtype": "float32", "shape": [8, 3],
                  "pieces": [["rank-00000.bin", 0, 0, 12], ["rank-00001.bin", 0, 12, 12]]}, …]}

A piece is a contiguous range of a tensor's row-major elements: its file, the first byte there, the first element, the
number of elements. The files hold little-endian elements and nothing else. An index is read only if the pieces of every
tensor are the whole of it, each element once, and the tensors' pieces the whole of every file, each byte once.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import Fields, decode_object, require_integer, require_text
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.policies.peft.config import published_name
from millrace.policies.tensors import FLOATS, MAX_DIMENSIONS, bits_type, element_bytes, tensor_bytes
from millrace.storage.base import ObjectStore

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
        """Return the number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def element_bytes(self) -> int:
        """Return the number of bytes of one element."""
        return element_bytes(self.dtype)


ShardIndex = Mapping[str, ShardTensor]
"""The tensors by name."""


def merge_tensors(shares: Iterable[Iterable[ShardTensor]]) -> dict[str, ShardTensor]:
    """Return the tensors of all ranks by name, each with the pieces of every rank.

    `shares` has the tensors of each rank.
    """
    merged: dict[str, ShardTensor] = {}
    for tensor in (tensor for share in shares for tensor in share):
        known = merged.get(tensor.name)
        pieces = tensor.pieces if known is None else known.pieces + tensor.pieces
        merged[tensor.name] = ShardTensor(name=tensor.name, dtype=tensor.dtype, shape=tensor.shape, pieces=pieces)
    return merged


def encode_index(tensors: Iterable[ShardTensor]) -> bytes:
    """Encode an index, or the tensors that one rank wrote, as JSON."""
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
    """Decode an index of files that have these `sizes` (bytes by name); return its tensors by name.

    Raises CorruptObjectError naming `source` if it is malformed, or if its pieces are not every element of every tensor
    and every byte of every file, each once.
    """
    tensors = decode_tensors(data, source=source)
    try:
        _require_tiled_tensors(tensors)
        _require_tiled_files(tensors, sizes)
    except ValueError as error:
        raise _invalid(source, str(error)) from error
    return {tensor.name: tensor for tensor in tensors}


def decode_tensors(data: bytes, *, source: str) -> list[ShardTensor]:
    """Decode the tensors of an index, or of one rank's part of it, without comparing pieces with each other.

    Raises CorruptObjectError naming `source` if it is malformed or names a tensor twice.
    """
    raw = decode_object(data, what=f"checkpoint index {source}", reason="CHECKPOINT_INDEX_INVALID", remedy=_REMEDY)
    try:
        tensors = [_tensor(fields) for fields in Fields(raw).objects("tensors")]
        if len({tensor.name for tensor in tensors}) != len(tensors):
            raise ValueError("a tensor is named twice")
    except ValueError as error:
        raise _invalid(source, str(error)) from error
    return tensors


def _tensor(fields: Fields) -> ShardTensor:
    """Decode the entry of a tensor; raise ValueError if it is malformed."""
    tensor = ShardTensor(
        name=fields.text("name"),
        dtype=fields.text("dtype"),
        shape=fields.integers("shape", most=MAX_DIMENSIONS),
        pieces=tuple(_piece(row) for row in fields.items("pieces")),
    )
    tensor_bytes(tensor.dtype, tensor.shape)
    return tensor


def _piece(row: object) -> ShardPiece:
    """Decode a piece from its row; raise ValueError if it is malformed."""
    if not isinstance(row, list) or len(row) != 4:
        raise ValueError("a piece is not a row of file, offset, start and count")
    file, *numbers = row
    offset, start, count = (require_integer(number, what="a number of a piece") for number in numbers)
    return ShardPiece(require_text(file, what="the file of a piece"), offset, start, count)


def _require_tiled_tensors(tensors: Iterable[ShardTensor]) -> None:
    """Raise ValueError unless each tensor's pieces are all its elements, each once."""
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
    """Raise ValueError unless the pieces are all bytes of each file, each once; `sizes` are bytes by name."""
    ranges: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for tensor in tensors:
        width = tensor.element_bytes
        for piece in tensor.pieces:
            ranges[piece.file].append((piece.offset, piece.offset + piece.count * width))
    if unknown := sorted(ranges.keys() - sizes.keys()):
        raise ValueError(f"it names the files {unknown[:3]}, which the manifest does not")
    for file, size in sizes.items():
        # Sentinels at both ends: gaps and overlaps anywhere are pairs whose borders differ.
        held = [(0, 0), *sorted(ranges[file]), (size, size)]
        if any(before[1] != after[0] for before, after in pairwise(held)):
            raise ValueError(f"its pieces are not the {size} bytes of {file}, each once")


def _invalid(source: str, what: str) -> CorruptObjectError:
    """Make the error of an index that cannot be read; `what` says why."""
    return CorruptObjectError(
        f"checkpoint index {source} is not readable: {what}", reason="CHECKPOINT_INDEX_INVALID", remedy=_REMEDY
    )


# Whether a checkpoint holds the weights that its trainer published at the same step. Without torch, for audits.
#
# A checkpoint holds master weights (`model.NAME`), a policy what they are in its own number format, so that they are
# cast as the publisher casts them. Most tensors have the same name in both; an adapter's have PEFT's. Where a model
# is saved under other names, each saved tensor is a range of one of the model's, and is looked for by its bits.

INDEX_FILE = "index.json"
MAX_INDEX_BYTES = 64 << 20
_WEIGHTS = "model."
_PIECE = 1 << 22  # elements cast at a time

Bits = NDArray[np.unsignedinteger]


class CheckpointWeights:
    """The weights in a checkpoint's files, which are read range by range."""

    def __init__(self, store: ObjectStore, files: Mapping[str, tuple[str, int]]) -> None:
        """Read and check the index of a checkpoint, whose `files` are (key, size in bytes) by name.

        Raises CorruptObjectError or NotFoundError if there is no usable index.
        """
        self._store = store
        self._files = files
        if INDEX_FILE not in files:
            raise CorruptObjectError("it has no index", reason="CHECKPOINT_INDEX_INVALID")
        data = store.get(files[INDEX_FILE][0], max_bytes=MAX_INDEX_BYTES)
        sizes = {name: size for name, (_, size) in files.items() if name != INDEX_FILE}
        index = decode_index(data, sizes=sizes, source=store.uri(files[INDEX_FILE][0]))
        self.tensors = {
            name.removeprefix(_WEIGHTS): tensor for name, tensor in index.items() if name.startswith(_WEIGHTS)
        }

    def read(self, tensor: ShardTensor, *, dtype: str) -> Iterator[tuple[int, Bits]]:
        """Yield ranges of a tensor in order: the index of the first element, and the bits in the format `dtype`.

        They are rounded to that format as the publisher does.
        """
        for piece in sorted(tensor.pieces, key=lambda piece: piece.start):
            for first in range(0, piece.count, _PIECE):
                count, width = min(_PIECE, piece.count - first), tensor.element_bytes
                key, _ = self._files[piece.file]
                data = self._store.get_range(key, piece.offset + first * width, count * width)
                bits = np.frombuffer(data, bits_type(tensor.dtype))
                yield piece.start + first, cast(bits, tensor.dtype, dtype)


def differences(
    store: ObjectStore, files: Mapping[str, tuple[str, int]], policy: Mapping[str, tuple[str, Bits]]
) -> Iterator[str]:
    """Yield a sentence for each of a policy's tensors that is missing in a checkpoint, or has other bits there.

    `files` are the checkpoint's, (key, size in bytes) by name, and `policy` has number format and flat bits by name. A
    checkpoint that cannot be read gives one sentence that says why. Blocking. Holds in memory the bits of tensors that
    have other names in the checkpoint, and a few million elements of the others.
    """
    try:
        held = CheckpointWeights(store, files)
        names = {name: name for name in held.tensors} | {published_name(name): name for name in held.tensors}
        strangers: list[str] = []
        unused = set(held.tensors)
        for name, (dtype, bits) in policy.items():
            tensor = held.tensors.get(names.get(name, ""))
            if tensor is None or tensor.num_elements != bits.size:
                strangers.append(name)
                continue
            unused.discard(names[name])
            if count := _count_differing(held, tensor, dtype, bits):
                yield f"{count} of {bits.size} elements of tensor {name} ({dtype}) are not what it holds"
        yield from _strangers(held, {name: policy[name] for name in strangers}, sorted(unused))
    except (CorruptObjectError, NotFoundError) as error:
        yield error.message


def _count_differing(held: CheckpointWeights, tensor: ShardTensor, dtype: str, bits: Bits) -> int:
    """Return how many elements of a checkpoint's tensor, rounded to `dtype`, are not `bits`; NaNs count as equal."""
    count = 0
    for start, found in held.read(tensor, dtype=dtype):
        wanted = bits[start : start + found.size]
        differs = found != wanted
        if differs.any() and dtype in FLOATS:  # any not-a-number is as good as another one
            differs &= ~(_is_nan(found, dtype) & _is_nan(wanted, dtype))
        count += int(np.count_nonzero(differs))
    return count


def _strangers(held: CheckpointWeights, policy: Mapping[str, tuple[str, Bits]], unused: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each of the policy's tensors that is no part of one of the checkpoint's `unused` tensors.

    `policy` has number format and flat bits of the tensors that the checkpoint lacks by name; `unused` are the names of
    its tensors that no tensor of the policy has. Parts are found by the hash of their bits.
    """
    wanted: dict[tuple[str, int, bytes], list[str]] = {}
    for name, (dtype, bits) in policy.items():
        wanted.setdefault((dtype, bits.size, _hash(bits)), []).append(name)
    shapes = {(dtype, size) for dtype, size, _ in wanted}
    found: set[str] = set()
    for tensor in (held.tensors[name] for name in unused):
        for dtype, size in shapes:
            if len(found) == len(policy) or not size or tensor.num_elements % size:
                continue
            whole = np.concatenate([bits for _, bits in held.read(tensor, dtype=dtype)])
            # A saved tensor is one of equal parts of the model's, such as one of the experts, or q, k and v.
            for part in whole.reshape(-1, size):
                found.update(wanted.get((dtype, size, _hash(part)), ()))
    for name, (dtype, bits) in policy.items():
        if name not in found:
            yield f"tensor {name} ({dtype}, {bits.size} elements) is nowhere in it"


def _hash(bits: Bits) -> bytes:
    """Return the sha256 of bits."""
    return hashlib.sha256(np.ascontiguousarray(bits).view(np.uint8).data).digest()


def cast(bits: Bits, source: str, target: str) -> Bits:
    """Return the bits of numbers in the format `source`, converted to the format `target`.

    They are rounded to nearest, ties to even. Raises CorruptObjectError for a pair of formats that no trainer
    publishes.
    """
    if source == target:
        return bits
    if source not in FLOATS or target not in FLOATS:
        raise CorruptObjectError(f"{source} is not published as {target}", reason="CHECKPOINT_MISMATCH")
    numbers = _as_float(bits, source)
    if target != "bfloat16":
        with np.errstate(over="ignore", invalid="ignore"):
            return numbers.astype(f"f{bits_type(target).itemsize}").view(bits_type(target))
    with np.errstate(over="ignore", invalid="ignore"):
        wide = numbers.astype(np.float32).view(np.uint32)
    # Half of the last bit that stays, minus one, plus that bit: rounds to nearest, ties to even.
    rounded = (wide + np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # Rounding could turn a nan into an infinity, or carry into the sign.
    is_nan = (wide & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(is_nan, np.uint32(0x7FC0), rounded).astype(np.uint16)


def _as_float(bits: Bits, dtype: str) -> NDArray[np.floating]:
    """Return the numbers that bits in the format `dtype` are; bfloat16 becomes float32."""
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(f"f{bits.dtype.itemsize}")


def _is_nan(bits: Bits, dtype: str) -> NDArray[np.bool_]:
    """Return which of the numbers that `bits` in the format `dtype` represent are NaN, bool of the same shape."""
    return np.isnan(_as_float(np.ascontiguousarray(bits), dtype))
