"""Which task ordinals are resolved (trained or dropped), and the chain hash over the headers that resolved them."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object, require_key
from millrace.errors import CorruptObjectError, InternalError
from millrace.internal.v1 import batch_pb2
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

# Points of the chain: where a successor begins to read the headers, and what those before it name.
#
# A point is made of the headers alone, after every `POINT_STEPS`th training step, so that every writer makes the same
# one. The next header names its sha256 like that of every small object: who reads the chain from a point on finds it
# proved by a later header. Each point names the one before, so that all of them say what the headers of a run name.

FORMAT = 1
POINT_STEPS = 256
"""A takeover reads at most so many headers more than come after the newest point, 15 MB of 1,024 samples each."""
_REMEDY = "remove it: a takeover then reads the headers before it"


@dataclass(frozen=True, slots=True)
class Closing:
    """Which closing header is meant; `sha256` (hex) is of its stored bytes."""

    step: int
    revision: int
    sha256: str


@dataclass(slots=True)
class NamedObjects:
    """Which objects the headers between two points name."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """sha256 by key after the run's prefix."""
    places: set[str] = field(default_factory=set)
    """Folders of their chunks and archives, as whole prefixes of keys without the last slash."""

    def add(self, other: "NamedObjects") -> None:
        """Add the objects and folders that other headers name to this page."""
        self.objects |= other.objects
        self.places |= other.places

    def holds(self, key: str) -> bool:
        """Return whether a chunk or an archive that one of the headers names is in the same folder as this whole
        key.
        """
        return key.rpartition("/")[0] in self.places


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainPoint:
    """The state of the chain after a training step, as far as later headers and a takeover need it."""

    run_uid: str
    step: int
    """Of the last header that it covers."""
    revision: int
    chain_hash: bytes
    """After that header."""
    before: tuple[int, str] | None
    """Step and sha256 (hex) of the point before; None for the first."""
    closings: tuple[Closing, ...]
    """Every closing header so far, which were reopened all."""
    highest: Mapping[str, str]
    """The highest key that a header names, by series of keys; both after the run's prefix."""
    page: NamedObjects
    """What the headers since the point before name."""

    def encode(self) -> bytes:
        """Return the point as canonical JSON: the same bytes from every writer."""
        before = None if self.before is None else {"step": self.before[0], "sha256": self.before[1]}
        document = {
            "format": FORMAT,
            "run_uid": self.run_uid,
            "step": self.step,
            "revision": self.revision,
            "chain_hash": self.chain_hash.hex(),
            "before": before,
            "closings": [
                {"step": each.step, "revision": each.revision, "sha256": each.sha256} for each in self.closings
            ],
            "highest": dict(self.highest),
            "objects": {key: sha256.hex() for key, sha256 in self.page.objects.items()},
            # A set has no order that every process shares.
            "places": sorted(self.page.places),
        }
        # No indent and sorted keys: two writers of one point must produce the same sha256.
        return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> "ChainPoint":
        """Parse and validate a point; `CorruptObjectError` if it is damaged. `where` names it in the message."""
        raw = decode_object(data, what=where, reason="CHAIN_POINT_CORRUPT", remedy=_REMEDY)
        try:
            fields = Fields(raw)
            fields.integer("format", least=FORMAT, most=FORMAT)
            return cls(
                run_uid=fields.text("run_uid"),
                step=fields.integer("step"),
                revision=fields.integer("revision"),
                chain_hash=bytes.fromhex(fields.hexadecimal("chain_hash", num_bytes=32)),
                before=_before(fields.inner("before")),
                closings=tuple(_closing(each) for each in fields.objects("closings")),
                highest=fields.table("highest"),
                page=_page(fields),
            )
        except ValueError as error:
            message = f"{where} is no chain point: {error}"
            raise CorruptObjectError(message, reason="CHAIN_POINT_CORRUPT", remedy=_REMEDY) from error


def _before(fields: Fields | None) -> tuple[int, str] | None:
    """Return step and sha256 of the point before, from their JSON; None for none."""
    return None if fields is None else (fields.integer("step"), fields.hexadecimal("sha256", num_bytes=32))


def _closing(fields: Fields) -> Closing:
    """Return the closing header that an object of the JSON describes; ValueError if a field is wrong."""
    return Closing(fields.integer("step"), fields.integer("revision"), fields.hexadecimal("sha256", num_bytes=32))


