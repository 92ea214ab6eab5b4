"""One rank's share of the versions of a lineage: digested, encoded, uploaded.

That is all the work of publishing which takes long, and none of what the ranks have to agree on.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from millrace.errors import InternalError
from millrace.policies.delta_codec import encode_piece
from millrace.policies.digest import bits_digest, change_digest
from millrace.policies.publish import Frame, TensorPart, pack_encodings, upload_delta, upload_full
from millrace.policies.tensors import TensorChange
from millrace.storage.base import ObjectStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """What there is to upload against version `base`."""

    base: int
    num_changed: int
    size_bytes: int


# What a publisher remembers of the versions that are committed, to publish the next one as deltas. No torch.
#
# A version is published against the one before it, and at every fourth and sixteenth version also against the one
# four and sixteen before: a reader that lacks n versions reads O(log n) deltas. An anchor, the full copy, comes
# every `anchor_interval` versions, at the start of a lineage, and where deltas would not be smaller.
#
# Memory on each rank, per parameter of its shard: one copy of the last committed version (2 bytes at bf16, 4 at
# float32) and what `Rewind` keeps for each skip: about 0.25 and 1 byte at 1 % of changes per step, at most a copy
# each.

T = TypeVar("T")
Bits = NDArray[np.unsignedinteger]

_DENSE = 0.5  # share of changes from which a digest is cheaper made anew

# Parts of up to 2**32 elements; larger ones keep wider positions.
_POSITION = np.dtype("<u4")

Digests = dict[str, int]
"""Of this rank's parts, by tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """This rank's part of a delta against version `base`, whose policy digest is `base_digest`."""

    base: int
    base_digest: str
    frames: tuple[Frame, ...]
    num_changed: int

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of all frames."""
        return sum(len(frame.data) for frame in self.frames)


