"""Retirements: which objects of a run were removed on purpose. A create-only record exists before the first one goes.

    retirements/00000003.json    what is retired of each class of the catalogue (`KeptAs`) since the third pass

Each record contains all that is retired by then, so the newest one alone decides whether an object that is missing was
retired or lost. Headers and the seal name the records, so that none can be added or removed unnoticed.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from millrace.decoding import Fields, decode_object
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.runlog import catalogue
from millrace.runlog.catalogue import KeptAs
from millrace.runlog.names import Names
from millrace.storage import ObjectStore
from millrace.storage.base import require_checksum, with_checksum

FORMAT = 1
MAX_BYTES = 16 << 20
RETIRED = "RETIRED"
"""Reason of the error of who reads what was retired."""
_CLASSES = {kept.name.lower(): kept for kept in KeptAs if kept is not KeptAs.RUN}
_REMEDY = "restore the object from a replica of the bucket"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retired:
    """What is retired of one class: everything with a number below `below`, but the numbers that it `keeps`."""

    below: int = 0
    """Step or version, whichever the keys of the class have."""
    keeps: frozenset[int] = frozenset()
    lineage: int = 0
    """Of policies: the newest lineage of which versions are retired."""
    why: str = ""
    """The config key that asks for it, with its value."""

    def covers(self, place: Mapping[str, int | str]) -> bool:
        """Return whether the object whose key has these fields (step, or lineage and version) is retired."""
        number = int(place.get("step", place.get("version", 0)))
        # A version that was made anew after the record has a higher lineage, and is not retired.
        is_of_lineage = "version" not in place or int(place.get("lineage", 0)) <= self.lineage
        return number < self.below and number not in self.keeps and is_of_lineage

    def includes(self, before: "Retired") -> bool:
        """Return whether everything that `before` has retired is retired here, too."""
        # Kept now and not kept then, below what was retired then.
        brought_back = {number for number in self.keeps - before.keeps if number < before.below}
        return self.below >= before.below and self.lineage >= before.lineage and not brought_back


_NOTHING = Retired()


@dataclass(frozen=True, slots=True, kw_only=True)
class Retirement:
    """All that is retired of a run once this record exists."""

    number: int
    run_uid: str
    retired: Mapping[KeptAs, Retired] = field(default_factory=dict)
    by: str = ""
    time: str = ""
    """On its writer's clock, ISO 8601 with a zone."""

    def of(self, kept: KeptAs) -> Retired:
        """Return what is retired of a class of objects: nothing if the record does not name the class."""
        return self.retired.get(kept, _NOTHING)

    def covers(self, own: str) -> bool:
        """Return whether the object under a key, without the run's prefix, is retired."""
        kind = catalogue.kind_at(own)
        return kind is not None and kind.kept is not KeptAs.RUN and self.of(kind.kept).covers(kind.parse(own) or {})

    def encode(self) -> bytes:
        """Return the record as canonical JSON with a checksum."""
        retired = {
            kept.name.lower(): {
                "below": each.below,
                "keeps": sorted(each.keeps),
                "lineage": each.lineage,
                "why": each.why,
            }
            for kept, each in self.retired.items()
        }
        head = {"format": FORMAT, "number": self.number, "run_uid": self.run_uid, "retired": retired}
        return with_checksum({**head, "by": self.by, "time": self.time})

    @classmethod
    def decode(cls, data: bytes, *, where: str) -> "Retirement":
        """Parse and validate a record; `CorruptObjectError` if it is damaged. `where` names it in the message."""
        raw = decode_object(data, what=where, max_bytes=MAX_BYTES, reason="RETIREMENT_CORRUPT", remedy=_REMEDY)
        try:
            require_checksum(raw)
            fields = Fields(raw)
            fields.integer("format", least=FORMAT, most=FORMAT)
            retired = {_kept(name): _decode_retired(found) for name, found in fields.entries("retired").items()}
            texts = {name: fields.text(name) for name in ("run_uid", "by", "time")}
            return cls(number=fields.integer("number", least=1), retired=retired, **texts)
        except ValueError as error:
            message = f"{where} is no retirement: {error}"
            raise CorruptObjectError(message, reason="RETIREMENT_CORRUPT", remedy=_REMEDY) from error


def _kept(name: str) -> KeptAs:
    """Return the class of this name in a record; ValueError if there is none."""
    if name not in _CLASSES:
        raise ValueError(f"nothing is kept as {name!r}")
    return _CLASSES[name]


def _decode_retired(raw: object) -> Retired:
    """Return what a record's JSON says of one class; ValueError if a field is missing or wrong."""
    fields = Fields(raw if isinstance(raw, dict) else {})
    return Retired(
        below=fields.integer("below"),
        keeps=frozenset(fields.integers("keeps")),
        lineage=fields.integer("lineage"),
        why=fields.text("why"),
    )


