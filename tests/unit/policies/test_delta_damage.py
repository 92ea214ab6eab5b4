"""Damaged and hostile frames: an error that names the damage, never wrong bits, never memory beyond the piece."""

import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConflictError, CorruptObjectError
from millrace.policies.delta_codec import decode_piece, encode_piece
from millrace.policies.delta_frame import Bits, FrameSection, PieceHeader, pack_frame, read_frame, ulp_map

_LEAD_BYTES = 8  # magic and checksum
_U64_MAX = 2**64 - 1


def _versions(share: float, *, size: int = 3000) -> tuple[Bits, Bits]:
    rng = np.random.default_rng(3)
    base = rng.integers(0x3C00, 0x3D00, size).astype(np.uint16)
    step = rng.choice(np.array([1, 5, -1, -5]), size, p=[0.45, 0.05, 0.45, 0.05]).astype(np.uint16)
    return base, np.where(rng.random(size) < share, ulp_map(ulp_map(base) + step), base)


def _frames() -> dict[str, tuple[bytes, Bits, Bits]]:
    """Return a frame of each kind and gap width, with its base and its result."""
    cases = {"wide gaps": _versions(0.0015), "sparse": _versions(0.1), "dense": _versions(0.6)}
    cases["plain"] = (np.random.default_rng(4).integers(0, 2**16, 3000).astype(np.uint16), np.zeros(3000, np.uint16))
    frames = {}
    for name, (base, new) in cases.items():
        piece = encode_piece(base, new)
        assert piece is not None
        frames[name] = (piece.data, base, new)
    assert [read_frame(frame)[0].kind for frame, _, _ in frames.values()] == [1, 1, 2, 3]
    assert [read_frame(frame)[0].gap_width for frame, _, _ in frames.values()] == [2, 1, 0, 0]
    return frames


_FRAMES = _frames()
_KINDS = st.sampled_from(sorted(_FRAMES))


def _sealed(frame: bytes | bytearray) -> bytes:
    """Return the frame with a checksum that matches, so that the damage reaches what is behind the check."""
    return bytes(frame[:4]) + struct.pack("<I", zlib.crc32(frame[_LEAD_BYTES:])) + bytes(frame[_LEAD_BYTES:])


def _right_or_refused(frame: bytes, base: Bits, new: Bits) -> None:
    """Either the right bits come out or one of the two errors."""
    try:
        change = decode_piece(frame, base)
    except (CorruptObjectError, ConflictError):
        return
    held = base.copy()
    change.apply(held)
    assert np.array_equal(held, new)


