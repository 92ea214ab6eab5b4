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
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import zstandard

from millrace.decoding import decode_message, decompress
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, LogGoneError, Violation
from millrace.runlog.catalogue import EVENT_ARCHIVE
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.sealed import load_seal
from millrace.runlog.redis import damage
from millrace.runlog.redis.entry import LAST_ID, Entry, OnDamaged, damaged_entry, id_order, read_entry
from millrace.runlog.redis.log import RunLog, proof_of
from millrace.storage import ObjectStore
from millrace.v1 import event_pb2

logger = logging.getLogger(__name__)

_PAGE_ENTRIES = 512  # at most 128 MiB of 256 KiB each; events are of some hundred bytes
_OBJECT_BYTES = 8 << 20  # what is archived is cut into objects of about so many bytes
_MAX_OBJECT_BYTES = 16 << 20
_MAX_OBJECT_ENTRIES = 2 * _PAGE_ENTRIES
_PARALLEL_GETS = 8
_LENGTH = struct.Struct("<I")
_ID = re.compile(r"[0-9]{1,20}-[0-9]{1,20}")


class EventArchive:
    """Writes the events of one run to the store. Of one event loop; several archivers at once do no harm."""

    def __init__(
        self,
        log: RunLog,
        *,
        on_damaged: OnDamaged | None = None,
        on_written: Callable[[str], None] = lambda key: None,
    ) -> None:
        """Create the archive.

        `on_damaged` is called for every entry that is left out, again at every look until it is removed; `on_written`
        with the key of each object that was written, after the run's prefix, from another thread.
        """
        self._log = log
        self._on_damaged = on_damaged
        self._on_written = on_written
        self._last: Entry | None = None
        self._is_loaded = False

    async def archive(self) -> int:
        """Write the events that the store lacks, and return how many. One Redis command when there are none.

        `LogGoneError` also when Redis has lost events that the store has: what it numbers now would collide
        with them, and `open_or_rebuild` has to begin a new generation.
        """
        if not self._is_loaded:
            self._last = await asyncio.to_thread(load_newest_archived, self._log.store, self._log.names)
            self._is_loaded = True
        count = 0
        page = await self._read_new()
        while page:
            entries = await asyncio.to_thread(_readable, page, self._on_damaged)
            if entries:
                await asyncio.to_thread(self._write, entries)
                self._last = entries[-1]
                count += len(entries)
                page = await self._read_new()
            else:  # nothing but damaged entries: read what follows them
                page = await read_page(self._log, f"({page[-1].id}")
                await self._log.check()
        return count

    async def _read_new(self) -> list[Entry]:
        first = self._last.id if self._last else "-"
        entries = await read_page(self._log, first)
        await self._log.check()
        entries = await damage.check_entries(self._log, Stream.EVENTS, entries)
        if self._last is None:
            return entries
        if not entries or (entries[0].id, entries[0].h) != (self._last.id, self._last.h):
            proof_of(self._log).instance = ""
            raise LogGoneError(
                f"run {self._log.uid}: Redis has lost event {self._last.id}, which the store has",
                reason="LOG_BEHIND_STORE",
                remedy="rebuild the log from the object store",
            )
        # The first one is the last that was archived: it proves that Redis has what follows.
        return entries[1:]

    def _write(self, entries: Sequence[Entry]) -> None:
        """Write entries as objects of a bounded size (blocking)."""
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
    """Return the entries of the event stream from the id `first` on, at most a page.

    `(` in front of the id excludes it. A damaged entry has a `damage`.
    """
    if first == f"({LAST_ID}":
        return []
    key = log.names.stream(Stream.EVENTS)
    found = await log.command("reading events", "XRANGE", key, first, "+", "COUNT", _PAGE_ENTRIES)
    return [read_entry(key, id_, fields) for id_, fields in found]


def load_archived_events(store: ObjectStore, names: Names) -> list[Entry]:
    """Return every archived event, in the order of the ids, each id once (blocking)."""
    with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
        parts = pool.map(lambda key: decode_archive(_get(store, key), store.uri(key)), _objects(store, names))
        found: dict[str, Entry] = {}
        for entry in (entry for part in parts for entry in part):
            # Objects of two archivers may overlap.
            found.setdefault(entry.id, entry)
    return sorted(found.values(), key=lambda entry: id_order(entry.id))


class ArchiveFollower:
    """Reads what is archived of a run's events, and later what was archived since. Blocking; of one thread."""

    def __init__(self, store: ObjectStore, names: Names) -> None:
        self._store = store
        self._names = names
        self._objects: set[str] = set()
        self._ids: set[str] = set()

    def read(self) -> list[Entry]:
        """Return the events that were archived since the last call, in the order of their ids, each id once."""
        new = [key for key in _objects(self._store, self._names) if key not in self._objects]
        with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
            parts = list(pool.map(lambda key: decode_archive(_get(self._store, key), self._store.uri(key)), new))
        found = {entry.id: entry for part in parts for entry in part if entry.id not in self._ids}
        self._objects.update(new)
        self._ids.update(found)
        return sorted(found.values(), key=lambda entry: id_order(entry.id))


