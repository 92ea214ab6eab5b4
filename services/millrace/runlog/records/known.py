"""The small objects that headers name, such as epochs and policy manifests. The chain covers them so.

A header names what exists when it is written and no header before it has named. Such an object is created once and
never changes, so the chain hash shows whether one of them was changed or removed later.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterator

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import closes_run
from millrace.runlog import catalogue
from millrace.runlog.catalogue import CHAIN_POINT, ObjectKind
from millrace.runlog.names import Names
from millrace.runlog.records import frontier
from millrace.runlog.records.frontier import ChainPoint, Closing, NamedObjects, chain_hash, load_point
from millrace.runlog.records.run_record import list_objects
from millrace.storage import ObjectStore
from millrace.telemetry import faults

logger = logging.getLogger(__name__)


class KnownObjects:
    """What the headers of one run have named so far, as far as the next header needs it. For one writer.

    Its size and the cost of a header do not grow with the run: it has the highest key of each series, and the
    objects that were named since the last chain point. Kinds that get one more object with each step are listed
    once; from then on only announced objects of these kinds are read.
    """

    def __init__(self) -> None:
        """Create the set of a run without headers."""
        self._highest: dict[str, str] = {}
        self._page = NamedObjects()
        self._before: tuple[int, str] | None = None
        self._unnamed_points: dict[int, bytes] = {}
        """Points that no header names yet, by step."""
        self._expected: set[str] = set()
        """Keys after the run's prefix that may exist and are not named."""
        self._is_listed = False
        self._newest = (-1, 0)
        """Step and revision of the last header that was noted."""
        self.closings: list[Closing] = []
        """Every closing header, the one that ends the run included."""

    @classmethod
    def after(cls, point: ChainPoint, sha256: str) -> "KnownObjects":
        """Return what the headers up to a chain point name; `sha256` (hex) is of the point's bytes."""
        known = cls()
        known._highest, known._before = dict(point.highest), (point.step, sha256)
        known._newest, known.closings = (point.step, point.revision), list(point.closings)
        return known

    def note(self, header: batch_pb2.BatchHeader | batch_pb2.BatchLink, stored: bytes) -> None:
        """Note that the next header is committed, and with it every object that it names.

        `stored` are the header's bytes. After each `POINT_STEPS` training steps a chain point is made. A header that
        was noted before changes nothing: a commit that failed after its header is tried again.
        """
        if (header.step, header.revision) <= self._newest:
            return
        self._newest = header.step, header.revision
        for key, kind in add_named(self._page, header).items():
            self._expected.discard(key)
            series = kind.series(key)
            self._highest[series] = max(key, self._highest.get(series, ""))
            if kind == CHAIN_POINT and (place := kind.parse(key)):
                self._unnamed_points.pop(int(place["step"]), None)
        if closes_run(header):
            self.closings.append(Closing(header.step, header.revision, hashlib.sha256(stored).hexdigest()))
        elif (header.step + 1) % frontier.POINT_STEPS == 0:
            self._make_point(header, chain_hash(header.previous_chain_hash, stored))

    def announce(self, key: str) -> None:
        """Note that an object was created, so that the next header names it; `key` is without the run's prefix.

        An object that no header has to name, or that sorts before one that is named, is ignored.
        """
        kind = _kinds().get(_folder(key))
        if kind is not None and key > self._highest.get(kind.series(key), ""):
            self._expected.add(key)

    def fill(self, store: ObjectStore, names: Names, header: batch_pb2.BatchHeader) -> None:
        """Add to a header references to the stored objects that it has to name and no earlier one names (blocking).

        What the header names already stays. Chain points that no header names are created.
        """
        # Points are stored before the header that names them, as all that a header names.
        new = (*header.objects, *self.find_new(store, names), *self._store_points(store, names))
        found = {item.key: item for item in new}
        del header.objects[:]
        header.objects.extend(found[key] for key in sorted(found))

    def find_new(self, store: ObjectStore, names: Names) -> list[batch_pb2.ObjectRef]:
        """Return references to the stored objects that the next header has to name, with their hashes (blocking).

        They sort after those of their series that headers name. The first call lists all kinds, later ones only those
        that nobody announces.
        """
        kinds = [
            kind for kind in _kinds().values() if kind != CHAIN_POINT and not (self._is_listed and kind.is_announced)
        ]
        listed = [key for kind in kinds for key in self._list(store, names, kind)]
        self._expected.update(listed)
        self._is_listed = True
        # Keys stay expected until `note` gets the header that names them: after a failed commit the next
        # try names them again.
        found: list[batch_pb2.ObjectRef] = []
        for key in sorted(self._expected):
            try:
                found.append(describe(names, key, store.get(names.root + key)))
            except NotFoundError:  # deleted since: by retention, or with its run
                self._expected.discard(key)
        return found

    def named(self, store: ObjectStore, names: Names) -> NamedObjects:
        """Return everything that headers name (blocking): all chain points are read, from the newest back to the first.

        NotFoundError or CorruptObjectError if a chain point is missing or damaged.
        """
        whole, before = NamedObjects(), self._before
        whole.add(self._page)
        while before is not None:
            step, sha256 = before
            # A point that no header names yet may not be stored.
            if data := self._unnamed_points.get(step):
                point = ChainPoint.decode(data, where=names.chain_point(step))
            else:
                point, _ = load_point(store, names, step, sha256=sha256)
            whole.add(point.page)
            before = point.before
        return whole

    def _list(self, store: ObjectStore, names: Names, kind: ObjectKind) -> Iterator[str]:
        """Yield the keys, without the run's prefix, of the stored objects of a kind that sort after the highest of
        their series.

        Where numbers have no gap and are all that differs, the next ones are asked for, and nothing is listed.
        """
        # One request for each new object and one more, so that the cost of a header does not grow with the run.
        if kind.numbering == catalogue.DENSE and kind.key.count("{") == 1:
            place = kind.parse(self._highest.get(kind.folder, ""))
            for number in itertools.count(int(place["number"]) + 1 if place else 1):
                if store.head(names.root + kind.path(number=number)) is None:
                    return
                yield kind.path(number=number)
        for key in list_objects(store, names, kind, after=self._highest.get(kind.folder, "")):
            if key > self._highest.get(kind.series(key), ""):
                yield key

    def _make_point(self, header: batch_pb2.BatchHeader | batch_pb2.BatchLink, chain: bytes) -> None:
        """Make the chain point after a header, in memory, and begin a new page of named objects.

        `chain` is the hash after it.
        """
        point = ChainPoint(
            run_uid=header.run_uid,
            step=header.step,
            revision=header.revision,
            chain_hash=chain,
            before=self._before,
            closings=tuple(self.closings),
            highest=self._highest,
            page=self._page,
        )
        # Encoded at once, because `_highest` goes on changing.
        data = self._unnamed_points[header.step] = point.encode()
        self._before, self._page = (header.step, hashlib.sha256(data).hexdigest()), NamedObjects()

    def _store_points(self, store: ObjectStore, names: Names) -> Iterator[batch_pb2.ObjectRef]:
        """Create in the store the chain points that no header names, and yield references to them (blocking).

        If another object has the key of a point, the point is left out, with a warning.
        """
        for step, data in sorted(self._unnamed_points.items()):
            key = names.chain_point(step)
            # Every writer makes the same bytes of a point, so that one which is there may be a predecessor's.
            if store.create(key, data) or store.get(key) == data:
                faults.reach(faults.Point.ORCHESTRATOR_CHAIN_POINT, step=step)
                yield describe(names, key.removeprefix(names.root), data)
            else:
                logger.warning("the object is no chain point of this run", extra={"uid": names.uid, "key": key})


