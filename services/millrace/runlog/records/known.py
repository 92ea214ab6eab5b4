"""The small objects that headers name, such as epochs and policy manifests. The chain covers them so.

A header names what exists when it is written and no header before it has named. Such an object is created once and
never changes, so the chain hash shows whether one of them was changed or removed later.
"""

import hashlib
from collections.abc import Iterable

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.runlog import catalogue
from millrace.runlog.names import Names
from millrace.runlog.records.run_record import list_objects
from millrace.storage import ObjectStore


class KnownObjects:
    """What the headers of one run name so far. Of one writer."""

    def __init__(self, headers: Iterable[batch_pb2.BatchHeader] = ()) -> None:
        """Create the set; `headers` are the committed ones."""
        self._named: dict[str, bytes] = {}
        self._places: set[str] = set()
        for header in headers:
            self.note(header)

    def note(self, header: batch_pb2.BatchHeader) -> None:
        """Note that a header is committed, and with it every object that it names."""
        self._named.update((item.key, item.sha256) for item in header.objects)
        # The folder is enough: each upload has one of its own.
        self._places.update(chunk.key.rpartition("/")[0] for chunk in header.chunks)
        self._places.add(header.rollouts_key.rpartition("/")[0])

    def named(self, prefix: str) -> dict[str, bytes]:
        """Return the objects that headers name under a prefix: sha256 by key, both without the run's prefix."""
        return {key: sha256 for key, sha256 in self._named.items() if key.startswith(prefix)}

    def holds(self, key: str) -> bool:
        """Return whether a whole object key is in a folder in which a header has its chunks or its archive."""
        return key.rpartition("/")[0] in self._places

    def fill(self, store: ObjectStore, names: Names, header: batch_pb2.BatchHeader) -> None:
        """Add to a header the stored objects that it has to name and no earlier one names (blocking).

        What it names stays.
        """
        found = {item.key: item for item in (*header.objects, *self.find_new(store, names))}
        del header.objects[:]
        header.objects.extend(found[key] for key in sorted(found))

    def find_new(self, store: ObjectStore, names: Names) -> list[batch_pb2.ObjectRef]:
        """Return references to the stored objects that the next header has to name, with their hashes (blocking).

        They are of the kinds that headers name, and no header so far names them.
        """
        found: list[batch_pb2.ObjectRef] = []
        for key in self._new(store, names):
            try:
                found.append(describe(names, key, store.get(names.root + key)))
            except NotFoundError:  # a run that is being deleted
                continue
        return found

    def _new(self, store: ObjectStore, names: Names) -> list[str]:
        kinds = [kind for kind in catalogue.KINDS if catalogue.HEADER in kind.named_by]
        keys = [key for kind in kinds for key in list_objects(store, names, kind, after=self._last(kind))]
        return [key for key in keys if key not in self._named]

    def _last(self, kind: catalogue.ObjectKind) -> str:
        """Return the highest key of a kind that is named, after which new ones sort; empty if they sort anywhere."""
        return max((key for key in self._named if key.startswith(kind.folder)), default="") if kind.is_ordered else ""


def describe(names: Names, key: str, data: bytes) -> batch_pb2.ObjectRef:
    """Return the reference to the object whose key, without the run's prefix, is `key`."""
    ref = batch_pb2.ObjectRef(key=key, sha256=hashlib.sha256(data).digest())
    if (names.root + key).startswith(names.policies):
        ref.digest = manifest_digest(data)
    return ref


def manifest_digest(data: bytes) -> str:
    """Return the digest of the weights that a policy's manifest names; empty if it is damaged, which ends no run."""
    try:
        digest = decode_object(data, what="policy manifest", reason="POLICY_CORRUPT").get("digest")
    except CorruptObjectError:
        return ""
    return digest if isinstance(digest, str) else ""
