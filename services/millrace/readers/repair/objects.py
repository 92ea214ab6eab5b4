"""One object at a time: is it what it has to be, who has the right bytes, and how they get to their place.

Nothing is overwritten. A damaged object is copied to `quarantine/` under the sha256 of its bytes and read back there
before it leaves its place; the right bytes are then created there. A repair that dies in between leaves a missing
object and a kept copy, and the next one finishes it.
"""

import asyncio
import contextlib
import hashlib
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path

from millrace.decoding import decode_message
from millrace.errors import (
    ConflictError,
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    NotFoundError,
)
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.catalogue import ObjectKind
from millrace.runlog.event_archive import decode_archive
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.retirement import Retirement
from millrace.runlog.records.revisions import list_headers
from millrace.runlog.records.sealed import Seal
from millrace.runlog.redis.entry import Entry, decode_entry, scan
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore
from millrace.storage.base import check_key
from millrace.storage.scratch import owned_directory
from millrace.v1 import event_pb2

Judge = Callable[[bytes], str]
"""What is wrong with an object's bytes, in words; empty if they are what they have to be."""

MISSING = "it is missing"
MAX_GAP = 10_000
"""Most objects in a row that can be missing; what comes after such a gap is foreign."""
_PAGE = {Stream.BATCHES: 16, Stream.EVENTS: 256}


class RepairState(StrEnum):
    """What becomes of something that is damaged or missing."""

    RESTORABLE = "restorable"
    RESTORED = "restored"
    NOT_NEEDED = "not needed"
    """The run does without it: what it holds is computed again, or older state serves."""
    REFUSED = "refused"
    """Nobody has bytes that are proved to be the right ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """One object that is not what it has to be."""

    key: str
    problem: str
    source: str
    """Where the right bytes are; empty if nowhere."""
    state: RepairState
    detail: str
    """What proves the bytes, or why nothing is done."""
    quarantine: str = ""
    """Where the damaged bytes are now; empty if the object was missing, or nothing was done."""


class RedisCopy:
    """What Redis holds of a run's headers, chunks and events, each proved by the hash in its entry. For one thread."""

    name = "Redis"

    def __init__(self, log: RunLog, loop: asyncio.AbstractEventLoop) -> None:
        """Create an empty copy, which `load` fills; `loop` is the event loop of the log."""
        self._log = log
        self._loop = loop
        self.headers: dict[tuple[int, int], bytes] = {}
        self._places: dict[str, str] = {}
        self.events: list[Entry] = []

    @classmethod
    async def load(cls, log: RunLog) -> "RedisCopy":
        """Read from Redis which headers, chunks and events of a run it has; damaged entries are left out."""
        copy = cls(log, asyncio.get_running_loop())
        async for entry in copy._entries(Stream.BATCHES):
            copy._places[entry.h] = entry.id
            if entry.id.endswith("-1"):
                try:
                    header = decode_header(entry.d)
                except CorruptObjectError:
                    continue
                if entry.id == f"{header.step}-1":
                    copy.headers[header.step, header.revision] = entry.d
        copy.events = [entry async for entry in copy._entries(Stream.EVENTS)]
        return copy

    def by_hash(self, sha256: str) -> bytes | None:
        """Return the bytes of a header or chunk in Redis with that sha256 (hex); None without one.

        It blocks, and must be called from another thread than the loop's.
        """
        if (id_ := self._places.get(sha256)) is None:
            return None
        reading = self._log.read_range(Stream.BATCHES, id_, id_)
        found = asyncio.run_coroutine_threadsafe(reading, self._loop).result()
        return found[0].d if found else None

    async def _entries(self, stream: Stream) -> AsyncIterator[Entry]:
        """Yield the entries of a stream whose format and hash are right; the others are left out."""
        key, what = self._log.names.stream(stream), f"reading {stream} for a repair"
        read_page = partial(self._log.command, what, "XRANGE", key)
        async for id_, fields in scan(lambda start, count: read_page(start, "+", "COUNT", count), _PAGE[stream]):
            with contextlib.suppress(CorruptObjectError, InvalidStateError):
                yield decode_entry(key, id_, fields)


