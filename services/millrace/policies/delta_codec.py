"""The lossless delta codec: what changed in one piece (a contiguous element range, such as a rank's shard) of a tensor.

A bf16 weight changes in a step only where the fp32 master crosses a rounding boundary: about 1 % of the elements at RL
learning rates, nearly all by one unit in the last place. Three kinds of frames hold that:

* `sparse`: gaps between changed positions, one sign bit for each step of one unit in the last place, absolute values
  for the other changes (the exceptions).
* `dense`: the difference of every element in units of the last place, zigzag-folded, by byte planes.
* `plain`: the new values by byte planes; needs no base.

Every stream is compressed with zstd level 1. Decoded changes are absolute values, and a frame carries the digests of
base and result: it applies to its base only, decodes to an empty change on its own result, and what it decodes to is
proved against the result's digest. Work goes block by block, so that scratch memory stays small beside the piece. numpy
and zstd release the GIL: encode and decode pieces in as many threads as there are cores.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import ConflictError, InvalidStateError
from millrace.policies.delta_frame import (
    DENSE,
    KIND_NAMES,
    PLAIN,
    SPARSE,
    Bits,
    FrameSection,
    PieceHeader,
    SparseEncoder,
    corrupt,
    decode_dense,
    decode_plain,
    decode_sparse,
    differing,
    encode_dense,
    encode_plain,
    pack_frame,
    read_frame,
)
from millrace.policies.digest import bits_digest, change_digest, digest_hex
from millrace.policies.tensors import TensorChange

# Compared at a time: small beside a piece, large beside the cost of a call.
BLOCK_ELEMENTS = 1 << 18
# Encoded at a time, at least, but for the last: smaller batches pay for calls, not for work.
BATCH_CHANGES = 1 << 14
_SAMPLE_SLICES, _SAMPLE_ELEMENTS = 32, 2048
# Changed share above which absolute exceptions cost more than differences of everything.
_DENSE_ABOVE = 0.28
# Changed share below which two-byte gaps are smaller than one-byte gaps with escapes.
_WIDE_GAPS_BELOW = 0.004
# Of the raw bytes: a dense frame larger than that may lose against the plain one.
_PLAIN_ABOVE = 0.85


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPiece:
    """One frame (`data`) and what it says: `num_changed` of `count` elements from row-major index `start` on."""

    data: bytes
    kind: str
    start: int
    count: int
    num_changed: int
    base_digest: int
    digest: int


def encode_piece(base: Bits, new: Bits, *, start: int = 0, base_digest: int | None = None) -> EncodedPiece | None:
    """Encode the change from `base` to `new`; None if nothing changed.

    Both are flat arrays of a tensor's element bits (u1, u2, u4 or u8), of which the first has row-major index `start`.
    `base_digest` is `bits_digest(base, start=start)`; give it where it is known, it costs more than all the rest.
    Raises InvalidStateError if the arrays differ in dtype or size.
    """
    if base.dtype != new.dtype or base.shape != new.shape or base.ndim != 1:
        raise InvalidStateError(
            f"cannot encode the change from {base.dtype}{list(base.shape)} to {new.dtype}{list(new.shape)}",
            reason="DELTA_SHAPE_MISMATCH",
            remedy="only flat arrays of one dtype and size have a delta; publish a full copy instead",
        )
    share = _changed_share(base, new)
    # The share is an estimate from a sample of elements: 0 says only that no change was met.
    if share == 0.0 and np.array_equal(base, new):
        return None
    if base_digest is None:
        base_digest = bits_digest(base, start=start)
    if share <= _DENSE_ABOVE:
        return _encode_sparse(base, new, start, base_digest, gap_width=2 if share < _WIDE_GAPS_BELOW else 1)
    changed, sections = encode_dense(base, new)
    kind = DENSE
    # Where nearly everything changed, the difference may compress worse than the new values.
    if sum(len(section.stored) for section in sections) > _PLAIN_ABOVE * new.nbytes:
        plain = encode_plain(new)
        if sum(len(section.stored) for section in plain) < sum(len(section.stored) for section in sections):
            kind, sections = PLAIN, plain
    header = PieceHeader(
        kind=kind,
        width=new.dtype.itemsize,
        gap_width=0,
        start=start,
        count=new.size,
        num_changed=changed,
        num_exceptions=0,
        base_digest=base_digest,
        digest=bits_digest(new, start=start),
    )
    return _encoded(header, sections)


def decode_piece(
    frame: bytes | memoryview, current: Bits, *, start: int = 0, current_digest: int | None = None
) -> TensorChange:
    """Return the change that a frame makes in the piece `current`, after verifying it; write nothing to `current`.

    `current` are flat bits whose first element has row-major index `start`. Positions of the change count in the whole
    tensor. It is empty if `current` is the result already. `current_digest` is `bits_digest(current, start=start)`;
    give it if it is known. Raises CorruptObjectError for a frame that is damaged or belongs to another piece, and
    ConflictError for one whose base is not `current`. Memory is bounded by the size of `current`, whatever the frame
    claims.
    """
    header, sections = read_frame(frame)
    if (header.count, header.width, header.start) != (current.size, current.dtype.itemsize, start):
        raise corrupt(
            f"it holds {header.count} elements of {header.width} bytes from {header.start} on, and the piece has "
            f"{current.size} of {current.dtype.itemsize} bytes from {start} on"
        )
    # A plain frame needs no base, so what the piece holds now does not matter.
    if header.kind == PLAIN:
        return _proved_whole(header, decode_plain(header, sections))
    # Three cases: the piece is the result already, it is the base, or it is another version.
    if current_digest is None:
        current_digest = bits_digest(current, start=start)
    if current_digest == header.digest:
        return TensorChange(bits=current[:0].copy(), positions=np.empty(0, np.int64))
    if current_digest != header.base_digest:
        raise ConflictError(
            f"a policy delta needs base {digest_hex(header.base_digest)}, and the held piece is "
            f"{digest_hex(current_digest)}",
            reason="POLICY_BASE_MISMATCH",
            remedy="apply the deltas in order, or reload the policy from its anchor",
            metadata={"needed": digest_hex(header.base_digest), "held": digest_hex(current_digest)},
        )
    if header.kind == DENSE:
        return _proved_whole(header, decode_dense(header, sections, current))
    # The digest is continued over the changed elements alone: O(changed), and not O(piece).
    positions, old, new = decode_sparse(header, sections, current)
    positions += start
    change = TensorChange(bits=new, positions=positions)
    _check_result(header, change_digest(current_digest, change, old))
    return change


def _changed_share(base: Bits, new: Bits) -> float:
    """Return the share of changed elements, 0 to 1: exact for a small piece, else of slices spread over it."""
    if base.size <= _SAMPLE_SLICES * _SAMPLE_ELEMENTS:
        return np.count_nonzero(base != new) / max(1, base.size)
    # Contiguous slices and not single elements: comparing a slice is one vectorised pass.
    step = base.size // _SAMPLE_SLICES
    changed = sum(
        int(np.count_nonzero(base[at : at + _SAMPLE_ELEMENTS] != new[at : at + _SAMPLE_ELEMENTS]))
        for at in range(0, step * _SAMPLE_SLICES, step)
    )
    return changed / (_SAMPLE_SLICES * _SAMPLE_ELEMENTS)


def _encode_sparse(base: Bits, new: Bits, start: int, base_digest: int, *, gap_width: int) -> EncodedPiece:
    """Encode a change as gaps between changed positions, each of `gap_width` bytes, and the new bits' steps there.

    `base` and `new` are flat bits, at least one of which differs. `start` is the first element's row-major index in the
    tensor, and `base_digest` the digest of `base`.
    """
    # The encoder continues the digest from the base's to the result's, so the new piece is not digested as a whole.
    encoder = SparseEncoder(gap_width=gap_width, start=start, digest=base_digest)
    for positions in _changed_positions(base, new):
        encoder.add(positions, base[positions], new[positions])
    sections = encoder.sections()
    header = PieceHeader(
        kind=SPARSE,
        width=new.dtype.itemsize,
        gap_width=gap_width,
        start=start,
        count=new.size,
        num_changed=encoder.num_changed,
        num_exceptions=encoder.num_exceptions,
        base_digest=base_digest,
        digest=encoder.digest,
    )
    return _encoded(header, sections)


def _changed_positions(base: Bits, new: Bits) -> Iterator[NDArray[np.int64]]:
    """Yield the indices at which the arrays differ, ascending, in batches worth numpy's calls."""
    batch: list[NDArray[np.int64]] = []
    size = 0
    for begin in range(0, new.size, BLOCK_ELEMENTS):
        inside = differing(base[begin : begin + BLOCK_ELEMENTS], new[begin : begin + BLOCK_ELEMENTS])
        inside += begin
        batch.append(inside)
        size += inside.size
        if size >= BATCH_CHANGES:
            yield np.concatenate(batch)
            batch, size = [], 0
    if size:
        yield np.concatenate(batch)


def _encoded(header: PieceHeader, sections: list[FrameSection]) -> EncodedPiece:
    """Return a frame with what its header says."""
    return EncodedPiece(
        data=pack_frame(header, sections),
        kind=KIND_NAMES[header.kind],
        start=header.start,
        count=header.count,
        num_changed=header.num_changed,
        base_digest=header.base_digest,
        digest=header.digest,
    )


def _proved_whole(header: PieceHeader, bits: Bits) -> TensorChange:
    """Return decoded bits as a change of the whole piece.

    Raises CorruptObjectError unless they have the frame's digest.
    """
    _check_result(header, bits_digest(bits, start=header.start))
    return TensorChange(bits=bits, start=header.start)


def _check_result(header: PieceHeader, digest: int) -> None:
    """Raise CorruptObjectError unless `digest`, that of the decoded piece, is the one in the frame's header."""
    if digest != header.digest:
        raise corrupt(f"it decodes to digest {digest_hex(digest)}, and was written as {digest_hex(header.digest)}")
