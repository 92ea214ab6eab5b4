"""Points of the chain: where a successor begins to read the headers, and what those before it name.

A point is made of the headers alone, after every `POINT_STEPS`th training step, so that every writer makes the same
one. The next header names its sha256 like that of every small object: who reads the chain from a point on finds it
proved by a later header. Each point names the one before, so that all of them say what the headers of a run name.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object, require_key
from millrace.errors import CorruptObjectError
from millrace.runlog.names import Names
from millrace.storage import ObjectStore

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
        """Add the objects that other headers name."""
        self.objects |= other.objects
        self.places |= other.places

    def holds(self, key: str) -> bool:
        """Return whether a whole key is that of a chunk or an archive of one of the headers; its folder decides."""
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
        """Return canonical JSON: the same bytes from every writer."""
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
    return None if fields is None else (fields.integer("step"), fields.hexadecimal("sha256", num_bytes=32))


def _closing(fields: Fields) -> Closing:
    return Closing(fields.integer("step"), fields.integer("revision"), fields.hexadecimal("sha256", num_bytes=32))


def _page(fields: Fields) -> NamedObjects:
    objects: dict[str, bytes] = {}
    named: dict[str, Any] = fields.entries("objects")
    hashes = Fields(named)
    # Only the values are checked by `Fields`: keys of a damaged point may be any text.
    for key in named:
        objects[require_key(key, what="a key")] = bytes.fromhex(hashes.hexadecimal(key, num_bytes=32))
    return NamedObjects(objects, {require_key(place, what="a place") for place in fields.texts("places")})


def load_point(store: ObjectStore, names: Names, step: int, *, sha256: str = "") -> tuple[ChainPoint, str]:
    """Return the point after a step and the sha256 (hex) of its bytes (blocking); NotFoundError if there is none.

    `CorruptObjectError` if it is damaged, belongs to another run or step, or differs from `sha256`, if that is
    given.
    """
    key = names.chain_point(step)
    data, where = store.get(key, max_bytes=MAX_JSON_BYTES), store.uri(key)
    point, found = ChainPoint.decode(data, where=where), hashlib.sha256(data).hexdigest()
    if (point.run_uid, point.step) != (names.uid, step) or sha256 not in ("", found):
        message = f"{where} is not the point of step {step} that a header or another point names"
        raise CorruptObjectError(message, reason="CHAIN_POINT_CORRUPT", remedy=_REMEDY)
    return point, found