@dataclass(kw_only=True)
class Workbench:
    """What a repair works on, and what it has found so far."""

    store: ObjectStore
    names: Names
    backup: ObjectStore | None
    redis: RedisCopy | None
    is_applied: bool
    on_progress: Callable[[str], None] = lambda text: None
    repairs: list[Repair] = field(default_factory=list)
    examined: set[str] = field(default_factory=set)
    """Keys that were looked at."""
    retired: Retirement | None = None
    """What retention has removed."""
    num_retired: int = 0
    """Objects that are missing because of that."""
    good: dict[str, bytes] = field(default_factory=dict)
    """Bytes that a dry run would restore: what follows from them is looked at, too."""

    def read(self, key: str) -> bytes | None:
        """Return the bytes of an object of the store; None if there is none, or the store cannot read it."""
        return _read(self.store, key)[0]

    def examine(
        self,
        key: str,
        judge: Judge,
        *,
        prover: str,
        proof: Judge | None = None,
        candidates: Sequence[tuple[str, bytes | None]] = (),
        fallback: tuple[str, bytes] | None = None,
        may_be_gone: bool = False,
        without: str = "",
    ) -> bytes | None:
        """Return the right bytes of a small object: those that are stored, or proved ones, which are restored.

        None without. `judge` says what is wrong with bytes (empty: nothing). Only a repair that `is_applied` writes;
        otherwise proved bytes are only noted as restorable. `prover` names what proves bytes by `proof` (`judge` if
        None); empty: nothing does. `candidates` are bytes by their source; the backup's come after them, and `fallback`
        after these. `may_be_gone`: retention may have removed it. `without` says how the run does without it; empty: it
        does not.
        """
        self.on_progress(key.removeprefix(self.names.root))
        self.examined.add(key)
        if not self.is_ours(key):
            self._give_up(key, "it is named, and is no object of this run", [], "")
            return None
        stored, problem = _read(self.store, key)
        if stored is not None and not (problem := judge(stored)):
            return stored
        if problem == MISSING and (may_be_gone or self._is_retired(key)):
            return None
        tried: list[str] = []
        if self.backup is not None:
            held, why = _read(self.backup, key)
            tried += [f"{self.backup.describe()}: {why}"] if why not in ("", MISSING) else []
            candidates = [*candidates, (self.backup.describe(), held)]
        if fallback is not None:
            candidates = [*candidates, fallback]
        # Bytes without a proof are never restored: a backup may be older, or of another run.
        for source, data in candidates:
            if data is None:
                continue
            if not prover:
                tried.append(f"{source} has it, but nothing names its hash")
            elif why := (proof or judge)(data):
                tried.append(f"{source}: {why}")
            else:
                return self._restore(key, data, problem, source, prover, damaged=stored)
        self._give_up(key, problem, tried, without)
        return None

    def examine_file(self, key: str, *, sha256: str, size_bytes: int, prover: str, without: str = "") -> bool:
        """Return whether a large object is stored with its hash, was retired, or can be restored from the backup.

        A missing or damaged one is restored, if the repair `is_applied`; else it is only noted as restorable. `prover`
        names the object that has the hash; `without` says how the run does without it, empty: it does not. The object
        passes through a file.
        """
        self.on_progress(key.removeprefix(self.names.root))
        self.examined.add(key)
        if not self.is_ours(key):
            self._give_up(key, "it is named, and is no object of this run", [], "")
            return False
        problem = _file_problem(self.store, key, sha256=sha256, size_bytes=size_bytes)
        if not problem or (problem == MISSING and self._is_retired(key)):
            return True
        tried: list[str] = []
        if self.backup is not None:
            source = self.backup.describe()
            with owned_directory("repair") as directory:
                path = directory / "object"
                if not (why := _fetch(self.backup, key, path, sha256=sha256, size_bytes=size_bytes)):
                    state, aside = RepairState.RESTORABLE, ""
                    if self.is_applied:
                        state, aside = RepairState.RESTORED, self._set_aside(key)
                        self.store.put_file(key, path)  # the key is free, and no other object has it
                    detail = f"proved by {prover}"
                    self._note(key, problem, source, state, detail, aside)
                    return True
            tried += [f"{source}: {why}"] if why != MISSING else []
        self._give_up(key, problem, tried, without)
        return False

    def is_ours(self, key: str) -> bool:
        """Return whether a repair may touch a whole key: what names it may be damaged, or hostile."""
        deployment = (f"{self.names.prefix}/names/", f"{self.names.prefix}/requests/")
        try:
            return check_key(key).startswith((self.names.root, *deployment))
        except InvalidSpecError:
            return False

    def note_retired(self) -> None:
        """Note how many missing objects nobody needs because they were retired."""
        if self.retired is not None and self.num_retired:
            key, why = (
                self.names.retirement(self.retired.number),
                ", ".join(each.why for each in self.retired.retired.values()),
            )
            problem = f"{self.num_retired} objects do not exist"
            self._note(key, problem, "", RepairState.NOT_NEEDED, f"they were retired, as {why} says", "")

    def _is_retired(self, key: str) -> bool:
        """Return whether a record of retention covers the object with this whole key, and count it then."""
        is_retired = self.retired is not None and self.retired.covers(key.removeprefix(self.names.root))
        self.num_retired += is_retired
        return is_retired

    def exists(self, key: str) -> bool:
        """Return whether a whole key is one that a repair may touch, and has an object."""
        return self.is_ours(key) and self.store.head(key) is not None

    def _restore(
        self, key: str, data: bytes, problem: str, source: str, prover: str, *, damaged: bytes | None
    ) -> bytes:
        """Put proved bytes in their place, if the repair `is_applied`, or only note them as restorable; return them.

        `problem` says what is wrong with the object, `source` where the bytes are from, `prover` what proves them. What
        is stored there (`damaged`) goes to the quarantine first.
        """
        self.good[key] = data
        state, aside = RepairState.RESTORABLE, ""
        if self.is_applied:
            # Before the right bytes come: a key is created only where no object is.
            aside = self._set_aside(key) if damaged is not None or self.store.head(key) is not None else ""
            # Where the key is taken again, somebody else has repaired it meanwhile: the same bytes are no conflict.
            if not self.store.create(key, data) and self.store.get(key) != data:
                raise ConflictError(
                    f"{self.store.uri(key)} was written by somebody else meanwhile",
                    reason="REPAIR_CONFLICT",
                    remedy="repair the run again",
                )
            state = RepairState.RESTORED
        self._note(key, problem, source, state, f"proved by {prover}", aside)
        return data

    def _set_aside(self, key: str) -> str:
        """Move a damaged object to the quarantine and return its key there; empty if there is no object.

        CorruptObjectError if the copy cannot be read back: the object then stays in its place.
        """
        if self.store.head(key) is None:
            return ""
        with owned_directory("repair") as directory:
            path, check = directory / "damaged", directory / "check"
            self.store.get_file(key, path)
            sha256 = _hash_file(path)
            aside = self.names.quarantined(key, sha256)
            if self.store.head(aside) is None:
                self.store.put_file(aside, path)
            # Read back before anything is deleted: a store may accept what it does not keep.
            self.store.get_file(aside, check)
            if _hash_file(check) != sha256:
                raise CorruptObjectError(
                    f"{self.store.uri(aside)} is not what was written there: the damaged object stays in its place",
                    reason="QUARANTINE_FAILED",
                    remedy="see whether the object store keeps what it is given",
                )
        self.store.delete(key)
        return aside

    def _give_up(self, key: str, problem: str, tried: Sequence[str], without: str) -> None:
        """Note an object that cannot be restored: as not needed if `without` says why, else as refused, with what
        was tried.
        """
        if without:
            self._note(key, problem, "", RepairState.NOT_NEEDED, without, "")
            return
        where = [name for name, source in (("Redis", self.redis), ("a backup (--from)", self.backup)) if source is None]
        also = f"; not looked at: {' and '.join(where)}" if where else ""
        self._note(key, problem, "", RepairState.REFUSED, ("; ".join(tried) or "nobody has its bytes") + also, "")

    def _note(self, key: str, problem: str, source: str, state: RepairState, detail: str, aside: str) -> None:
        """Add a line to the repairs; `aside` is where the damaged bytes are now, else empty."""
        self.repairs.append(
            Repair(key=key, problem=problem, source=source, state=state, detail=detail, quarantine=aside)
        )