class Rewind:
    """One part as it was when this was made, from what it is now and what was noted between.

    Memory: 4 bytes and one element for every change noted, 6 bytes at bf16: at 1 % of changes per step and 16 steps
    about 1 byte per parameter. It is never more than one copy of the part: from there on it is that copy.
    """

    def __init__(self) -> None:
        self._steps: list[tuple[NDArray[np.unsignedinteger], Bits]] = []
        self._whole: Bits | None = None
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Return the number of bytes of memory that is held to restore the part."""
        return self._size_bytes

    def note(self, old: Bits, positions: NDArray[np.int64]) -> None:
        """Record the bits at `positions` of the part before they change; `old` are the part's flat bits before the
        change.
        """
        if self._whole is not None or not positions.size:
            return
        held = positions.astype(_POSITION) if old.size <= np.iinfo(_POSITION).max else positions.astype("<u8")
        size_bytes = held.nbytes + positions.size * old.itemsize
        # From here on a whole copy takes less memory than the list of changes.
        if self._size_bytes + size_bytes > old.nbytes:
            self._whole = self.bits(old).copy()
            self._steps, self._size_bytes = [], old.nbytes
            return
        self._steps.append((held, old[positions]))
        self._size_bytes += size_bytes

    def bits(self, now: Bits) -> Bits:
        """Return the flat bits that the part had when this object was made; `now` are the flat bits that the part has
        now.

        `now` itself is returned if no change was recorded. Do not write to the result.
        """
        if self._whole is not None:
            return self._whole
        if not self._steps:
            return now
        # Backwards: of an element that changed several times the oldest bits are written last.
        then = now.copy()
        for positions, bits in reversed(self._steps):
            then[positions] = bits
        return then


@dataclass(slots=True, kw_only=True)
class _Committed:
    """A committed version as this rank holds it."""

    version: int
    digest: str
    digests: Digests


@dataclass(slots=True, kw_only=True)
class _SkipBase(_Committed):
    rewinds: dict[str, Rewind]


class History:
    """The committed versions of one lineage, as one rank needs them. Used by one thread at a time."""

    def __init__(self, *, skip_deltas: Sequence[int], threads: int) -> None:
        """Begin without versions. `skip_deltas` are how many versions a skip delta goes over (4, 16).

        `threads` encode parts.
        """
        self._skip_deltas = tuple(skip_deltas)
        self._threads = threads
        self._last: _Committed | None = None
        self._parts: dict[str, TensorPart] = {}
        self._skips: dict[int, _SkipBase] = {}

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """Return whether these very objects are the parts of the last version, which must not be written to."""
        return bool(parts) and self._parts.get(parts[0].name) is parts[0]

    def fits(self, parts: Sequence[TensorPart], version: int) -> bool:
        """Return whether these parts can be published as a delta: the version before is held, in the same shape."""
        return (
            self._last is not None
            and self._last.version == version - 1
            and [(p.name, p.dtype, p.shape, p.start, p.count) for p in parts]
            == [(p.name, p.dtype, p.shape, p.start, p.count) for p in self._parts.values()]
        )

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """Return the digests of the parts of version `version`, by the tensor's name.

        Where the version before is held, they follow from its digests in O(changed), after one comparison of all bits.
        """
        known = self._last.digests if self._last is not None and self.fits(parts, version) else None

        def digest(part: TensorPart) -> int:
            if known is None:
                return bits_digest(part.bits, start=part.start)
            return _digest_after(self._parts[part.name].bits, part, known[part.name])

        return dict(zip((part.name for part in parts), self._map(digest, parts), strict=True))

    def encode(self, parts: Sequence[TensorPart]) -> tuple[Delta, Digests]:
        """Return the delta of parts against the last committed version, and the parts' digests by tensor.

        The parts must fit the last version (`fits`).
        """
        assert self._last is not None
        return self._encode(self._last, parts, lambda part: self._parts[part.name].bits)

    def encode_skips(self, parts: Sequence[TensorPart], version: int) -> list[Delta]:
        """Return the skip deltas that are due at version `version`, that over the fewest versions first; often none.

        A skip delta over n versions is due n versions after its base, which is a multiple of n. `parts` are those of
        the new version.
        """
        found: list[Delta] = []
        for skip, base in sorted(self._skips.items()):
            if base.version != version - skip:
                continue

            def bits_then(part: TensorPart, rewinds: dict[str, Rewind] = base.rewinds) -> Bits:
                return rewinds[part.name].bits(self._parts[part.name].bits)

            found.append(self._encode(base, parts, bits_then)[0])
        return found

    def advance(self, parts: Sequence[TensorPart], *, version: int, digest: str, digests: Digests) -> None:
        """Record that a version is committed. `parts` are held from now on; those of the version before are released.

        `digest` is the version's, and `digests` are those of this rank's parts.
        """
        # A skip base is restored from the parts of the last version; after another layout, or a gap, nothing leads
        # back.
        if not self.fits(parts, version):
            self._skips = {}
        # A skip base is dropped once its delta was due; the next multiple replaces it.
        kept = {skip: base for skip, base in self._skips.items() if version < base.version + skip}
        if kept:
            self._map(lambda part: self._note(part, kept), parts)
        self._last = _Committed(version=version, digest=digest, digests=digests)
        self._parts = {part.name: part for part in parts}
        self._skips = kept
        for skip in self._skip_deltas:
            if version % skip == 0:
                rewinds = {part.name: Rewind() for part in parts}
                self._skips[skip] = _SkipBase(version=version, digest=digest, digests=digests, rewinds=rewinds)

    def _note(self, part: TensorPart, skips: dict[int, _SkipBase]) -> None:
        """Record in each skip base what changes in a part, before the new version replaces the last one."""
        old = self._parts[part.name].bits
        positions = np.flatnonzero(old != part.bits)
        for base in skips.values():
            base.rewinds[part.name].note(old, positions)

    def _encode(
        self,
        base: _Committed,
        parts: Sequence[TensorPart],
        bits_of: Callable[[TensorPart], Bits],
    ) -> tuple[Delta, Digests]:
        """Return the delta of parts against the version `base`, and the parts' digests by tensor.

        `bits_of` returns the flat bits that a part had in `base`. Parts without a change have no frame.
        """

        def encode(part: TensorPart) -> tuple[Frame | None, int, int]:
            """Return the frame of a part, None if nothing changed, its digest, and the number of changed elements."""
            old_digest = base.digests[part.name]
            piece = encode_piece(bits_of(part), part.bits, start=part.start, base_digest=old_digest)
            if piece is None:
                return None, old_digest, 0
            frame = Frame(tensor=part.name, start=part.start, count=part.count, data=piece.data)
            return frame, piece.digest, piece.num_changed

        found = self._map(encode, parts)
        delta = Delta(
            base=base.version,
            base_digest=base.digest,
            frames=tuple(frame for frame, _, _ in found if frame is not None),
            num_changed=sum(changed for _, _, changed in found),
        )
        return delta, {part.name: digest for part, (_, digest, _) in zip(parts, found, strict=True)}

    def _map(self, function: Callable[[TensorPart], T], parts: Iterable[TensorPart]) -> list[T]:
        """Return the results of `function` for all parts in order, computed in several threads."""
        with ThreadPoolExecutor(self._threads, thread_name_prefix="policy-encode") as pool:
            return list(pool.map(function, parts))


def _digest_after(old: Bits, part: TensorPart, digest: int) -> int:
    """Return the digest of a part, from `digest`, that of its bits before, `old`."""
    positions = np.flatnonzero(old != part.bits)
    if positions.size > _DENSE * part.count:
        return bits_digest(part.bits, start=part.start)
    change = TensorChange(bits=part.bits[positions], positions=positions + part.start)
    return change_digest(digest, change, old[positions])


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShare:
    """The digests of a version's parts and, where the version before is held, the deltas that are due."""

    digests: Digests
    deltas: tuple[EncodedDelta, ...]