def newest_retirement(store: ObjectStore, names: Names, *, known: int = 0) -> Retirement | None:
    """Return the newest record of what was retired of a run (blocking); None if nothing was ever retired.

    It takes a logarithmic number of requests after `known`, the number of a record that exists (0 if none is known).
    `CorruptObjectError` if the record is damaged.
    """

    def exists(number: int) -> bool:
        return store.head(names.retirement(number)) is not None

    if (newest := newest_number(exists, known=known)) == 0:
        return None
    key = names.retirement(newest)
    return Retirement.decode(store.get(key, max_bytes=MAX_BYTES), where=store.uri(key))


def newest_number(exists: Callable[[int], bool], *, known: int = 0) -> int:
    """Return the highest number of objects that are numbered from 1 without a gap, 0 if there is none.

    `exists` says whether a number is there. It is called a logarithmic number of times for the numbers after `known`,
    which exists unless it is 0.
    """
    if not known and not exists(1):
        return 0
    low, width = max(known, 1), 1
    # Doubling, then bisection.
    while exists(low + width):
        low, width = low + width, 2 * width
    high = low + width
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if exists(middle) else (low, middle)
    return low


def explain(store: ObjectStore, key: str, error: NotFoundError) -> NotFoundError:
    """Return the error to raise for an object that is missing (blocking): one that names the record, if it was retired.

    Else it is `error` itself. `key` is the object's whole key.
    """
    names, own = _split(key)
    kind = None if names is None else catalogue.kind_at(own)
    if names is None or kind is None or kind.kept is KeptAs.RUN:
        return error
    # Only here, for an object that is missing: readers of what exists pay no request for it.
    record = newest_retirement(store, names)
    if record is None or not record.covers(own):
        return error
    return retired_error(store, names, own, record)


def require_policy(store: ObjectStore, manifest_key: str) -> None:
    """Raise the `NotFoundError` that names the record if the weights of a policy version are retired (blocking).

    `manifest_key` is the whole key of its manifest, or of a successor of it.
    """
    names, own = _split(manifest_key)
    record = None if names is None or catalogue.POLICY_MANIFEST.parse(own) is None else newest_retirement(store, names)
    weights = f"{own.rpartition('/')[0]}/weights"
    if names is not None and record is not None and record.covers(weights):
        raise retired_error(store, names, weights, record)


def steps_retired(store: ObjectStore, names: Names) -> tuple[int, str]:
    """Return the step below which batches and rollouts are retired, and a sentence that says so and why (blocking).

    (0, "") where none are.
    """
    record = newest_retirement(store, names)
    below = 0 if record is None else record.of(KeptAs.BATCHES).below
    if record is None or not below:
        return 0, ""
    why = record.of(KeptAs.BATCHES).why
    return below, f"batches and rollouts below step {below} were retired, as {why} says ({_uri(store, names, record)})"


def _uri(store: ObjectStore, names: Names, record: Retirement) -> str:
    """Return the URI of a record's object."""
    return store.uri(names.retirement(record.number))


def retired_error(store: ObjectStore, names: Names, own: str, record: Retirement) -> NotFoundError:
    """Make the error for the object under a key without the run's prefix (`own`) that `record` covers: it names the
    record.
    """
    kind = catalogue.kind_at(own)
    assert kind is not None
    place = kind.parse(own) or {}
    what = f"step {place['step']}" if "step" in place else f"policy {place['lineage']}-{place['version']}"
    return NotFoundError(
        f"the {kind.name} of {what} of run {names.uid} was retired, as {record.of(kind.kept).why} says "
        f"({_uri(store, names, record)})",
        reason=RETIRED,
        remedy=f"choose one that is kept: {_what_is_kept(kind.kept, record.of(kind.kept))}; or restore the object "
        "from a replica of the bucket",
        metadata={"uid": names.uid, "key": own},
    )


def _what_is_kept(kept: KeptAs, retired: Retired) -> str:
    """Return in words which steps or versions of a class are kept."""
    what = "versions" if kept is KeptAs.POLICIES else "steps"
    besides = f", and {', '.join(map(str, sorted(retired.keeps)[-8:]))}" if retired.keeps else ""
    return f"{what} from {retired.below} on{besides}"


def _split(key: str) -> tuple[Names | None, str]:
    """Return the run to which a whole key belongs, and the key without the run's prefix; (None, "") for another key."""
    prefix, marker, rest = key.partition("/runs/")
    uid, slash, own = rest.partition("/")
    if not marker or not slash:
        return None, ""
    return Names(prefix, uid), own
