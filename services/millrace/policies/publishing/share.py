"""One rank's share of the versions of a lineage: digested, encoded, uploaded.

That is all the work of publishing which takes long, and none of what the ranks have to agree on.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.errors import InternalError
from millrace.policies.publishing.history import Delta, Digests, History
from millrace.policies.publishing.parts import TensorPart, pack_encodings
from millrace.policies.publishing.upload import upload_delta, upload_full
from millrace.storage.base import ObjectStore
from millrace.telemetry import faults
from millrace.telemetry.faults import Point


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedDelta:
    """What there is to upload against version `base`."""

    base: int
    num_changed: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedShare:
    """The digests of a version's parts and, where the version before is held, the deltas that are due."""

    digests: Digests
    deltas: tuple[EncodedDelta, ...]


class ShareWriter(Protocol):
    """Does the work of one rank, for one thread at a time. `parts` are not written to while they are used or held."""

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """The digests of parts."""
        ...

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """Digest a version, and encode its deltas for `upload`, the one against the version before first."""
        ...

    def upload(
        self, prefix: str, parts: Sequence[TensorPart], version: int, *, is_anchor: bool, bases: Collection[int]
    ) -> dict[str, Any]:
        """Upload parts in full if it is an anchor, and the deltas against `bases`; what `merge_encodings` takes."""
        ...

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """Take note that a version is committed. `parts` are held from now on; those before are released."""
        ...

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """Whether these very parts are held."""
        ...

    def close(self) -> None:
        """Give up what it has. Idempotent."""
        ...


class LocalShareWriter:
    """Does it in the process and on the thread that asks."""

    def __init__(self, store: ObjectStore, *, skip_deltas: Sequence[int], threads: int) -> None:
        self._store = store
        self._history = History(skip_deltas=skip_deltas, threads=threads)
        self._deltas: list[Delta] = []

    def digests(self, parts: Sequence[TensorPart], version: int) -> Digests:
        """See `ShareWriter`."""
        return self._history.digests(parts, version)

    def encode(self, parts: Sequence[TensorPart], version: int) -> EncodedShare:
        """See `ShareWriter`."""
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
        """See `ShareWriter`."""
        wanted, self._deltas = [delta for delta in self._deltas if delta.base in bases], []
        if len(wanted) != len(bases):  # ranks put their encodings together by their order
            raise InternalError(f"version {version} is not encoded against all of {sorted(bases)}")
        encodings = [upload_full(self._store, prefix, parts)] if is_anchor else []
        encodings += [
            upload_delta(self._store, prefix, delta.frames, against=delta.base, against_digest=delta.base_digest)
            for delta in wanted
        ]
        faults.reach(Point.TRAINER_MID_UPLOAD, version=version)
        return pack_encodings(encodings)

    def advance(self, parts: Sequence[TensorPart], version: int, *, digest: str, digests: Digests) -> None:
        """See `ShareWriter`."""
        self._history.advance(parts, version=version, digest=digest, digests=digests)

    def holds(self, parts: Sequence[TensorPart]) -> bool:
        """See `ShareWriter`."""
        return self._history.holds(parts)

    def close(self) -> None:
        """See `ShareWriter`: there is nothing but memory."""
