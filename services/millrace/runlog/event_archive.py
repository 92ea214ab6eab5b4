"""The events of a run, read by cursor, and their archive in the store, from which Redis gets them back.

An archive object holds consecutive entries of the event stream, zstd-compressed: for each its id, format, trace context
and the raw bytes whose sha256 the stream holds, each as a 32-bit little-endian length and so many bytes. Objects are
create-only and named by their first and last id; those of two archivers may overlap. An entry that holds no event is
left out: it would be in the way of every later reader.
"""

import asyncio
import hashlib
import logging
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import zstandard

from millrace.decoding import decode_message, decompress
from millrace.errors import (
    CorruptObjectError,
    InvalidSpecError,
    InvalidStateError,
    LogGoneError,
    MillraceError,
    NotFoundError,
    Violation,
)
from millrace.runlog.catalogue import EVENT_ARCHIVE
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.sealed import load_seal
from millrace.runlog.redis import damage
from millrace.runlog.redis.entry import LAST_ID, Entry, OnDamaged, damaged_entry, id_order, read_entry
from millrace.runlog.redis.log import RunLog, proof_of
from millrace.storage import ObjectStore
from millrace.telemetry import faults
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

KEPT_EVENTS = 2000
"""Archived events that Redis keeps, about 0.6 MB: who watches a run reads older ones from the store."""
_PAGE_ENTRIES = 512  # at most 128 MiB of 256 KiB each; events are of some hundred bytes
_OBJECT_BYTES = 8 << 20  # what is archived is cut into objects of about so many bytes
_MAX_OBJECT_BYTES = 16 << 20
_MAX_OBJECT_ENTRIES = 2 * _PAGE_ENTRIES
_PARALLEL_GETS = 8
_AHEAD = 15  # objects that a reader fetches, compressed, beside the one that it needs
_LENGTH = struct.Struct("<I")
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")
_Span = tuple[tuple[int, int], tuple[int, int], str]
"""First id, last id and key of an archive object."""