def add_named(page: NamedObjects, header: batch_pb2.BatchHeader | batch_pb2.BatchLink) -> dict[str, ObjectKind]:
    """Add to `page` what a header names.

    Return the kinds of the header's small objects by key without the run's prefix. Scores are left out, because nobody
    looks them up.
    """
    kinds = _kinds()
    found = {item.key: kinds[_folder(item.key)] for item in header.objects if _folder(item.key) in kinds}
    page.objects.update((item.key, item.sha256) for item in header.objects if item.key in found)
    keys = (header.rollouts_key, *(chunk.key for chunk in header.chunks))
    page.places |= {key.rpartition("/")[0] for key in keys if key}
    return found


def _kinds() -> dict[str, ObjectKind]:
    """Return the kinds whose new objects the next header has to name, by the first folder of their keys."""
    return {kind.folder: kind for kind in catalogue.KINDS if catalogue.HEADER in kind.named_by}


def _folder(key: str) -> str:
    """Return a key's first folder with its slash; empty if it has none."""
    return key[: key.find("/") + 1]


def describe(names: Names, key: str, data: bytes) -> batch_pb2.ObjectRef:
    """Return the reference that a header has to an object: its key without the run's prefix, and the sha256 of `data`.

    That of a policy's manifest has the digest of the weights, too.
    """
    ref = batch_pb2.ObjectRef(key=key, sha256=hashlib.sha256(data).digest())
    if (names.root + key).startswith(names.policies):
        ref.digest = manifest_digest(data)
    return ref


def manifest_digest(data: bytes) -> str:
    """Return the digest of the weights that a policy's manifest (its bytes) names; empty if the manifest is damaged."""
    try:
        digest = decode_object(data, what="policy manifest", reason="POLICY_CORRUPT").get("digest")
    except CorruptObjectError:
        return ""
    return digest if isinstance(digest, str) else ""
