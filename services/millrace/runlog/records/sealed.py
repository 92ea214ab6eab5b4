"""The seal of an ended run, and what it names: whatever came later is no part of the run.

A run that was reopened after a failure is sealed again, under the next number.
"""

import json
from dataclasses import dataclass

from millrace.decoding import MAX_JSON_BYTES, Fields, decode_object, require_integer, require_key
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog.names import Names
from millrace.storage.base import ObjectStore

FORMAT = 1
_REMEDY = "restore the object from a replica of the bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seal:
    """What a seal says."""

    run_uid: str
    state: str
    """The terminal state: SUCCEEDED, FAILED or CANCELLED."""
    chain_hash: str
    """Chain hash after the closing header, hex."""
    objects: dict[str, str]
    """sha256 (hex) by key after the run's prefix: what the headers do not name, all event archives and manifests."""
    others: dict[str, int] | None
    """Size (bytes) by key after the run's prefix of everything else but scores: what manifests name, and what nobody
    does. None in a seal of a release that did not list it."""
    by: str
    time: str
    """On its writer's clock, ISO 8601 with a zone."""

    def encode(self) -> bytes:
        """Return the seal as JSON with sorted keys."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({"format": FORMAT, **fields}, sort_keys=True, indent=1).encode()

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> "Seal":
        """Parse a seal from its object's bytes; `CorruptObjectError`, naming `where`, if it is none."""
        raw = decode_object(data, what=where, reason="SEAL_CORRUPT", remedy=_REMEDY)
        try:
            fields = Fields(raw)
            fields.integer("format", least=FORMAT, most=FORMAT)
            texts = {name: fields.text(name) for name in ("run_uid", "state", "chain_hash", "by", "time")}
            others = None
            if fields.has("others"):
                others = {key: require_integer(size, what="a size") for key, size in fields.entries("others").items()}
            objects = fields.table("objects")
            for key in (*objects, *(others or ())):
                require_key(key, what="the key")
        except ValueError as error:
            raise CorruptObjectError(f"{where} is no seal: {error}", reason="SEAL_CORRUPT", remedy=_REMEDY) from error
        return cls(objects=objects, others=others, **texts)


def seal_key(store: ObjectStore, names: Names) -> str:
    """Return the key that the seal of the run's current end has, stored or not (blocking).

    The key is numbered by how often the run was reopened, so that each end has a seal of its own.
    """
    return names.seal(sum(1 for _ in store.list(names.reopenings)))


def load_seal(store: ObjectStore, names: Names) -> Seal | None:
    """Return the seal of the run's present end (blocking); None if it has not ended, or is not sealed yet."""
    key = seal_key(store, names)
    try:
        return Seal.decode(store.get(key, max_bytes=MAX_JSON_BYTES), where=store.uri(key))
    except NotFoundError:
        return None


def is_sealed(store: ObjectStore, names: Names) -> bool:
    """Return whether the run has ended and is sealed, so that nobody writes to it any more (blocking)."""
    return store.head(seal_key(store, names)) is not None