class EventArchive:
    """Writes the events of one run to the store. Of one event loop; several archivers at once do no harm."""

    def __init__(
        self,
        log: RunLog,
        *,
        on_damaged: OnDamaged | None = None,
        on_written: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Create the archive of a run's events.

        `on_damaged` is called for every entry that is left out, again at every look until it is removed; `on_written`
        with the key of each object that was written, without the run's prefix, from another thread.
        """
        self._log = log
        self._on_damaged = on_damaged
        self._on_written = on_written
        self._last: Entry | None = None
        self._oldest = ""
        """Id below which the last trim removed everything."""
        self._is_loaded = False

    async def trim(self) -> int:
        """Remove archived events from Redis until about `KEPT_EVENTS` of the newest are left; return how many went.

        The newest archived one stays: it proves that Redis has what follows it. Events of an earlier generation of
        the log go once so many of the current one are archived.
        """
        generation, number = id_order(self._last.id) if self._last else (0, 0)
        # Ids of a generation have no gaps, so that the difference of two is a number of events.
        oldest = f"{generation}-{number - KEPT_EVENTS}"
        if number <= KEPT_EVENTS or oldest == self._oldest:
            return 0
        faults.reach(faults.Point.ORCHESTRATOR_EVENTS_ARCHIVED)
        num_removed = await self._log.trim_events(oldest)
        # Only now, so that a trim that failed is tried again.
        self._oldest = oldest
        faults.reach(faults.Point.ORCHESTRATOR_EVENTS_TRIMMED)
        return num_removed

    async def archive(self) -> int:
        """Write to the store the events that it lacks, and return how many.

        It takes one Redis command when there are none. `LogGoneError` also when Redis has lost events that the store
        has: what it numbers now would collide with them, and `open_or_rebuild` has to begin a new generation.
        """
        if not self._is_loaded:
            self._last = await asyncio.to_thread(load_newest_archived, self._log.store, self._log.names)
            self._is_loaded = True
        count = 0
        page = await self._read_new()
        while page:
            entries = await asyncio.to_thread(_readable, page, self._on_damaged)
            if entries:
                # Written before `_last` moves: after a failure the next call begins at the same entry, and overlapping
                # objects do no harm.
                await asyncio.to_thread(self._write, entries)
                self._last = entries[-1]
                count += len(entries)
                page = await self._read_new()
            # The page has nothing but damaged entries, which stay in Redis until they are removed: read what follows
            # them.
            else:
                page = await read_page(self._log, f"({page[-1].id}")
                await self._log.check()
        return count

    async def _read_new(self, *, is_again: bool = False) -> list[Entry]:
        """Return a page of the events in Redis that follow the event which this archiver knows as the last archived
        one.

        If Redis does not have that last one any more, it looks a second time, from the newest event in the store on,
        because another archiver may have come further. `is_again` says that this is the second look. LogGoneError if
        Redis lacks that event, too.
        """
        first = self._last.id if self._last else "-"
        entries = await read_page(self._log, first)
        await self._log.check()
        entries = await damage.check_entries(self._log, Stream.EVENTS, entries)
        if self._last is None:
            return entries
        if not entries or (entries[0].id, entries[0].h) != (self._last.id, self._last.h):
            # Another archiver may have come further, and have trimmed what this one archived last.
            newest = await asyncio.to_thread(load_newest_archived, self._log.store, self._log.names)
            if not is_again and newest is not None and newest.id != self._last.id:
                self._last = newest
                return await self._read_new(is_again=True)
            # Who opens the log next must compare this copy with the store.
            proof_of(self._log).instance = ""
            raise LogGoneError(
                f"run {self._log.uid}: Redis has lost event {self._last.id}, which the store has",
                reason="LOG_BEHIND_STORE",
                remedy="rebuild the log from the object store",
            )
        # The first one is the last that was archived: it proves that Redis has what follows.
        return entries[1:]

    def _write(self, entries: Sequence[Entry]) -> None:
        """Write entries to the store as objects of a bounded size (blocking)."""
        part: list[Entry] = []
        size = 0
        for entry in entries:
            if part and size + len(entry.d) > _OBJECT_BYTES:
                self._write_object(part)
                part, size = [], 0
            part.append(entry)
            size += len(entry.d)
        self._write_object(part)

    def _write_object(self, entries: Sequence[Entry]) -> None:
        """Create one object with these entries, and report its key (blocking). One that exists stays."""
        names = self._log.names
        key = names.archived_events(entries[0].id, entries[-1].id)
        self._log.store.create(key, encode_archive(entries))
        self._on_written(key.removeprefix(names.root))


def _readable(page: Iterable[Entry], on_damaged: OnDamaged | None) -> list[Entry]:
    """Return the entries that hold events; call `on_damaged` with each of the others."""
    entries = []
    for entry in map(with_damage, page):
        if not entry.damage:
            entries.append(entry)
        elif on_damaged is not None:
            on_damaged(Stream.EVENTS, entry)
    return entries


async def read_page(log: RunLog, first: str) -> list[Entry]:
    """Return the entries of a run's event stream in Redis from the id `first` on, at most a page.

    "-" begins with the oldest; `(` in front of an id excludes it. A damaged entry has a `damage`.
    """
    if first == f"({LAST_ID}":
        return []
    key = log.names.stream(Stream.EVENTS)
    found = await log.command("reading events", "XRANGE", key, first, "+", "COUNT", _PAGE_ENTRIES)
    return [read_entry(key, id_, fields) for id_, fields in found]


def load_archived_events(store: ObjectStore, names: Names) -> list[Entry]:
    """Return every event of the run that is archived in the store, in the order of the ids, each id once (blocking)."""
    with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
        parts = pool.map(lambda key: decode_archive(_get(store, key), store.uri(key)), _objects(store, names))
        found: dict[str, Entry] = {}
        for entry in (entry for part in parts for entry in part):
            # Objects of two archivers may overlap.
            found.setdefault(entry.id, entry)
    return sorted(found.values(), key=lambda entry: id_order(entry.id))


class ArchivePages:
    """Reads archived events by cursor, and fetches objects ahead in parallel. Blocking; of one reader at a time."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._store = store
        self._names = names
        self._spans: list[_Span] = []
        """Known objects, sorted by their first ids."""
        self._highest: list[tuple[int, int]] = []
        """For each of `_spans` the highest id in it and in those before it: this is sorted, too."""
        self._fetched: dict[str, bytes | MillraceError] = {}
        self._decoded: dict[str, list[Entry]] = {}
        self._lost: set[str] = set()
        """Objects that were found damaged or missing, which are not fetched again."""

    def read(self, *, after: str, before: str, count: int) -> list[Entry]:
        """Return the first `count` archived events with ids above `after` and below `before`, in order; [] if none.

        An empty `after` is before all. An object that is damaged or missing is left out with a warning in the log. The
        archive is listed again before events are left out, and when no object that is known holds such events.
        """
        lowest, highest = id_order(after) if after else (0, 0), id_order(before)
        found = self._read_known(lowest, highest)
        if not found or not _follows(after, found[0].id):
            self._spans = sorted(_span_of(self._names, key) for key in _objects(self._store, self._names))
            self._highest = list(accumulate((last for _, last, _ in self._spans), max))
            found = self._read_known(lowest, highest)
        return found[:count]

    def begins_by(self, cursor: str) -> bool:
        """Return whether an object that was listed at the last read begins at or before the cursor."""
        return bool(self._spans) and self._spans[0][0] <= id_order(cursor)

    def _read_known(self, lowest: tuple[int, int], highest: tuple[int, int]) -> list[Entry]:
        """Return the events between two ids of the first known objects that hold any, in order."""
        position = lowest
        while True:
            at = bisect_right(self._highest, position)
            if at == len(self._spans) or self._spans[at][0] >= highest:
                return []
            # Objects of two archivers may overlap: up to its end the first one is complete with all that begin in it.
            end = self._spans[at][1]
            stop = bisect_right(self._spans, end, key=lambda span: span[0])
            keys = [key for first, last, key in self._spans[at:stop] if last > position and first < highest]
            ahead = [key for first, _, key in self._spans[stop : stop + _AHEAD] if first < highest]
            self._decoded = {
                key: self._decoded[key] if key in self._decoded else self._load(key, [*keys, *ahead]) for key in keys
            }
            found = {entry.id: entry for entries in self._decoded.values() for entry in entries}
            ordered = sorted((id_order(id_), id_) for id_ in found)
            if page := [found[id_] for at, id_ in ordered if position < at < highest and at <= end]:
                return page
            position = end

    def _load(self, key: str, ahead: Sequence[str]) -> list[Entry]:
        """Return the events of an object; [], with a warning when it is found out, if it is damaged or missing.

        An object that was not fetched yet is fetched with those of `ahead`, which are the next ones that are read.
        """
        if key in self._lost:
            return []
        if key not in self._fetched:
            # What a reader has passed, or will not read next, is dropped: `_AHEAD` bounds the memory.
            self._fetched = {each: self._fetched[each] for each in ahead if each in self._fetched}
            wanted = [each for each in ahead if each not in self._fetched and each not in self._lost]
            with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
                self._fetched.update(zip(wanted, pool.map(self._fetch, wanted), strict=True))
        data = self._fetched.pop(key)
        try:
            if isinstance(data, MillraceError):
                raise data
            return decode_archive(data, self._store.uri(key))
        except (CorruptObjectError, NotFoundError) as error:
            logger.warning(
                "an object of the archive of events is damaged or missing: its events are lost to this reader",
                extra={"uid": self._names.uid, "key": key, "error": str(error)},
            )
            self._lost.add(key)
            return []

    def _fetch(self, key: str) -> bytes | MillraceError:
        """Return an object's bytes, or the error if it is missing or too large."""
        try:
            return _get(self._store, key)
        except (CorruptObjectError, NotFoundError) as error:
            return error


def _span_of(names: Names, key: str) -> _Span:
    """Return the first and the last id of an archive object, which its name holds, and its key."""
    first, _, last = key.removeprefix(names.event_archive).removesuffix(".zst").partition("_")
    return id_order(first), id_order(last), key


class ArchiveFollower:
    """Reads what is archived of a run's events, and later what was archived since. Blocking; of one thread."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        """Begin before the first archived event of the run; nothing is read yet."""
        self._store = store
        self._names = names
        self._objects: set[str] = set()
        self._ids: set[str] = set()

    def read(self) -> list[Entry]:
        """Return the events that were archived since the last call, in the order of their ids, each id once (blocking).

        The first call returns all that are archived.
        """
        new = [key for key in _objects(self._store, self._names) if key not in self._objects]
        with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
            parts = list(pool.map(lambda key: decode_archive(_get(self._store, key), self._store.uri(key)), new))
        found = {entry.id: entry for part in parts for entry in part if entry.id not in self._ids}
        self._objects.update(new)
        self._ids.update(found)
        return sorted(found.values(), key=lambda entry: id_order(entry.id))


def load_newest_archived(store: ObjectStore, names: Names) -> Entry | None:
    """Return the archived event with the highest id; None if none is archived (blocking). One object is read."""
    # A name ends in its last id, padded to sort as text.
    # By the last id and not by the key, whose first id comes first: objects of two archivers may overlap.
    keys = sorted(_objects(store, names), key=lambda key: key.rpartition("_")[2])
    if not keys:
        return None
    where = store.uri(keys[-1])
    entries = decode_archive(_get(store, keys[-1]), where)
    if not entries:
        raise _corrupt(where, "it is empty")
    return entries[-1]


def _get(store: ObjectStore, key: str) -> bytes:
    """Return an archive object's bytes; CorruptObjectError if it is larger than any archive."""
    return store.get(key, max_bytes=_MAX_OBJECT_BYTES)


def _objects(store: ObjectStore, names: Names) -> list[str]:
    """Return the keys of the archive's objects, in order.

    Foreign objects under its prefix, and those that came after the run's seal, are left out; a warning counts them.
    """
    keys = [info.key for info in store.list(names.event_archive)]
    ours = [key for key in keys if EVENT_ARCHIVE.parse(key.removeprefix(names.root))]
    seal = load_seal(store, names)
    if seal is not None and seal.others is not None:
        ours = [key for key in ours if key.removeprefix(names.root) in seal.objects]
    if len(ours) < len(keys):
        logger.warning(
            "foreign objects in the archive of events", extra={"uid": names.uid, "count": len(keys) - len(ours)}
        )
    return ours


def encode_archive(entries: Sequence[Entry]) -> bytes:
    """Return the bytes of an archive object with these entries: compressed, with a checksum."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(_fields(entries)))


def _fields(entries: Iterable[Entry]) -> Iterator[bytes]:
    """Yield the parts of an archive object before compression: each field's length as 32 bits, then its bytes."""
    for entry in entries:
        for field in (entry.id.encode(), str(entry.v).encode(), entry.tp.encode(), entry.d):
            yield _LENGTH.pack(len(field))
            yield field


def decode_archive(data: bytes, where: str) -> list[Entry]:
    """Return the entries in the bytes of an archive object; `CorruptObjectError`, naming `where`, if it is damaged."""
    # A view, because each slice of bytes would copy the whole rest.
    rest = memoryview(
        decompress(data, what=where, reason="EVENT_ARCHIVE_CORRUPT", remedy=_REMEDY, max_bytes=_MAX_OBJECT_BYTES)
    )
    entries: list[Entry] = []
    try:
        while rest:
            if len(entries) == _MAX_OBJECT_ENTRIES:
                raise ValueError(f"it has more than {_MAX_OBJECT_ENTRIES} events")
            fields = []
            for _ in range(4):
                (length,) = _LENGTH.unpack_from(rest)
                end = _LENGTH.size + length
                if end > len(rest):
                    raise ValueError("it ends in the middle of an event")
                fields.append(bytes(rest[_LENGTH.size : end]))
                rest = rest[end:]
            entries.append(_entry(*fields))
    except (struct.error, ValueError) as error:
        raise _corrupt(where, str(error)) from error
    return entries


def _entry(id_: bytes, version: bytes, tp: bytes, raw: bytes) -> Entry:
    """Return the entry of one archived event from its four fields: id, format, trace context, bytes.

    ValueError if malformed.
    """
    text = id_.decode()
    if not _ID.fullmatch(text) or len(version) > 9:
        raise ValueError(f"{text[:40]!r} is no id of an event, or {version[:9]!r} no format")
    return Entry(id=text, v=int(version), h=hashlib.sha256(raw).hexdigest(), d=raw, tp=tp.decode())


_REMEDY = "restore that object from a replica of the bucket; without it these events are lost"


def _corrupt(where: str, cause: str) -> CorruptObjectError:
    """Make the error for an archive object (`where`) that cannot be decoded; `cause` says why."""
    return CorruptObjectError(
        f"{where} holds no archived events: {cause}", reason="EVENT_ARCHIVE_CORRUPT", remedy=_REMEDY
    )


# The events of a run, read by cursor.

MAX_EVENT_BYTES = 256 * 1024
"""Largest event that is written, but for its number: an event is a report, not a payload."""
MAX_SEQUENCE = 1 << 53
"""Highest number of an event that is read; Redis' scripts count exactly up to here."""
_CURSOR = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class EventReader:
    """Reads the events of a run in their order: those that Redis does not keep any more from the archive in the store.

    A cursor from before a rebuild stays good: what follows it in the rebuilt log includes everything that it has not
    seen, and may include, under new cursors and with equal (writer, writer_sequence), what it has. The same cursor in
    another log instance of the *same* generation may be another event's: a reader that sees the server restarted reads
    again from the first event and leaves out what it knows.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._archive = ArchivePages(log.store, log.names)

    async def read(self, *, after: str = "", count: int = 256, block_s: float = 0.0) -> Sequence[event_pb2.Event]:
        """Return at most `count` events after the cursor `after` ("" = from the oldest), each with its own cursor.

        Damaged ones, and those of archive objects that are damaged or missing, are left out; of what is missing in the
        archive the log has a warning. Waits up to `block_s` ≤ 5 seconds for the first one; empty if none comes.
        `InvalidStateError` (CURSOR_EXPIRED, metadata `oldest_cursor`) when events after the cursor were trimmed and are
        in no archive, `InvalidSpecError` if `after` is no cursor.
        """
        if after and not (_CURSOR.fullmatch(after) and max(id_order(after)) < 1 << 64):
            raise InvalidSpecError(
                [Violation(field="after", value=after[:100], message="is no cursor of this run", source="request")]
            )
        entries = await self._read_entries(after, count=count, block_s=block_s)
        while entries:
            decoded = (readable_event(entry) for entry in entries)
            if found := [event for event in decoded if event is not None]:
                return found
            entries = await self._read_entries(entries[-1].id, count=count, block_s=0.0)
        return []

    async def _read_entries(self, after: str, *, count: int, block_s: float) -> list[Entry]:
        """Return at most `count` entries after the cursor `after`, from Redis or from the archive.

        It waits up to `block_s` seconds for a first entry.
        """
        entries = await self._log.read(Stream.EVENTS, after=after or "0", count=count, block_s=block_s)
        # A gap is of events that were trimmed, which the archive has, or of damaged ones.
        if entries and entries[0].id != _next_id(after):
            before = entries[0].id
            if archived := await asyncio.to_thread(self._archive.read, after=after, before=before, count=count):
                if not _follows(after, archived[0].id):
                    self._report_hole(after, archived[0].id)
                return archived
            if after and not _is_next(after, before):
                await self._require_untrimmed(after)
        return entries

    async def _require_untrimmed(self, after: str) -> None:
        """Raise InvalidStateError if all remaining events come after the cursor `after`: those between were trimmed.

        A gap after an event that is still there, in Redis or in the archive, is of damaged entries or of a damaged
        archive object, and no error; the latter gap is reported. The archive was read right before.
        """
        oldest = await self._log.read(Stream.EVENTS, after="0", count=1)
        if not oldest or id_order(oldest[0].id) <= id_order(after):
            return
        if self._archive.begins_by(after):
            self._report_hole(after, oldest[0].id)
            return
        raise InvalidStateError(
            f"events after the cursor {after} were trimmed; the oldest is {oldest[0].id}",
            reason="CURSOR_EXPIRED",
            remedy="watch again without a cursor",
            metadata={"oldest_cursor": oldest[0].id},
        )

    def _report_hole(self, after: str, before: str) -> None:
        """Log that there is no event between the cursor `after` ("" = the beginning) and the id `before`."""
        logger.warning(
            "events are missing: they were damaged, or their object of the archive is damaged or missing",
            extra={"uid": self._log.uid, "after": after, "before": before},
        )


def _next_id(cursor: str) -> str:
    """Return the id that follows the cursor in its generation of the log; for an empty cursor the first id of all."""
    generation, _, number = cursor.partition("-")
    return f"{generation}-{int(number) + 1}" if cursor else "1-0"


def _follows(cursor: str, id_: str) -> bool:
    """Return whether no event can be between the cursor ("" = before all) and the id `id_`."""
    return _is_next(cursor, id_) if cursor else id_.endswith("-0")


def _is_next(cursor: str, id_: str) -> bool:
    """Return whether no event can be between the ids `cursor` and `id_`: ids `<generation>-*` are gapless and begin at
    0.

    A newer generation begins with what a rebuild left; what the older one had after the cursor is in it again.
    """
    generation, number = (int(part) for part in cursor.split("-"))
    next_generation, next_number = (int(part) for part in id_.split("-"))
    if next_generation == generation:
        return next_number == number + 1
    return next_number == 0


def readable_event(entry: Entry) -> event_pb2.Event | None:
    """Return the event of an entry, with its cursor set; None if the entry is damaged or holds no event."""
    try:
        return None if entry.damage else decode_event(entry)
    except CorruptObjectError:
        return None


def decode_event(entry: Entry) -> event_pb2.Event:
    """Return the event that an entry holds, with its cursor set.

    `CorruptObjectError` if it holds none, or no valid time.
    """
    event = decode_message(
        event_pb2.Event,
        entry.d,
        what=f"event {entry.id}",
        reason="EVENT_CORRUPT",
        # A writer measures its event before it sets the number.
        max_bytes=MAX_EVENT_BYTES + 64,
    )
    if event.writer_sequence > MAX_SEQUENCE:
        raise CorruptObjectError(
            f"event {entry.id} has the number {event.writer_sequence} of its writer", reason="EVENT_CORRUPT"
        )
    try:
        event.time.ToNanoseconds()
    except ValueError as error:  # no time that has a date: nobody could show the event
        raise CorruptObjectError(f"event {entry.id} has no valid time: {error}", reason="EVENT_CORRUPT") from error
    event.cursor = entry.id
    return event


def with_damage(entry: Entry) -> Entry:
    """Return the entry as it is, or, if no event can be decoded from it, a placeholder with the reason in `damage`."""
    try:
        if not entry.damage:
            decode_event(entry)
    except CorruptObjectError as error:
        return damaged_entry(entry.id, error)
    return entry