class ShareWriter(Protocol):
    """Does the work of one rank, for one thread at a time. `parts` are not written to while they are used or held."""

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """Return the digests of this rank's parts of version `version`, by tensor."""
        ...

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """Encode this rank's parts of version `version` as deltas, kept for `upload`; return their digests and sizes.

        The delta against the version before comes first. There is none if that version is not held.
        """
        ...

    def upload(
        self, prefix: str, parts: Sequence[TensorPart], version: int, *, is_anchor: bool, bases: Collection[int]
    ) -> dict[str, Any]:
        """Upload this rank's parts of version `version` under keys that begin with `prefix`.

        They are uploaded in full if `is_anchor`, and as the deltas against the versions `bases`, which `encode` made.
        Returns this rank's share of each of these encodings as plain data, the full one first.
        """
        ...

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """Record that a version is committed. `parts` are held from now on; those of the version before are released.

        `digest` is the version's, and `digests` are those of this rank's parts.
        """
        ...

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """Return whether these very parts are held for comparison, so that they must not be written to."""
        ...

    def close(self) -> None:
        """Release everything that is held; nothing may be asked after it. Idempotent."""
        ...


class LocalShareWriter:
    """Does it in the process and on the thread that asks."""

    def __init__(self, store: ObjectStore, *, skip_deltas: Sequence[int], threads: int) -> None:
        """Write to `store`, on the calling thread and `threads` more.

        `skip_deltas` are how many versions a skip delta goes over.
        """
        self._store = store
        self._history = History(skip_deltas=skip_deltas, threads=threads)
        self._deltas: list[Delta] = []

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """Return the digests of this rank's parts of version `version`, by tensor."""
        return self._history.digests(parts, version)

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """Encode this rank's parts of version `version` as deltas, kept for `upload`; return their digests and sizes.

        The delta against the version before comes first, then the skip deltas that are due. There is none if the
        version before is not held.
        """
        if self._history.fits(parts, version):
            delta, digests = self._history.encode(parts)
            self._deltas = [delta, *self._history.encode_skips(parts, version)]
        else:
            digests, self._deltas = self._history.digests(parts, version), []
        deltas = (
            EncodedDelta(base=delta.base, num_changed=delta.num_changed, size_bytes=delta.size_bytes)
            for delta in self._deltas
        )
        return EncodedShare(digests=digests, deltas=tuple(deltas))

    def upload(
        self, prefix: str, parts: Sequence[TensorPart], version: int, *, is_anchor: bool, bases: Collection[int]
    ) -> dict[str, Any]:
        """Upload this rank's parts of version `version`, in full if `is_anchor`, and the deltas against `bases`.

        Keys begin with `prefix`. Returns this rank's share of each of these encodings as plain data, the full one
        first. Raises InternalError if `encode` made no delta against one of `bases`. The deltas of `encode` are
        released.
        """
        wanted, self._deltas = [delta for delta in self._deltas if delta.base in bases], []
        # All ranks must have the same encodings in the same order, by which they are joined.
        if len(wanted) != len(bases):
            raise InternalError(f"version {version} is not encoded against all of {sorted(bases)}")
        encodings = [upload_full(self._store, prefix, parts)] if is_anchor else []
        encodings += [
            upload_delta(self._store, prefix, delta.frames, against=delta.base, against_digest=delta.base_digest)
            for delta in wanted
        ]
        faults.reach(Point.TRAINER_MID_UPLOAD, version=version)
        return pack_encodings(encodings)

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """Record in memory that version `version` of the policy is committed.

        `parts`, this rank's tensors of it, are held from now on: the next version is encoded as its difference from
        them. Those of the version before are released. `digest` is the digest of the whole version, and `digests` are
        those of this rank's parts.
        """
        self._history.advance(parts, version=version, digest=digest, digests=digests)

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """Return whether these very parts are held for comparison, so that they must not be written to."""
        return self._history.holds(parts)

    def close(self) -> None:
        """Do nothing: there is only memory, which the garbage collector frees."""
