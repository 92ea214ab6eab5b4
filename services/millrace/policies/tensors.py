"""Tensors as bytes, the safetensors layout, and what differs between two versions of a tensor, without torch.

numpy has no bfloat16, so a tensor travels here as raw little-endian bytes with a dtype tag; the engine and the trainer
map the tag to their own types. The layout (an 8-byte header length, a JSON header, the data) is that of
https://huggingface.co/docs/safetensors, written here because the manifest needs each tensor's place in the file.
"""

import json
import math
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError

MAX_DIMENSIONS = 16
"""Most dimensions of a tensor that is read."""
MAX_TENSOR_BYTES = 1 << 44
"""Most bytes of a tensor that is read."""
_ALIGNMENT_BYTES = 64
_MAX_HEADER_BYTES = 64 << 20

# dtype tag (torch's name) -> (safetensors' name, unsigned numpy type of one element's bits, numpy type or None)
_DTYPES: dict[str, tuple[str, str, str | None]] = {
    "float64": ("F64", "<u8", "<f8"),
    "float32": ("F32", "<u4", "<f4"),
    "float16": ("F16", "<u2", "<f2"),
    "bfloat16": ("BF16", "<u2", None),
    "int64": ("I64", "<u8", "<i8"),
    "int32": ("I32", "<u4", "<i4"),
    "int16": ("I16", "<u2", "<i2"),
    "int8": ("I8", "u1", "i1"),
    "uint8": ("U8", "u1", "u1"),
    "bool": ("BOOL", "u1", "?"),
}
DTYPE_TAGS = tuple(_DTYPES)
"""The dtype tags that are carried; each is torch's name."""
FLOATS = ("float64", "float32", "float16", "bfloat16")
"""The dtype tags of floating-point tensors."""
_FROM_SAFETENSORS = {entry[0]: tag for tag, entry in _DTYPES.items()}
_FROM_NUMPY = {np.dtype(entry[2]): tag for tag, entry in _DTYPES.items() if entry[2] is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorBytes:
    """One dense row-major tensor: a dtype tag (torch's name, such as `bfloat16`), a shape and little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        expected = math.prod(self.shape) * element_bytes(self.dtype)
        if self.data.nbytes != expected:
            raise CorruptObjectError(
                f"a {self.dtype} tensor of shape {list(self.shape)} needs {expected} bytes and has {self.data.nbytes}",
                reason="TENSOR_SIZE_MISMATCH",
                remedy="write the tensor again; its source is damaged",
            )

    @classmethod
    def from_numpy(cls, array: np.ndarray, *, dtype: str | None = None) -> "TensorBytes":
        """Wrap an array as a tensor, without a copy where the array is contiguous.

        `dtype` is the tensor's tag, None for the array's own; "bfloat16" goes with an array of 16-bit integers, its
        bits. Raises CorruptObjectError for a dtype that is not carried, or of another width than the array's.
        """
        tag = dtype or _FROM_NUMPY.get(array.dtype.newbyteorder("<"))
        if tag is None or element_bytes(tag) != array.dtype.itemsize:
            raise CorruptObjectError(
                f"an array of {array.dtype} cannot carry a {tag or 'known dtype'} tensor",
                reason="TENSOR_DTYPE_MISMATCH",
                remedy=f"convert it first; known dtypes: {', '.join(_DTYPES)}",
            )
        bits = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        return cls(dtype=tag, shape=tuple(array.shape), data=memoryview(bits.data))

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of the tensor's data."""
        return self.data.nbytes

    def bits(self) -> np.ndarray:
        """Return the elements' bits as a flat array of unsigned integers over the same memory."""
        return np.frombuffer(self.data, dtype=_DTYPES[self.dtype][1])

    def numpy(self) -> np.ndarray:
        """Return the tensor in its shape as an array over the same memory; bfloat16 is an array of its bits, uint16."""
        _, bits, native = _DTYPES[self.dtype]
        return np.frombuffer(self.data, dtype=native or bits).reshape(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPlace:
    """Where a tensor is in a safetensors file: `offset` counts from the first byte of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    length_bytes: int


def bits_type(dtype: str) -> np.dtype:
    """Return the unsigned numpy type as wide as one element of a dtype tag ("bfloat16" → uint16).

    Raises CorruptObjectError for a tag that is not carried.
    """
    element_bytes(dtype)
    return np.dtype(_DTYPES[dtype][1])


def element_bytes(dtype: str) -> int:
    """Return the number of bytes of one element of a dtype tag.

    Raise CorruptObjectError for a tag that is not carried.
    """
    if dtype not in _DTYPES:
        raise CorruptObjectError(
            f"tensor dtype {dtype!r} is not supported (known: {', '.join(_DTYPES)})",
            reason="TENSOR_DTYPE_UNKNOWN",
            remedy="publish the policy in one of the known dtypes",
        )
    return np.dtype(_DTYPES[dtype][1]).itemsize


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the number of bytes of a tensor; raise ValueError for an unknown dtype, or a shape beyond the limits."""
    if dtype not in _DTYPES:
        raise ValueError(f"tensor dtype {dtype!r} is not supported (known: {', '.join(_DTYPES)})")
    if len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, and at most {MAX_DIMENSIONS} are read")
    size = math.prod(shape) * element_bytes(dtype)
    if size > MAX_TENSOR_BYTES:
        raise ValueError(f"a {dtype} tensor has more than {MAX_TENSOR_BYTES} bytes")
    return size


def plan_safetensors(
    tensors: Iterable[tuple[str, str, tuple[int, ...]]],
) -> tuple[bytes, list[TensorPlace], int]:
    """Lay out a safetensors file for tensors of these (name, dtype, shape), in the given order.

    Returns the bytes that precede the data, each tensor's place in the file, and the size of the whole file.
    """
    # Releases 4 of transformers refuse a file whose metadata name no framework.
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    sized = [(name, dtype, shape, math.prod(shape) * element_bytes(dtype)) for name, dtype, shape in tensors]
    position = 0
    for name, dtype, shape, size in sized:
        header[name] = {
            "dtype": _DTYPES[dtype][0],
            "shape": list(shape),
            "data_offsets": [position, position + size],
        }
        position += size
    head = json.dumps(header, separators=(",", ":")).encode()
    # Engines map the file; aligned data maps without a copy.
    head += b" " * (-(8 + len(head)) % _ALIGNMENT_BYTES)
    places: list[TensorPlace] = []
    offset = start = 8 + len(head)
    for name, dtype, shape, size in sized:
        places.append(TensorPlace(name=name, dtype=dtype, shape=shape, offset=offset, length_bytes=size))
        offset += size
    return len(head).to_bytes(8, "little") + head, places, start + position


def pack_safetensors(tensors: Iterable[tuple[str, TensorBytes]]) -> tuple[bytes, list[TensorPlace]]:
    """Serialise tensors, in the given order, into one safetensors file; return its bytes and each tensor's place."""
    items = list(tensors)
    head, places, _ = plan_safetensors((name, tensor.dtype, tensor.shape) for name, tensor in items)
    return b"".join([head, *(tensor.data for _, tensor in items)]), places


def read_places(data: bytes | memoryview, *, source: str) -> list[TensorPlace]:
    """Return each tensor's place in the safetensors file whose bytes are `data`, from its header.

    Raises CorruptObjectError naming `source` for a file that is not one.
    """
    view = memoryview(data).cast("B")
    what, reason = f"the safetensors header of {source}", "SAFETENSORS_INVALID"
    remedy = "the object is damaged; publish the policy again"
    length = int.from_bytes(view[:8], "little")
    try:
        # The length is foreign: it is compared with the file before anything is allocated.
        if view.nbytes < 8 or length > min(view.nbytes - 8, _MAX_HEADER_BYTES):
            raise ValueError(f"it has {view.nbytes} bytes and claims a header of {length}")
        header = decode_object(bytes(view[8 : 8 + length]), what=what, reason=reason, remedy=remedy)
        start = 8 + length
        return [
            _place(name, Fields(header[name], what=f"tensor {name[:200]!r}"), start=start, size=view.nbytes - start)
            for name in header
            if name != "__metadata__"
        ]
    except ValueError as error:
        raise CorruptObjectError(
            f"{source} is not a readable safetensors file: {error}", reason=reason, remedy=remedy
        ) from error


def _place(name: str, fields: Fields, *, start: int, size: int) -> TensorPlace:
    """Return the place of one tensor in a file that has `size` bytes of data from byte `start` on.

    `fields` are the tensor's entry in the header. Raises ValueError if the entry is malformed or outside the data.
    """
    dtype, shape = fields.text("dtype", most=100), fields.integers("shape", most=MAX_DIMENSIONS)
    offsets = fields.integers("data_offsets", most=2)
    if dtype not in _FROM_SAFETENSORS:
        raise ValueError(f"tensor {name[:200]!r} has the unknown dtype {dtype!r}")
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= size:
        raise ValueError(f"tensor {name[:200]!r} is outside the file")
    begin, end = offsets
    if tensor_bytes(_FROM_SAFETENSORS[dtype], shape) != end - begin:
        raise ValueError(f"tensor {name[:200]!r} of shape {list(shape)} has {end - begin} bytes")
    return TensorPlace(
        name=name, dtype=_FROM_SAFETENSORS[dtype], shape=shape, offset=start + begin, length_bytes=end - begin
    )


# Values of floating-point tensors, and back, without torch: numpy has no bfloat16.


def as_float32(tensor: TensorBytes) -> np.ndarray:
    """Return the values of a floating-point tensor as float32, in its shape; float64 is rounded."""
    if tensor.dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        return (tensor.numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32)


def from_float32(values: np.ndarray, *, dtype: str) -> TensorBytes:
    """Return finite float32 values as a tensor of the floating-point format `dtype`.

    They are rounded to nearest, ties to even.
    """
    if dtype != "bfloat16":
        return TensorBytes.from_numpy(values.astype(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half of the last kept bit, and one less where that bit is even: ties go to even.
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorBytes.from_numpy(rounded.astype(np.uint16), dtype=dtype)


# One safetensors file as tensors over its mapped bytes, without torch.


def read_tensors(path: Path) -> dict[str, TensorBytes]:
    """Map a safetensors file, and return its tensors by name, as views of the file.

    Raises CorruptObjectError (SAFETENSORS_INVALID) for a damaged file.
    """
    with path.open("rb") as file:
        size = path.stat().st_size
        # An empty file cannot be mapped. The views keep the mapping alive when the file is closed.
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if size else memoryview(b"")
    return {
        place.name: TensorBytes(
            dtype=place.dtype, shape=place.shape, data=data[place.offset : place.offset + place.length_bytes]
        )
        for place in read_places(data, source=str(path))
    }


# What differs between two versions of one tensor.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorChange:
    """New bits of some elements of one tensor, as absolute values: to apply them twice is to apply them once.

    `positions` int64 [N] are row-major element indices, strictly increasing; None means the contiguous range of `bits`
    that begins at `start`. `bits` [N] are the elements' bits as unsigned integers of the dtype's width.
    """

    bits: NDArray[np.unsignedinteger]
    positions: NDArray[np.int64] | None = None
    start: int = 0

    @property
    def num_elements(self) -> int:
        """Return the number of elements that the change sets."""
        return int(self.bits.size)

    def old_bits(self, held: NDArray[np.unsignedinteger]) -> NDArray[np.unsignedinteger]:
        """Return the bits of the elements that this change sets, as `held`, the whole tensor's flat bits, has them now.

        A view if the change is a range, else a copy. Raises CorruptObjectError if the change does not fit the tensor.
        """
        self._check(held)
        if self.positions is None:
            return held[self.start : self.start + self.bits.size]
        return held[self.positions]

    def apply(self, held: NDArray[np.unsignedinteger]) -> None:
        """Set the elements in `held`, the whole tensor's flat bits, in place.

        Raises CorruptObjectError before writing if the change does not fit the tensor.
        """
        self._check(held)
        if self.positions is None:
            held[self.start : self.start + self.bits.size] = self.bits
        else:
            held[self.positions] = self.bits

    def shares(self, size: int) -> Iterator[tuple[int, "TensorChange"]]:
        """Yield the change in pieces, cut at the multiples of `size` elements of the tensor.

        Each comes with the multiple at which its share begins. Shares without any change are left out.
        """
        if self.num_elements == 0:
            return
        last = self.start + self.num_elements - 1 if self.positions is None else int(self.positions[-1])
        # The share with the first changed element, counted in elements of the tensor, not of the change.
        first = (self.start if self.positions is None else int(self.positions[0])) // size * size
        for share in range(first, last + 1, size):
            if self.positions is None:
                begin, end = max(share - self.start, 0), min(share + size - self.start, self.num_elements)
                yield share, TensorChange(bits=self.bits[begin:end], start=self.start + begin)
            else:
                # Positions ascend, so a share of a sparse change is a slice of it.
                begin, end = np.searchsorted(self.positions, (share, share + size))
                if begin < end:
                    yield share, TensorChange(bits=self.bits[begin:end], positions=self.positions[begin:end])

    def _check(self, held: NDArray[np.unsignedinteger]) -> None:
        """Raise CorruptObjectError unless the change is inside the tensor `held` and has its width.

        numpy would wrap, cast or broadcast silently.
        """
        first, last = self.start, self.start + self.bits.size - 1
        if self.positions is not None:
            if self.positions.size != self.bits.size:
                raise _bad(f"{self.positions.size} positions come with {self.bits.size} values")
            first, last = (int(self.positions[0]), int(self.positions[-1])) if self.positions.size else (0, -1)
        if self.bits.dtype != held.dtype:
            raise _bad(f"it sets {self.bits.dtype} bits in a tensor of {held.dtype} bits")
        if first < 0 or last >= held.size:
            raise _bad(f"it sets elements {first} to {last} of a tensor of {held.size} elements")


def _bad(what: str) -> CorruptObjectError:
    """Make the error that a change does not fit its tensor; `what` says how."""
    return CorruptObjectError(
        f"a change does not fit its tensor: {what}",
        reason="CHANGE_OUT_OF_BOUNDS",
        remedy="the policy and the held copy disagree about the tensor; reload the policy from its anchor",
    )