@given(kind=_KINDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_every_flipped_byte_is_found(kind: str, data: st.DataObject) -> None:
    frame, base, _ = _FRAMES[kind]
    damaged = bytearray(frame)
    damaged[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptObjectError, match="damaged"):
        decode_piece(bytes(damaged), base)


@given(kind=_KINDS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_damage_behind_a_right_checksum_never_gives_wrong_bits(kind: str, data: st.DataObject) -> None:
    frame, base, new = _FRAMES[kind]
    damaged = bytearray(frame)
    # Half of the damage goes to the header and the table, where a byte means most.
    place = st.integers(_LEAD_BYTES, min(len(frame), 200) - 1) | st.integers(_LEAD_BYTES, len(frame) - 1)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(place)] = data.draw(st.integers(0, 255))
    _right_or_refused(_sealed(damaged), base, new)


@given(kind=_KINDS, data=st.data(), sealed=st.booleans())
@settings(max_examples=100, deadline=None)
def test_cut_and_longer_frames_are_refused(kind: str, data: st.DataObject, sealed: bool) -> None:
    frame, base, _ = _FRAMES[kind]
    cut = frame[: data.draw(st.integers(0, len(frame) - 1))]
    longer = frame + data.draw(st.binary(min_size=1, max_size=20))
    for damaged in (cut, longer):
        with pytest.raises(CorruptObjectError):
            decode_piece(_sealed(damaged) if sealed else damaged, base)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(data: bytes) -> None:
    held = np.zeros(10, np.uint16)
    for frame in (data, _sealed(b"MRDP\0\0\0\0" + data), _sealed(_FRAMES["sparse"][0][:40] + data)):
        with pytest.raises(CorruptObjectError):
            decode_piece(frame, held)


@pytest.mark.parametrize("kind", sorted(_FRAMES))
@pytest.mark.parametrize("claim", [0, 1, 2999, 3001, 2**31, 2**40, _U64_MAX])
def test_hostile_numbers_take_no_memory(kind: str, claim: int) -> None:
    frame, base, new = _FRAMES[kind]
    header_numbers = range(16, 48, 8)  # start, count, changed, exceptions
    table = range(80, 80 + 16 * len(read_frame(frame)[1]), 8)
    tracemalloc.start()
    try:
        for offset in (*header_numbers, *table):
            damaged = bytearray(frame)
            struct.pack_into("<Q", damaged, offset, claim)
            _right_or_refused(_sealed(damaged), base, new)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("declared", [True, False])
def test_a_compression_bomb_is_not_expanded(declared: bool) -> None:
    frame, base, _ = _FRAMES["sparse"]
    header, sections = read_frame(frame)
    bomb = zstandard.ZstdCompressor(write_content_size=declared).compress(bytes(200_000_000))
    tracemalloc.start()
    try:
        for number, section in enumerate(sections):
            hostile = [*sections]
            hostile[number] = FrameSection(raw_bytes=section.raw_bytes, stored=bomb, compressed=True)
            with pytest.raises(CorruptObjectError, match="from 0 to"):
                decode_piece(pack_frame(header, hostile), base)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", 9, "kind 9"),
        ("width", 3, "width 3"),
        ("gap_width", 3, "gap width 3"),
        ("gap_width", 0, "gap width 0"),
        ("gap_width", 2, "has 5 sections"),
        ("num_changed", 3001, "3001 changes of 3000 elements"),
        ("num_changed", 7, "are not possible"),
        ("num_exceptions", 0, "exceptions"),
        ("digest", 1, "decodes to digest"),
    ],
)
def test_each_contradiction_is_named(field: str, value: int, message: str) -> None:
    frame, base, _ = _FRAMES["sparse"]
    header, sections = read_frame(frame)
    values = {name: getattr(header, name) for name in PieceHeader.__dataclass_fields__}
    with pytest.raises(CorruptObjectError, match=message) as caught:
        decode_piece(pack_frame(PieceHeader(**values | {field: value}), sections), base)
    assert caught.value.reason == "DELTA_CORRUPT" and "anchor" in str(caught.value)


_PINNED = (
    "4d5244506637663b0201020105000000020000000000000040000000000000000300000000000000"  # magic, checksum, header
    "0100000000000000839a7869fc87e2ab2ffa904a9d4d262b57260613159e3edaa0c2d439c99000c8"
    "03000000000000000300000000000000010000000000000001000000000000000100000000000000"  # table of five sections
    "01000000000000000100000000000000010000000000000001000000000000000100000000000000"
    "030d1680022840"  # gaps, signs, exceptions
)


def test_the_format_is_pinned() -> None:
    """A stored format: frames that were written once are read for ever."""
    base = np.arange(0x3F00, 0x3F40, dtype=np.uint16)
    new = base.copy()
    new[[3, 17, 40]] += np.array([1, 0xFFFF, 0x100], np.uint16)
    piece = encode_piece(base, new, start=2)
    assert piece is not None
    assert piece.data.hex() == _PINNED
    assert np.array_equal(base[:0], decode_piece(bytes.fromhex(_PINNED), new, start=2).bits)
    assert decode_piece(bytes.fromhex(_PINNED), base, start=2).bits.tolist() == [0x3F04, 0x3F10, 0x4028]
