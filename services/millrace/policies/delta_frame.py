"""The frame of one piece of a policy delta: a checked header and compressed sections. A stored format: never change it.

Little-endian: magic `MRDP`, crc32 of all that follows, then format, kind, element width, gap width and number of
sections (u8 each), a zero byte, the bit set of the compressed sections (u16), start, count, number of changed elements,
number of exceptions (u64 each), digests of base and result (16 bytes each, big-endian), per section its raw and its
stored length (u64 each), then the sections themselves. A compressed section is one zstd frame, any other is raw bytes.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import zstandard
from numpy.typing import NDArray

from millrace.decoding import decompress
from millrace.errors import CorruptObjectError
from millrace.policies.digest import change_digest
from millrace.policies.tensors import TensorChange

SPARSE, DENSE, PLAIN = 1, 2, 3
KIND_NAMES = {SPARSE: "sparse", DENSE: "dense", PLAIN: "plain"}

COMPRESSION_LEVEL = 1  # level 3 gains nothing on these streams, and costs time

_MAGIC = b"MRDP"
_FORMAT = 2
_LEAD = struct.Struct("<4sI")
_HEAD = struct.Struct("<BBBBBxH4Q16s16s")
_SECTION = struct.Struct("<QQ")
_MAX_SECTIONS = 16
_WIDTHS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceHeader:
    """The header of a frame. `start` and `count` are a range of row-major elements of the tensor, `width` the bytes of
    one; the digests are those of the piece (`bits_digest` at `start`) before and after."""

    kind: int
    width: int
    gap_width: int
    start: int
    count: int
    num_changed: int
    num_exceptions: int
    base_digest: int
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameSection:
    """One stream: its length in bytes, and its stored bytes."""

    raw_bytes: int
    stored: bytes | memoryview
    compressed: bool

    def expand(self, *, raw_bytes: int, what: str) -> NDArray[np.uint8]:
        """Return the stream, decompressed; raise CorruptObjectError unless it has `raw_bytes`.

        The claimed length is checked before memory is allocated. `what` names the stream in the error.
        """
        # The caller knows the length from the header's counts; the table's is foreign until it agrees.
        if self.raw_bytes != raw_bytes:
            raise corrupt(f"its {what} have {self.raw_bytes} bytes, not {raw_bytes}")
        data: bytes | memoryview = self.stored
        if self.compressed:
            try:
                data = decompress(self.stored, what=f"compressed {what}", reason="DELTA_CORRUPT", max_bytes=raw_bytes)
            except CorruptObjectError as error:
                raise corrupt(error.message) from error
        if len(data) != raw_bytes:
            raise corrupt(f"its {what} expand to {len(data)} bytes, not {raw_bytes}")
        return np.frombuffer(data, np.uint8)


def pack_frame(header: PieceHeader, sections: Sequence[FrameSection]) -> bytes:
    """Return the bytes of a frame: checksum, header, table of sections, and the sections."""
    head = _HEAD.pack(
        _FORMAT,
        header.kind,
        header.width,
        header.gap_width,
        len(sections),
        sum(1 << number for number, section in enumerate(sections) if section.compressed),
        header.start,
        header.count,
        header.num_changed,
        header.num_exceptions,
        header.base_digest.to_bytes(16, "big"),
        header.digest.to_bytes(16, "big"),
    )
    table = [_SECTION.pack(section.raw_bytes, len(section.stored)) for section in sections]
    parts = [head, *table, *(section.stored for section in sections)]
    # Part by part, so that the frame is joined once only.
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([_LEAD.pack(_MAGIC, checksum), *parts])


def read_header(frame: bytes | memoryview) -> PieceHeader:
    """Return the header of a frame; raise CorruptObjectError if the frame is malformed or damaged."""
    return read_frame(frame)[0]


def read_frame(frame: bytes | memoryview) -> tuple[PieceHeader, list[FrameSection]]:
    """Return the header of a frame and its sections, which are views; nothing is decompressed yet.

    Raises CorruptObjectError if the frame is malformed or its checksum differs.
    """
    view = memoryview(frame).cast("B")
    if view.nbytes < _LEAD.size + _HEAD.size:
        raise corrupt(f"it has {view.nbytes} bytes, fewer than a header")
    magic, checksum = _LEAD.unpack_from(view)
    if magic != _MAGIC:
        raise corrupt(f"it begins with {magic!r}, not with {_MAGIC!r}")
    # The checksum covers the header, so nothing in it is trusted before.
    if zlib.crc32(view[_LEAD.size :]) != checksum:
        raise corrupt("its checksum does not match")
    (version, kind, width, gap_width, num_sections, compressed, start, count, changed, exceptions, base, result) = (
        _HEAD.unpack_from(view, _LEAD.size)
    )
    if version != _FORMAT or kind not in KIND_NAMES:
        raise corrupt(f"format {version}, kind {kind} is unknown to this release (it reads format {_FORMAT})")
    if width not in _WIDTHS or gap_width not in (0, 1, 2) or num_sections > _MAX_SECTIONS:
        raise corrupt(f"width {width}, gap width {gap_width}, {num_sections} sections are not possible")
    # These counts size the arrays that decoding allocates.
    if not exceptions <= changed <= count:
        raise corrupt(f"{exceptions} exceptions of {changed} changes of {count} elements are not possible")
    header = PieceHeader(
        kind=kind,
        width=width,
        gap_width=gap_width,
        start=start,
        count=count,
        num_changed=changed,
        num_exceptions=exceptions,
        base_digest=int.from_bytes(base, "big"),
        digest=int.from_bytes(result, "big"),
    )
    return header, _sections(view, num_sections, compressed)


def _sections(view: memoryview, num_sections: int, compressed: int) -> list[FrameSection]:
    """Return the sections of a frame as views; raise CorruptObjectError if they do not fill the frame exactly.

    Bit i of `compressed` says whether section i is.
    """
    table = _LEAD.size + _HEAD.size
    position = table + num_sections * _SECTION.size
    if position > view.nbytes:
        raise corrupt(f"its table of {num_sections} sections is cut off")
    sections: list[FrameSection] = []
    for number in range(num_sections):
        raw, stored = _SECTION.unpack_from(view, table + number * _SECTION.size)
        if stored > view.nbytes - position:
            raise corrupt(f"section {number} of {stored} bytes is cut off")
        sections.append(
            FrameSection(
                raw_bytes=raw,
                stored=view[position : position + stored],
                compressed=bool(compressed >> number & 1),
            )
        )
        position += stored
    # Bytes after the last section would be a second content that no digest covers.
    if position != view.nbytes:
        raise corrupt(f"{view.nbytes - position} bytes follow its last section")
    return sections


def compress_section(data: NDArray[np.uint8]) -> FrameSection:
    """Return a section of these bytes, compressed where that makes it smaller."""
    stored = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(data.data)
    if len(stored) < data.size:
        return FrameSection(raw_bytes=data.size, stored=stored, compressed=True)
    return FrameSection(raw_bytes=data.size, stored=data.tobytes(), compressed=False)


# Reversible array transformations of the delta codec: floats in order of size, positions as gaps, values as planes.
#
# All are vectorised, work on flat unsigned arrays of any width, and know nothing of frames or compression.

Bits = NDArray[np.unsignedinteger]


def ulp_map(bits: Bits) -> Bits:
    """Map float bits to integers, as unsigned bits, so that neighbours in value are neighbours; its own inverse.

    On the signed view it is `s if s >= 0 else -(s & max) - 1`, which is bijective: -0 maps to -1, and NaNs are beyond
    the infinities. A step of one unit in the last place is a difference of one, modulo 2**bits.
    """
    width = bits.dtype.itemsize
    # IEEE floats are ordered like sign and magnitude. Flipping all bits of a negative one but its sign gives two's
    # complement order. The arithmetic shift makes all ones of a negative sign, the next shift clears the sign's place.
    signed = bits.view(f"i{width}")
    sign_mask = (signed >> (8 * width - 1)).view(bits.dtype)
    sign_mask >>= 1
    sign_mask ^= bits
    return sign_mask


def zigzag(difference: Bits) -> Bits:
    """Map differences, as unsigned bits, so that small ones of either sign are small: 0, -1, 1, -2 to 0, 1, 2, 3."""
    # The arithmetic shift is all ones for a negative difference, whose bits are flipped then.
    width = difference.dtype.itemsize
    folded = (difference.view(f"i{width}") >> (8 * width - 1)).view(difference.dtype)
    folded ^= difference << 1
    return folded


def unzigzag(folded: Bits) -> Bits:
    """Return the signed differences, as unsigned bits, that `zigzag` made small: 0, 1, 2, 3 give 0, -1, 1, -2."""
    sign_mask = np.negative((folded & 1).view(f"i{folded.dtype.itemsize}")).view(folded.dtype)
    sign_mask ^= folded >> 1
    return sign_mask


def differing(old: Bits, new: Bits) -> NDArray[np.int64]:
    """Return the indices, ascending, at which two contiguous arrays of one dtype and size differ."""
    # The logarithm (base 2) of the elements in a word of eight bytes.
    shift = (8 // new.dtype.itemsize).bit_length() - 1
    whole = new.size >> shift << shift
    old_words, new_words = old[:whole].view(np.uint64), new[:whole].view(np.uint64)
    # About 1 % of the elements change per step: comparing eight bytes at once skips most of the rest.
    words = np.flatnonzero(old_words != new_words)
    inside = np.flatnonzero(old_words[words].view(new.dtype) != new_words[words].view(new.dtype))
    # `inside` counts within the differing words: its high bits name the word, its low bits the element in it.
    positions = words[inside >> shift]
    positions <<= shift
    inside &= (1 << shift) - 1
    positions += inside
    if whole == new.size:
        return positions
    return np.concatenate([positions, np.flatnonzero(old[whole:] != new[whole:]) + whole])


def encode_gaps(positions: NDArray[np.int64], *, previous: int, width: int) -> Bits:
    """Return gaps between ascending positions as units of `width` bytes; `previous` is the position before the first.

    A unit below the largest says how many elements are skipped before the next position; the largest skips that many
    elements and names none, so that a gap of any length is some of those and one other unit.
    """
    escape = (1 << (8 * width)) - 1
    skipped = np.empty(positions.size, np.int64)
    skipped[:1] = positions[:1] - (previous + 1)
    np.subtract(positions[1:], positions[:-1], out=skipped[1:])
    skipped[1:] -= 1
    units = skipped.astype(f"<u{width}")
    long = np.flatnonzero(skipped >= escape)
    if not long.size:
        return units
    # A long gap is `escapes` units of the largest value, each standing for that many skipped elements, and the rest.
    escapes, units[long] = np.divmod(skipped[long], escape)
    return np.insert(units, np.repeat(long, escapes), escape)


def decode_gaps(units: Bits, *, num_positions: int, limit: int, what: str) -> NDArray[np.int64]:
    """Return the positions, ascending, from the gaps between them, the inverse of `encode_gaps` with `previous` -1.

    A unit below the largest of its type says how many elements are skipped before the next position; the largest skips
    that many and names none. Raises CorruptObjectError unless exactly `num_positions` are named, all below `limit`;
    `what` names them in the error.
    """
    named = units != np.iinfo(units.dtype).max
    # A largest unit at the end would skip elements and name none: a second spelling of the same positions.
    if np.count_nonzero(named) != num_positions or (units.size and not named[-1]):
        raise corrupt(f"its {what} do not name {num_positions} elements")
    # Where each unit ends: all skipped elements so far, and one for each that was named.
    ends = np.cumsum(named, dtype=np.int64)
    ends += np.cumsum(units, dtype=np.int64)
    positions = ends[named]
    positions -= 1
    if num_positions and int(positions[-1]) >= limit:
        raise corrupt(f"its {what} reach element {int(positions[-1])} of {limit}")
    return positions


def to_planes(values: Bits) -> list[NDArray[np.uint8]]:
    """Return the bytes of the values by significance: one contiguous array per byte of an element, the lowest first."""
    planes = values.view(np.uint8).reshape(values.size, values.dtype.itemsize)
    return [np.ascontiguousarray(planes[:, byte]) for byte in range(values.dtype.itemsize)]


def from_planes(planes: list[NDArray[np.uint8]]) -> Bits:
    """Return values from one array for each byte of an element, the lowest byte first; the inverse of `to_planes`."""
    width = len(planes)
    values = np.empty((planes[0].size, width), np.uint8)
    for byte, plane in enumerate(planes):
        values[:, byte] = plane
    return values.reshape(-1).view(f"<u{width}")


def corrupt(what: str) -> CorruptObjectError:
    """Make the error of a frame that breaks its format; `what` says how."""
    return CorruptObjectError(
        f"a policy delta is damaged: {what}",
        reason="DELTA_CORRUPT",
        remedy="fetch the object again; if it stays so, reload the policy from its anchor",
    )


# The three kinds of frames, each as sections of compressed bytes.
#
# * Sparse: the byte planes of the gaps between changed positions, the signs of steps of one unit in the last place (one
#   bit for each change that is no exception, the first in the highest bit; set: up), the gaps between the exceptions'
#   numbers among the changes, the byte planes of the exceptions' new bits. In this order.
# * Dense: every element's difference in units of the last place, by byte planes, the lowest first. Differences are
#   zigzag-folded, so that small ones of either sign leave the high planes almost empty.
# * Plain: every new value, by byte planes.

_EXCEPTION_GAP_WIDTH = 1
BLOCK_ELEMENTS = 1 << 17


@dataclass(slots=True)
class SparseEncoder:
    """Encodes the changes of one piece; `digest` is that of the base at first, and becomes that of the result."""

    gap_width: int
    start: int
    digest: int
    num_changed: int = 0
    num_exceptions: int = 0
    _last: int = -1
    _gaps: list[Bits] = field(default_factory=list)
    _signs: list[NDArray[np.bool_]] = field(default_factory=list)
    _exceptions: list[NDArray[np.int64]] = field(default_factory=list)
    _values: list[Bits] = field(default_factory=list)

    def add(self, positions: NDArray[np.int64], old: Bits, new: Bits) -> None:
        """Add the next changed elements (at least one), ascending; `positions` count from the piece's start.

        `old` and `new` are their bits before and after.
        """
        self._gaps.append(encode_gaps(positions, previous=self._last, width=self.gap_width))
        # Unsigned differences wrap: a step down by one is the largest value.
        step = ulp_map(new)
        step -= ulp_map(old)
        up = step == 1
        single = up | (step == np.iinfo(step.dtype).max)
        self._signs.append(up[single])
        others = np.flatnonzero(~single)
        self._values.append(new[others])
        self._exceptions.append(others + self.num_changed)
        self.digest = change_digest(self.digest, TensorChange(bits=new, positions=positions + self.start), old)
        self.num_changed += positions.size
        self.num_exceptions += others.size
        self._last = int(positions[-1])

    def sections(self) -> list[FrameSection]:
        """Return the compressed streams of all changes that were added; call it once, after at least one `add`."""
        # The order of the streams is that of the stored format.
        exceptions = np.concatenate(self._exceptions)
        planes = [
            *to_planes(np.concatenate(self._gaps)),
            np.packbits(np.concatenate(self._signs)),
            *to_planes(encode_gaps(exceptions, previous=-1, width=_EXCEPTION_GAP_WIDTH)),
            *to_planes(np.concatenate(self._values)),
        ]
        return [compress_section(plane) for plane in planes]


def decode_sparse(
    header: PieceHeader, sections: list[FrameSection], current: Bits
) -> tuple[NDArray[np.int64], Bits, Bits]:
    """Return the changed positions, counted from the piece's start, and the bits there, before and after.

    `current` are the flat bits of the piece, the base. Raises CorruptObjectError for a malformed frame.
    """
    if header.gap_width == 0 or len(sections) != header.gap_width + 1 + _EXCEPTION_GAP_WIDTH + header.width:
        raise corrupt(f"a sparse frame of gap width {header.gap_width} has {len(sections)} sections")
    # In the order of `SparseEncoder.sections`: gaps, signs, gaps between exceptions, values.
    gaps, rest = sections[: header.gap_width], sections[header.gap_width :]
    positions = _expand_gaps(gaps, num_positions=header.num_changed, limit=header.count, what="gaps")
    exceptions = _expand_gaps(
        rest[1:2], num_positions=header.num_exceptions, limit=header.num_changed, what="exceptions"
    )
    num_signs = header.num_changed - header.num_exceptions
    packed = rest[0].expand(raw_bytes=-(-num_signs // 8), what="signs")
    up = np.unpackbits(packed, count=num_signs).view(np.bool_)
    values = from_planes([plane.expand(raw_bytes=header.num_exceptions, what="values") for plane in rest[2:]])

    single = np.ones(header.num_changed, np.bool_)
    single[exceptions] = False
    steps = np.zeros(header.num_changed, current.dtype)
    steps[single] = up
    # 1 for up, 0 for down: 2 s - 1 is the step of one unit, modulo 2**bits.
    steps *= 2
    steps -= 1  # modulo 2**bits; what is at the exceptions is overwritten
    old = current[positions]
    steps += ulp_map(old)
    new = ulp_map(steps)
    new[exceptions] = values
    return positions, old, new


def _expand_gaps(sections: list[FrameSection], *, num_positions: int, limit: int, what: str) -> NDArray[np.int64]:
    """Return the positions, ascending, from the compressed byte planes (`sections`) of the gaps between them.

    The number of gaps is bounded before anything is expanded. Raises CorruptObjectError unless exactly `num_positions`
    are named, all below `limit`; `what` names them in the error.
    """
    units = sections[0].raw_bytes
    # One unit per position, and as many escapes as fit into the piece.
    most = num_positions + limit // ((1 << (8 * len(sections))) - 1)
    if units > most:
        raise corrupt(f"its {what} have {units} units, more than {most}")
    planes = [section.expand(raw_bytes=units, what=what) for section in sections]
    return decode_gaps(from_planes(planes), num_positions=num_positions, limit=limit, what=what)


def encode_dense(base: Bits, new: Bits) -> tuple[int, list[FrameSection]]:
    """Return the number of changed elements, and the byte planes of all differences in units of the last place."""
    changed = 0
    # Byte planes: the high bytes of small differences are nearly all 0, which zstd makes almost nothing of.
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        difference = ulp_map(new[begin : begin + BLOCK_ELEMENTS])
        difference -= ulp_map(base[begin : begin + BLOCK_ELEMENTS])
        changed += int(np.count_nonzero(difference))
        planes.add(zigzag(difference))
    return changed, planes.sections()


def encode_plain(new: Bits) -> list[FrameSection]:
    """Return the byte planes of the values, compressed."""
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        planes.add(new[begin : begin + BLOCK_ELEMENTS])
    return planes.sections()


def decode_dense(header: PieceHeader, sections: list[FrameSection], current: Bits) -> Bits:
    """Return the new bits of all elements from their differences to `current`, the base."""
    new = decode_plain(header, sections)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        block = new[begin : begin + BLOCK_ELEMENTS]
        ordered = unzigzag(block)
        ordered += ulp_map(current[begin : begin + BLOCK_ELEMENTS])
        block[:] = ulp_map(ordered)
    return new


def decode_plain(header: PieceHeader, sections: list[FrameSection]) -> Bits:
    """Return the values of all elements from their byte planes; raise CorruptObjectError for a malformed frame."""
    if len(sections) != header.width:
        raise corrupt(f"a frame of {header.width} planes has {len(sections)} sections")
    return from_planes([section.expand(raw_bytes=header.count, what="planes") for section in sections])


class _PlaneCompressor:
    """Compresses the byte planes of a piece block by block; they never are in memory as a whole."""

    def __init__(self, like: Bits) -> None:
        """Prepare to compress as many values, of the same width, as `like` has."""
        self._raw_bytes = like.size
        width = like.dtype.itemsize
        # With the size in the frame's header, without which `decoding.decompress` refuses it.
        self._compressors = [
            zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compressobj(size=like.size) for _ in range(width)
        ]
        self._stored: list[list[bytes]] = [[] for _ in range(width)]

    def add(self, values: Bits) -> None:
        """Compress the next block of values."""
        for plane, compressor, stored in zip(to_planes(values), self._compressors, self._stored, strict=True):
            stored.append(compressor.compress(plane.data))

    def sections(self) -> list[FrameSection]:
        """Return the compressed byte planes of all values that were added; call it once."""
        return [
            FrameSection(raw_bytes=self._raw_bytes, stored=b"".join([*stored, compressor.flush()]), compressed=True)
            for compressor, stored in zip(self._compressors, self._stored, strict=True)
        ]
