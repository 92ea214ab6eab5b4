"""The delta codec: every change of any bits comes back exactly, applies to its base only, and twice is once."""

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ConflictError, CorruptObjectError, InvalidStateError
from millrace.policies import delta_codec as delta_module
from millrace.policies import delta_frame as kinds
from millrace.policies.delta_codec import EncodedPiece, decode_piece, encode_piece
from millrace.policies.delta_frame import Bits, decode_gaps, encode_gaps, ulp_map, unzigzag, zigzag
from millrace.policies.digest import bits_digest
from millrace.policies.tensors import TensorChange

_WIDTHS = (1, 2, 4, 8)
# bf16: zeros, the smallest and largest of each sign, infinities, quiet and signalling NaNs, and ordinary numbers.
_SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x3F80, 0xBCA3]


@pytest.fixture(params=[7, None], ids=["blocks of 7", "real blocks"])
def blocks(request: pytest.FixtureRequest) -> Iterator[None]:
    """With blocks of seven elements every test crosses block boundaries."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param is not None:
            patch.setattr(delta_module, "BLOCK_ELEMENTS", request.param)
            patch.setattr(delta_module, "BATCH_CHANGES", 5)
            patch.setattr(kinds, "BLOCK_ELEMENTS", request.param)
        yield


@st.composite
def changes(draw: st.DrawFn) -> tuple[Bits, Bits]:
    """Return a base and a new version: any width and bits; a few, many or all changed, by one ulp or to anything."""
    width = draw(st.sampled_from(_WIDTHS))
    size = draw(st.sampled_from([0, 1, 2, 3, 50, 300, 2000]) | st.integers(0, 100))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, size * width, dtype=np.uint8).view(f"<u{width}")
    if width == 2 and draw(st.booleans()):
        base = rng.choice(np.array(_SPECIAL, np.uint16), size)
    share = draw(st.sampled_from([0.0, 0.002, 0.02, 0.2, 0.5, 1.0]))
    chosen = rng.random(size) < share
    stepped = ulp_map(ulp_map(base) + rng.choice(np.array([1, -1]), size).astype(base.dtype))
    anything = rng.integers(0, 256, size * width, dtype=np.uint8).view(f"<u{width}")
    single = rng.random(size) < draw(st.sampled_from([0.0, 0.9, 1.0]))
    return base, np.where(chosen, np.where(single, stepped, anything), base)


def _applied(change: TensorChange, held: Bits, *, start: int = 0) -> Bits:
    """Return a copy of the piece `held` with the change applied to the tensor around it."""
    tensor = np.concatenate([np.zeros(start, held.dtype), held])
    change.apply(tensor)
    assert not tensor[:start].any()
    return tensor[start:]


def _encode(base: Bits, new: Bits, *, start: int = 0) -> EncodedPiece:
    piece = encode_piece(base, new, start=start)
    assert piece is not None
    return piece


def _bf16(size: int, share: float, *, seed: int = 0) -> tuple[Bits, Bits]:
    """Return weights, and a version after which about `share` of them moved, nine of ten by one unit in the last
    place.
    """
    rng = np.random.default_rng(seed)
    base = (rng.standard_normal(size).astype(np.float32) * np.float32(0.03)).view(np.uint32) >> 16
    base = base.astype(np.uint16)
    step = rng.choice(np.array([1, 2, -1, -2]), size, p=[0.45, 0.05, 0.45, 0.05]).astype(np.uint16)
    return base, np.where(rng.random(size) < share, ulp_map(ulp_map(base) + step), base)


@pytest.mark.usefixtures("blocks")
@settings(max_examples=100, deadline=None)
@given(versions=changes(), start=st.sampled_from([0, 1, 1000]))
def test_any_change_comes_back_exactly_and_only_once(versions: tuple[Bits, Bits], start: int) -> None:
    base, new = versions
    piece = encode_piece(base, new, start=start)
    if piece is None:
        assert np.array_equal(base, new)
        return
    assert piece.num_changed == np.count_nonzero(base != new) > 0
    assert (piece.base_digest, piece.digest) == (bits_digest(base, start=start), bits_digest(new, start=start))
    change = decode_piece(piece.data, base, start=start)
    assert np.array_equal(_applied(change, base, start=start), new)
    assert np.array_equal(_applied(change, new, start=start), new)
    again = decode_piece(piece.data, new, start=start)
    assert np.array_equal(_applied(again, new, start=start), new)
    if piece.kind != "plain":
        assert again.num_elements == 0
        stranger = base.copy()
        stranger[-1] ^= 1
        if not np.array_equal(stranger, new):
            with pytest.raises(ConflictError) as caught:
                decode_piece(piece.data, stranger, start=start)
            assert caught.value.reason == "POLICY_BASE_MISMATCH"


def test_each_kind_is_chosen_where_it_is_smallest() -> None:
    kinds = {share: _encode(*_bf16(50_000, share)) for share in (0.0005, 0.009, 0.2, 0.6)}
    assert [piece.kind for piece in kinds.values()] == ["sparse", "sparse", "sparse", "dense"]
    rng = np.random.default_rng(1)
    random = [rng.integers(0, 2**16, 50_000).astype(np.uint16) for _ in range(2)]
    assert _encode(np.zeros(50_000, np.uint16), random[0]).kind in ("dense", "plain")
    repeated = np.full(50_000, 0x3F80, np.uint16)
    assert _encode(random[0], repeated).kind == "plain", "what is new is simple, what was before is not"
    for piece in kinds.values():
        assert len(piece.data) < 1.7 * piece.num_changed + 400


def test_a_master_in_fp32_is_smaller_as_differences() -> None:
    rng = np.random.default_rng(2)
    base = rng.standard_normal(50_000).astype(np.float32) * np.float32(0.03)
    new = (base + np.float32(1e-6) * rng.standard_normal(50_000).astype(np.float32)).view(np.uint32)
    piece = _encode(base.view(np.uint32), new)
    assert piece.kind == "dense" and len(piece.data) < 0.6 * new.nbytes
    assert np.array_equal(_applied(decode_piece(piece.data, base.view(np.uint32)), base.view(np.uint32)), new)


def test_a_long_gap_costs_little_and_positions_count_from_the_tensor() -> None:
    base = np.zeros(3_000_000, np.uint16)
    new = base.copy()
    new[[0, 1, 2_999_999]] = 1, 0x8000, 0x7FC0
    piece = _encode(base, new, start=5)
    assert (piece.kind, piece.num_changed) == ("sparse", 3) and len(piece.data) < 400
    change = decode_piece(piece.data, base, start=5)
    assert change.positions is not None and change.positions.tolist() == [5, 6, 3_000_004]
    assert change.bits.tolist() == [1, 0x8000, 0x7FC0]


def test_zeros_of_both_signs_and_nans_are_told_apart() -> None:
    values = np.array(_SPECIAL, np.uint16)
    base, new = np.array(list(itertools.product(values, values)), np.uint16).T.copy()
    assert np.array_equal(_applied(decode_piece(_encode(base, new).data, base), base), new)


def test_versions_chain_and_skip() -> None:
    versions = [_bf16(4000, 0.0)[0]]
    for seed in range(1, 6):
        step = _bf16(4000, 0.02, seed=seed)
        versions.append(ulp_map(ulp_map(versions[-1]) + (ulp_map(step[1]) - ulp_map(step[0]))))
    held = versions[0]
    for new in versions[1:]:
        held = _applied(decode_piece(_encode(*versions_before(versions, new)).data, held), held)
    assert np.array_equal(held, versions[-1])
    skip = _encode(versions[0], versions[-1])
    assert np.array_equal(_applied(decode_piece(skip.data, versions[0]), versions[0]), held)
    with pytest.raises(ConflictError, match="apply the deltas in order"):
        decode_piece(_encode(versions[2], versions[3]).data, versions[1])


def versions_before(versions: list[Bits], new: Bits) -> tuple[Bits, Bits]:
    number = next(index for index, version in enumerate(versions) if version is new)
    return versions[number - 1], new


def test_a_known_digest_is_believed_and_a_wrong_one_never_gives_wrong_bits() -> None:
    base, new = _bf16(1000, 0.05)
    piece = _encode(base, new)
    change = decode_piece(piece.data, base, current_digest=piece.base_digest)
    assert np.array_equal(_applied(change, base), new)
    changed = int(np.flatnonzero(base != new)[0])
    stranger = base.copy()
    stranger[changed] ^= 0x40
    with pytest.raises(CorruptObjectError, match="decodes to digest"):
        decode_piece(piece.data, stranger, current_digest=piece.base_digest)


def test_what_has_no_delta_is_refused() -> None:
    base, new = _bf16(10, 0.5)
    for other in (new[:9], new.astype(np.uint32), new.reshape(2, 5)):
        with pytest.raises(InvalidStateError, match="cannot encode the change"):
            encode_piece(base, other)
    frame = _encode(base, new).data
    for held, start in ((base[:9], 0), (base.astype(np.uint32), 0), (base, 1)):
        with pytest.raises(CorruptObjectError, match="and the piece has"):
            decode_piece(frame, held, start=start)


def test_a_change_outside_its_tensor_is_refused_before_anything_is_written() -> None:
    held = np.zeros(4, np.uint16)
    one = np.ones(2, np.uint16)
    for change in (
        TensorChange(bits=one, start=3),
        TensorChange(bits=one, start=-1),
        TensorChange(bits=one, positions=np.array([1, 4])),
        TensorChange(bits=one, positions=np.array([-1, 2])),
        TensorChange(bits=one, positions=np.array([1])),
        TensorChange(bits=one.astype(np.uint32), start=0),
    ):
        with pytest.raises(CorruptObjectError, match="does not fit its tensor"):
            change.apply(held)
        assert not held.any()


@given(width=st.sampled_from(_WIDTHS), data=st.binary(max_size=64))
def test_maps_are_bijective_and_neighbours_are_neighbours(width: int, data: bytes) -> None:
    bits = np.frombuffer(data[: len(data) // width * width], f"<u{width}")
    assert np.array_equal(ulp_map(ulp_map(bits)), bits)
    assert np.array_equal(unzigzag(zigzag(bits)), bits)


def test_ulp_map_is_in_order_of_value_over_all_of_bf16() -> None:
    bits = np.arange(2**16, dtype=np.uint16)
    order = ulp_map(bits).view(np.int16)
    assert np.unique(order).size == 2**16
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(values)
    by_order = values[finite][np.argsort(order[finite])]
    assert (np.diff(by_order) >= 0).all()


@given(
    width=st.sampled_from([1, 2]), gaps=st.lists(st.sampled_from([1, 2, 254, 255, 256, 511, 65536]) | st.integers(1, 9))
)
def test_gaps_of_any_length(width: int, gaps: list[int]) -> None:
    positions = np.cumsum(gaps, dtype=np.int64) - 1
    units = encode_gaps(positions, previous=-1, width=width)
    limit = int(positions[-1]) + 1 if gaps else 0
    assert np.array_equal(decode_gaps(units, num_positions=len(gaps), limit=limit, what="gaps"), positions)
    if gaps:
        with pytest.raises(CorruptObjectError, match="reach element"):
            decode_gaps(units, num_positions=len(gaps), limit=limit - 1, what="gaps")
    with pytest.raises(CorruptObjectError, match="do not name"):
        decode_gaps(units, num_positions=len(gaps) + 1, limit=limit + 1, what="gaps")
