"""The three kinds of frames, each as sections of compressed bytes.

* Sparse: the byte planes of the gaps between changed positions, the signs of steps of one unit in the last place (one
  bit for each change that is no exception, the first in the highest bit; set: up), the gaps between the exceptions'
  numbers among the changes, the byte planes of the exceptions' new bits. In this order.
* Dense: every element's difference in units of the last place, by byte planes, the lowest first. Differences are
  zigzag-folded, so that small ones of either sign leave the high planes almost empty.
* Plain: every new value, by byte planes.
"""

from dataclasses import dataclass, field

import numpy as np
import zstandard
from numpy.typing import NDArray

from millrace.policies.change import TensorChange
from millrace.policies.delta.codings import (
    Bits,
    corrupt,
    decode_gaps,
    encode_gaps,
    from_planes,
    to_planes,
    ulp_map,
    unzigzag,
    zigzag,
)
from millrace.policies.delta.frame import COMPRESSION_LEVEL, FrameSection, PieceHeader, compress_section
from millrace.policies.digest import change_digest

_EXCEPTION_GAP_WIDTH = 1
BLOCK_ELEMENTS = 1 << 17


@dataclass(slots=True)
class SparseEncoder:
    """Adds up the changes of one piece; `digest` is that of the base at first, and that of the result at last."""

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
        """Add the next changed elements (at least one); `positions` count from the piece's start."""
        self._gaps.append(encode_gaps(positions, previous=self._last, width=self.gap_width))
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
        """The streams; call it once, after at least one change."""
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
    """The changed positions, counted from the piece's start, and the bits there, before and after."""
    if header.gap_width == 0 or len(sections) != header.gap_width + 1 + _EXCEPTION_GAP_WIDTH + header.width:
        raise corrupt(f"a sparse frame of gap width {header.gap_width} has {len(sections)} sections")
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
    steps *= 2
    steps -= 1  # modulo 2**bits; what stands at the exceptions is overwritten
    old = current[positions]
    steps += ulp_map(old)
    new = ulp_map(steps)
    new[exceptions] = values
    return positions, old, new


def _expand_gaps(sections: list[FrameSection], *, num_positions: int, limit: int, what: str) -> NDArray[np.int64]:
    """Positions from the byte planes of their gaps, whose number is bounded before anything is expanded."""
    units = sections[0].raw_bytes
    most = num_positions + limit // ((1 << (8 * len(sections))) - 1)
    if units > most:
        raise corrupt(f"its {what} have {units} units, more than {most}")
    planes = [section.expand(raw_bytes=units, what=what) for section in sections]
    return decode_gaps(from_planes(planes), num_positions=num_positions, limit=limit, what=what)


def encode_dense(base: Bits, new: Bits) -> tuple[int, list[FrameSection]]:
    """The number of changed elements, and the planes of the differences."""
    changed = 0
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        difference = ulp_map(new[begin : begin + BLOCK_ELEMENTS])
        difference -= ulp_map(base[begin : begin + BLOCK_ELEMENTS])
        changed += int(np.count_nonzero(difference))
        planes.add(zigzag(difference))
    return changed, planes.sections()


def encode_plain(new: Bits) -> list[FrameSection]:
    """The planes of the values."""
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        planes.add(new[begin : begin + BLOCK_ELEMENTS])
    return planes.sections()


def decode_dense(header: PieceHeader, sections: list[FrameSection], current: Bits) -> Bits:
    """The new bits of all elements."""
    new = decode_plain(header, sections)
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        block = new[begin : begin + BLOCK_ELEMENTS]
        ordered = unzigzag(block)
        ordered += ulp_map(current[begin : begin + BLOCK_ELEMENTS])
        block[:] = ulp_map(ordered)
    return new


def decode_plain(header: PieceHeader, sections: list[FrameSection]) -> Bits:
    """The values of all elements."""
    if len(sections) != header.width:
        raise corrupt(f"a frame of {header.width} planes has {len(sections)} sections")
    return from_planes([section.expand(raw_bytes=header.count, what="planes") for section in sections])


class _PlaneCompressor:
    """Compresses the byte planes of a piece block by block; they never lie in memory as a whole."""

    def __init__(self, like: Bits) -> None:
        self._raw_bytes = like.size
        width = like.dtype.itemsize
        self._compressors = [
            zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compressobj(size=like.size) for _ in range(width)
        ]
        self._stored: list[list[bytes]] = [[] for _ in range(width)]

    def add(self, values: Bits) -> None:
        for plane, compressor, stored in zip(to_planes(values), self._compressors, self._stored, strict=True):
            stored.append(compressor.compress(plane.data))

    def sections(self) -> list[FrameSection]:
        return [
            FrameSection(raw_bytes=self._raw_bytes, stored=b"".join([*stored, compressor.flush()]), compressed=True)
            for compressor, stored in zip(self._compressors, self._stored, strict=True)
        ]