def _page(fields: Fields) -> NamedObjects:
    """Return the objects and folders that a point's JSON names; ValueError if a key or hash is malformed."""
    objects: dict[str, bytes] = {}
    named: dict[str, Any] = fields.entries("objects")
    hashes = Fields(named)
    # Only the values are checked by `Fields`: keys of a damaged point may be any text.
    for key in named:
        objects[require_key(key, what="a key")] = bytes.fromhex(hashes.hexadecimal(key, num_bytes=32))
    return NamedObjects(objects, {require_key(place, what="a place") for place in fields.texts("places")})


def load_point(store: ObjectStore, names: Names, step: int, *, sha256: str = "") -> tuple[ChainPoint, str]:
    """Return the chain point after a step and the sha256 (hex) of its bytes (blocking); NotFoundError if there is none.

    `CorruptObjectError` if it is damaged, belongs to another run or step, or differs from `sha256`, if that is given.
    """
    key = names.chain_point(step)
    data, where = store.get(key, max_bytes=MAX_JSON_BYTES), store.uri(key)
    point, found = ChainPoint.decode(data, where=where), hashlib.sha256(data).hexdigest()
    if (point.run_uid, point.step) != (names.uid, step) or sha256 not in ("", found):
        message = f"{where} is not the point of step {step} that a header or another point names"
        raise CorruptObjectError(message, reason="CHAIN_POINT_CORRUPT", remedy=_REMEDY)
    return point, found


ZERO_CHAIN_HASH = bytes(32)
"""The parent of a genesis hash that continues nothing."""


def genesis_hash(parent: bytes, run_json: bytes) -> bytes:
    """Return the hash with which a run's chain begins: sha256(`parent` || sha256(run.json)), so that it covers what the
    run is.

    `parent` is the chain hash that a fork continues, else 32 zero bytes; `run_json` are the stored bytes.
    """
    return chain_hash(parent, run_json)


def chain_hash(previous: bytes, header_bytes: bytes) -> bytes:
    """Return the chain hash after a header: sha256(`previous` || sha256(`header_bytes`)).

    `previous` is that before it (32 bytes, else ValueError); `header_bytes` are the stored bytes, never re-serialized.
    """
    if len(previous) != 32:
        raise ValueError(f"a chain hash has 32 bytes, not {len(previous)}")
    return hashlib.sha256(previous + hashlib.sha256(header_bytes).digest()).digest()


@dataclass(frozen=True, slots=True)
class Frontier:
    """The set of resolved ordinals: everything below `resolved_below`, plus a sparse set above it. Immutable.

    Its size is bounded by how far groups finish out of order, which `orchestrator/play/routing.py` bounds.
    """

    resolved_below: int = 0
    """Every ordinal below it is resolved; it itself is not."""
    resolved_above: frozenset[int] = frozenset()
    """The resolved ordinals above `resolved_below`."""

    def __post_init__(self) -> None:
        """Raise CorruptObjectError unless the sparse set is above `resolved_below`."""
        if self.resolved_below < 0 or any(ordinal <= self.resolved_below for ordinal in self.resolved_above):
            raise CorruptObjectError(
                f"frontier: resolved_above {sorted(self.resolved_above)[:8]} is not above {self.resolved_below}",
                reason="FRONTIER_CORRUPT",
                remedy="the header that carries it was written by a faulty orchestrator: report it",
            )

    @classmethod
    def from_header(cls, header: batch_pb2.BatchHeader) -> "Frontier":
        """Return which ordinals are resolved after a committed header, as the header says."""
        return cls(header.resolved_below, frozenset(header.resolved_above))

    def is_resolved(self, ordinal: int) -> bool:
        """Return whether the group of this task ordinal was trained or dropped."""
        return ordinal < self.resolved_below or ordinal in self.resolved_above

    def resolve(self, ordinals: Iterable[int]) -> "Frontier":
        """Return a frontier with these ordinals resolved too; this one stays as it is.

        `InternalError` if one of them is resolved already, is negative or comes twice. That check is the last guard of
        "nothing is counted twice".
        """
        new = list(ordinals)
        fresh = frozenset(new)
        wrong = sorted(ordinal for ordinal in fresh if ordinal < 0 or self.is_resolved(ordinal))
        if wrong or len(fresh) != len(new):
            raise InternalError(
                f"ordinals {(wrong or sorted(new))[:8]} are negative or would be resolved twice",
                reason="ORDINAL_RESOLVED_TWICE",
                remedy="report this: the orchestrator counted a group twice",
            )
        below, above = self.resolved_below, self.resolved_above | fresh
        while below in above:
            below += 1
        return Frontier(below, frozenset(ordinal for ordinal in above if ordinal > below))

    def fill(self, header: batch_pb2.BatchHeader) -> None:
        """Write into a header which ordinals are resolved."""
        header.resolved_below = self.resolved_below
        del header.resolved_above[:]
        header.resolved_above.extend(sorted(self.resolved_above))