def load_newest_archived(store: ObjectStore, names: Names) -> Entry | None:
    """Return the archived event with the highest id; None if none is archived (blocking)."""
    # A name ends in its last id, padded to sort as text.
    keys = sorted(_objects(store, names), key=lambda key: key.rpartition("_")[2])
    if not keys:
        return None
    where = store.uri(keys[-1])
    entries = decode_archive(_get(store, keys[-1]), where)
    if not entries:
        raise _corrupt(where, "it is empty")
    return entries[-1]


def _get(store: ObjectStore, key: str) -> bytes:
    return store.get(key, max_bytes=_MAX_OBJECT_BYTES)


def _objects(store: ObjectStore, names: Names) -> list[str]:
    """Return the keys of the archive's objects.

    Others under its prefix, and what came after the run's seal, are logged.
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
    """Return the bytes of an archive object with these entries."""
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(_fields(entries)))


def _fields(entries: Iterable[Entry]) -> Iterator[bytes]:
    for entry in entries:
        for field in (entry.id.encode(), str(entry.v).encode(), entry.tp.encode(), entry.d):
            yield _LENGTH.pack(len(field))
            yield field


def decode_archive(data: bytes, where: str) -> list[Entry]:
    """Decode the entries of an archive object; `CorruptObjectError`, naming `where`, if it is damaged."""
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
    text = id_.decode()
    if not _ID.fullmatch(text) or len(version) > 9:
        raise ValueError(f"{text[:40]!r} is no id of an event, or {version[:9]!r} no format")
    return Entry(id=text, v=int(version), h=hashlib.sha256(raw).hexdigest(), d=raw, tp=tp.decode())


_REMEDY = "restore that object from a replica of the bucket; without it these events are lost"


def _corrupt(where: str, cause: str) -> CorruptObjectError:
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
    """Reads the events of a run in their order.

    A cursor from before a rebuild stays good: what follows it in the rebuilt log includes everything that it has not
    seen, and may include, under new cursors and with equal (writer, writer_sequence), what it has. The same cursor in
    another log instance of the *same* generation may be another event's: a reader that sees the server restarted reads
    again from the first event and leaves out what it knows.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log

    async def read(self, *, after: str = "", count: int = 256, block_s: float = 0.0) -> Sequence[event_pb2.Event]:
        """Return events after the cursor `after` ("" = from the oldest), each with its own cursor.

        Damaged ones are left out. Waits up to `block_s` ≤ 5 seconds for the first one. `InvalidStateError`
        (CURSOR_EXPIRED, metadata `oldest_cursor`) when events after the cursor were trimmed, `InvalidSpecError`
        if `after` is no cursor.
        """
        if after and not (_CURSOR.fullmatch(after) and max(id_order(after)) < 1 << 64):
            raise InvalidSpecError(
                [Violation(field="after", value=after[:100], message="is no cursor of this run", source="request")]
            )
        entries = await self._log.read(Stream.EVENTS, after=after or "0", count=count, block_s=block_s)
        # A gap may be a trimmed or a damaged entry: only the first is an error.
        if after and entries and not _is_next(after, entries[0].id):
            await self._require_untrimmed(after)
        while entries:
            decoded = (readable_event(entry) for entry in entries)
            if found := [event for event in decoded if event is not None]:
                return found
            entries = await self._log.read(Stream.EVENTS, after=entries[-1].id, count=count)
        return []

    async def _require_untrimmed(self, after: str) -> None:
        """Raise InvalidStateError if all remaining events come after the cursor `after`: those between were trimmed.

        A gap after an event that is still there is a damaged entry, and no error.
        """
        oldest = await self._log.read(Stream.EVENTS, after="0", count=1)
        if oldest and id_order(oldest[0].id) > id_order(after):
            raise InvalidStateError(
                f"events after the cursor {after} were trimmed; the oldest is {oldest[0].id}",
                reason="CURSOR_EXPIRED",
                remedy="watch again without a cursor",
                metadata={"oldest_cursor": oldest[0].id},
            )


def _is_next(cursor: str, id_: str) -> bool:
    """Return whether no event can be between two ids: `<generation>-*` is gapless and begins at 0.

    A newer generation begins with what a rebuild left; what the older one had after the cursor is in it again.
    """
    generation, number = (int(part) for part in cursor.split("-"))
    next_generation, next_number = (int(part) for part in id_.split("-"))
    if next_generation == generation:
        return next_number == number + 1
    return next_number == 0


def readable_event(entry: Entry) -> event_pb2.Event | None:
    """Return the event of an entry, with its cursor; None if it is damaged."""
    try:
        return None if entry.damage else decode_event(entry)
    except CorruptObjectError:
        return None


def decode_event(entry: Entry) -> event_pb2.Event:
    """Return the event that an entry holds, with its cursor; `CorruptObjectError` if it holds none."""
    event = decode_message(
        event_pb2.Event,
        entry.d,
        what=f"event {entry.id}",
        reason="EVENT_CORRUPT",
        max_bytes=MAX_EVENT_BYTES + 64,  # the number is added to what was measured
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
    """Return the entry as it is, or a placeholder with the reason if no event can be decoded from it."""
    try:
        if not entry.damage:
            decode_event(entry)
    except CorruptObjectError as error:
        return damaged_entry(entry.id, error)
    return entry
