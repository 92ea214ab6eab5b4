"""Dense and plain frames: every element's difference in units of the last place, or every new value, by byte planes.

Sections: one for each byte of an element, the lowest first. Differences are zigzag-folded, so that small ones of either
sign leave the high planes almost empty.
"""

import numpy as np
import zstandard

from millrace.policies.delta.codings import Bits, corrupt, from_planes, to_planes, ulp_map, unzigzag, zigzag
from millrace.policies.delta.frame import COMPRESSION_LEVEL, PieceHeader, Section

_BLOCK_ELEMENTS = 1 << 17


def encode_dense(base: Bits, new: Bits) -> tuple[int, list[Section]]:
    """The number of changed elements, and the planes of the differences."""
    changed = 0
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, _BLOCK_ELEMENTS):
        difference = ulp_map(new[begin : begin + _BLOCK_ELEMENTS])
        difference -= ulp_map(base[begin : begin + _BLOCK_ELEMENTS])
        changed += int(np.count_nonzero(difference))
        planes.add(zigzag(difference))
    return changed, planes.sections()


def encode_plain(new: Bits) -> list[Section]:
    """The planes of the values."""
    planes = _PlaneCompressor(new)
    for begin in range(0, new.size, _BLOCK_ELEMENTS):
        planes.add(new[begin : begin + _BLOCK_ELEMENTS])
    return planes.sections()


def decode_dense(header: PieceHeader, sections: list[Section], current: Bits) -> Bits:
    """The new bits of all elements."""
    new = decode_plain(header, sections)
    for begin in range(0, new.size, _BLOCK_ELEMENTS):
        block = new[begin : begin + _BLOCK_ELEMENTS]
        ordered = unzigzag(block)
        ordered += ulp_map(current[begin : begin + _BLOCK_ELEMENTS])
        block[:] = ulp_map(ordered)
    return new


def decode_plain(header: PieceHeader, sections: list[Section]) -> Bits:
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

    def sections(self) -> list[Section]:
        return [
            Section(raw_bytes=self._raw_bytes, stored=b"".join([*stored, compressor.flush()]), compressed=True)
            for compressor, stored in zip(self._compressors, self._stored, strict=True)
        ]
