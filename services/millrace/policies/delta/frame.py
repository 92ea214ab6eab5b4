"""The frame of one piece of a policy delta: a checked header and compressed sections. A stored format: never change it.

Little-endian: magic `MRDP`, crc32 of all that follows, then format, kind, element width, gap width and number of
sections (u8 each), a zero byte, the bit set of the compressed sections (u16), start, count, number of changed elements,
number of exceptions (u64 each), digests of base and result (16 bytes each, big-endian), per section its raw and its
stored length (u64 each), then the sections themselves. A compressed section is one zstd frame, any other is raw bytes.
"""

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from millrace.decoding import decompress
from millrace.errors import CorruptObjectError
from millrace.policies.delta.codings import corrupt

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
    """What a frame says about itself. `start` and `count` are a range of row-major elements of the tensor, `width` the
    bytes of one; the digests are those of the piece (`bits_digest` at `start`) before and after."""

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
    """One stream: its length in bytes, and what is stored of it."""

    raw_bytes: int
    stored: bytes | memoryview
    compressed: bool

    def expand(self, *, raw_bytes: int, what: str) -> NDArray[np.uint8]:
        """The stream, which must be `raw_bytes` long; what the frame claims is checked before memory is taken."""
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
    """One frame; the checksum is computed here."""
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
    checksum = 0
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    return b"".join([_LEAD.pack(_MAGIC, checksum), *parts])


def read_header(frame: bytes | memoryview) -> PieceHeader:
    """The header of a frame; raises CorruptObjectError if it is none, or not what was written."""
    return read_frame(frame)[0]


def read_frame(frame: bytes | memoryview) -> tuple[PieceHeader, list[FrameSection]]:
    """The header and the sections, which are views; nothing is decompressed yet."""
    view = memoryview(frame).cast("B")
    if view.nbytes < _LEAD.size + _HEAD.size:
        raise corrupt(f"it has {view.nbytes} bytes, fewer than a header")
    magic, checksum = _LEAD.unpack_from(view)
    if magic != _MAGIC:
        raise corrupt(f"it begins with {magic!r}, not with {_MAGIC!r}")
    if zlib.crc32(view[_LEAD.size :]) != checksum:
        raise corrupt("its checksum does not match")
    (version, kind, width, gap_width, num_sections, compressed, start, count, changed, exceptions, base, result) = (
        _HEAD.unpack_from(view, _LEAD.size)
    )
    if version != _FORMAT or kind not in KIND_NAMES:
        raise corrupt(f"format {version}, kind {kind} is unknown to this release (it reads format {_FORMAT})")
    if width not in _WIDTHS or gap_width not in (0, 1, 2) or num_sections > _MAX_SECTIONS:
        raise corrupt(f"width {width}, gap width {gap_width}, {num_sections} sections are not possible")
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
    if position != view.nbytes:
        raise corrupt(f"{view.nbytes - position} bytes follow its last section")
    return sections


def compress_section(data: NDArray[np.uint8]) -> FrameSection:
    """A section of these bytes, compressed where that makes it smaller."""
    stored = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL).compress(data.data)
    if len(stored) < data.size:
        return FrameSection(raw_bytes=data.size, stored=stored, compressed=True)
    return FrameSection(raw_bytes=data.size, stored=data.tobytes(), compressed=False)