def of_hash(sha256: str) -> Judge:
    """Return a judge of bytes: it returns an empty text if they have this sha256 (hex), else what is wrong."""

    def judge(data: bytes) -> str:
        return "" if hashlib.sha256(data).hexdigest() == sha256 else "its bytes have another sha256"

    return judge


def decodes(kind: ObjectKind) -> Judge:
    """Return a judge of bytes: it returns an empty text if the codec of the kind reads them, else what is wrong.

    It is for objects that no hash names.
    """

    def judge(data: bytes) -> str:
        """Return why the codec refuses the bytes; empty if it reads them."""
        try:
            kind.decode(data, where="it")
        except CorruptObjectError as error:
            return error.message
        return ""

    return judge


def _read(store: ObjectStore, key: str) -> tuple[bytes | None, str]:
    """Return the bytes of an object and an empty text, or None and why it cannot be read."""
    try:
        return store.get(key), ""
    except NotFoundError:
        return None, MISSING
    except CorruptObjectError as error:
        return None, error.message


def _file_problem(store: ObjectStore, key: str, *, sha256: str, size_bytes: int) -> str:
    """Return in words what is wrong with a stored object, which is read whole; empty if it has this hash and size."""
    with owned_directory("repair") as directory:
        return _fetch(store, key, directory / "object", sha256=sha256, size_bytes=size_bytes)


def _fetch(store: ObjectStore, key: str, path: Path, *, sha256: str, size_bytes: int) -> str:
    """Download an object to `path`, and return what is wrong with it, in words.

    Empty if it has the size `size_bytes` and the hash `sha256` (hex).
    """
    found = store.head(key)
    if found is None:
        return MISSING
    if found.size_bytes != size_bytes:
        return f"it has {found.size_bytes} bytes instead of {size_bytes}"
    try:
        store.get_file(key, path)
    except NotFoundError:
        return MISSING
    except CorruptObjectError as error:
        return error.message
    return "" if _hash_file(path) == sha256 else "its bytes have another sha256"


def _hash_file(path: Path) -> str:
    """Return the sha256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The headers of a run, from the last to the first: each names the chain hash after the one before it.

Position = tuple[int, int]
"""(step, revision)."""
Header = tuple[bytes, batch_pb2.BatchHeader]


def repair_headers(bench: Workbench) -> dict[Position, Header]:
    """Examine every header, the last one first; return those that are right, or would be after the repair, in order.

    Only the store proves which one is right. What is in Redis, its events included, is a copy: it may be foreign. The
    result has stored bytes and decoded header by (step, revision).
    """
    claimed, found = _claimed_chains(bench), dict[Position, Header]()
    previous: bytes | None = None  # what the header after this one says of the chain after this one
    for at in reversed(_positions(bench)):
        prover, targets = f"header {_name(found, at)} after it", {previous} if previous is not None else set[bytes]()
        # Without the header after it, the chain hash is known from events and seals alone.
        if not targets:
            prover, targets = "the chain hash that archived events or a seal name", claimed[at[0]]
        held = bench.redis.headers.get(at) if bench.redis is not None else None
        data = bench.examine(
            bench.names.batch_header(*at),
            _judge(bench, at, targets),
            prover=prover if targets else "",
            candidates=[("Redis", held)],
        )
        if data is None:
            previous = None
            continue
        header = decode_header(data)
        found[at], previous = (data, header), header.previous_chain_hash
    return dict(sorted(found.items()))


def _judge(bench: Workbench, at: Position, targets: set[bytes]) -> Judge:
    """Return a judge of bytes: it returns an empty text if they are the header at (step, revision), else what is wrong.

    The header must give one of the chain hashes `targets`. Without targets any chain hash will do.
    """

    def judge(data: bytes) -> str:
        """Return in words why the bytes are not the wanted header; empty if they are."""
        try:
            header = decode_header(data)
        except CorruptObjectError as error:
            return error.message
        if (header.run_uid, header.step, header.revision) != (bench.names.uid, *at):
            return f"it is header {header.step}, revision {header.revision}, of run {header.run_uid!r}"
        if len(header.previous_chain_hash) != 32:
            return "it names no chain hash"
        if targets and chain_hash(header.previous_chain_hash, data) not in targets:
            return "it does not give the chain hash that others name"
        return ""

    return judge


def _positions(bench: Workbench) -> list[Position]:
    """Return (step, revision) of every header that is or has to be there, ascending, by store, Redis and backup.

    What comes after a gap of more than `MAX_GAP` is left out.
    """
    found = set(list_headers(bench.store, bench.names))
    if bench.redis is not None:
        found |= set(bench.redis.headers)
    if bench.backup is not None:
        found |= set(list_headers(bench.backup, bench.names))
    positions: list[Position] = []
    for step, revision in sorted(found):
        last = positions[-1] if positions else (step - 1, 0)
        if step - last[0] > MAX_GAP or revision > MAX_GAP:
            break  # so far ahead is nothing of this run
        positions += [(between, 0) for between in range(last[0] + 1, step)]
        positions += [(step, number) for number in range(last[1] + 1 if last[0] == step else 0, revision + 1)]
    return positions


def archived_events(bench: Workbench) -> Iterator[event_pb2.Event]:
    """Yield every archived event of the run that can be read."""
    for info in bench.store.list(bench.names.event_archive):
        with contextlib.suppress(CorruptObjectError):  # an archive is looked at by itself
            for entry in decode_archive(bench.read(info.key) or b"", info.key):
                with contextlib.suppress(CorruptObjectError):
                    yield decode_message(event_pb2.Event, entry.d, what="event", reason="EVENT_CORRUPT")


def _claimed_chains(bench: Workbench) -> defaultdict[int, set[bytes]]:
    """Return by step the chain hashes after it that archived events and seals name."""
    claimed: defaultdict[int, set[bytes]] = defaultdict(set)
    closing: set[bytes] = set()
    for event in archived_events(bench):
        with contextlib.suppress(ValueError):  # no hash: a foreign event
            if event.batch_committed.chain_hash:
                claimed[event.batch_committed.step].add(bytes.fromhex(event.batch_committed.chain_hash))
            if event.state_changed.chain_hash:
                closing.add(bytes.fromhex(event.state_changed.chain_hash))
    for info in bench.store.list(bench.names.seals):
        try:
            closing.add(bytes.fromhex(Seal.decode(bench.read(info.key) or b"", where=info.key).chain_hash))
        except (CorruptObjectError, ValueError):
            continue
    last = max((step for step, _ in list_headers(bench.store, bench.names)), default=-1)
    for step in (last, last + 1):  # the closing header has no batch_committed
        if closing and step not in claimed:
            claimed[step] = set(closing)
    return claimed


def _name(found: dict[Position, Header], at: Position) -> str:
    """Return the name, for messages, of the found header after the one at (step, revision)."""
    after = min((other for other in found if other > at), default=at)
    return f"{after[0]}.r{after[1]}" if after[1] else str(after[0])
