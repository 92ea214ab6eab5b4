"""The events of a run in the store: what Redis had is there again after a wipe.

An archive object holds consecutive entries of the event stream, zstd-compressed: for each its id, format, trace context
and the raw bytes whose sha256 the stream holds, each as a 32-bit little-endian length and so many bytes. Objects are
create-only and named by their first and last id; those of two archivers may overlap.
"""

import asyncio
import hashlib
import logging
import struct
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import zstandard

from millrace.errors import CorruptObjectError, LogGoneError
from millrace.runlog.entry import Entry, decode_entry, id_order
from millrace.runlog.log import RunLog
from millrace.runlog.names import Names, Stream
from millrace.runlog.proof import proof_of
from millrace.storage import ObjectStore

logger = logging.getLogger(__name__)

_PAGE_ENTRIES = 512  # at most 128 MiB of 256 KiB each; events are of some hundred bytes
_MAX_OBJECT_BYTES = 256 << 20
_PARALLEL_GETS = 8
_LENGTH = struct.Struct("<I")


class EventArchive:
    """Writes the events of one run to the store. Of one event loop; several archivers at once do no harm."""

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._last: Entry | None = None
        self._is_loaded = False

    async def archive(self) -> int:
        """Write the events that the store lacks; returns how many. One Redis command when there are none.

        `LogGoneError` also when Redis has lost events that the store has: what it numbers now would collide with them,
        and `open_or_rebuild` has to begin a new generation.
        """
        if not self._is_loaded:
            self._last = await asyncio.to_thread(load_newest_archived, self._log.store, self._log.names)
            self._is_loaded = True
        count = 0
        while entries := await self._read_new():
            key = self._log.names.archived_events(entries[0].id, entries[-1].id)
            await asyncio.to_thread(self._log.store.create, key, _encode(entries))
            self._last = entries[-1]
            count += len(entries)
        return count

    async def _read_new(self) -> list[Entry]:
        first = self._last.id if self._last else "-"
        entries = await read_page(self._log, first)
        await self._log.check()
        if self._last is None:
            return entries
        if not entries or (entries[0].id, entries[0].h) != (self._last.id, self._last.h):
            proof_of(self._log).instance = ""
            raise LogGoneError(
                f"run {self._log.uid}: Redis has lost event {self._last.id}, which the store has",
                reason="LOG_BEHIND_STORE",
                remedy="rebuild the log from the object store",
            )
        return entries[1:]


async def read_page(log: RunLog, first: str) -> list[Entry]:
    """The entries of the event stream from the id `first` on, at most a page."""
    key = log.names.stream(Stream.EVENTS)
    found = await log.command("reading events", "XRANGE", key, first, "+", "COUNT", _PAGE_ENTRIES)
    return [decode_entry(key, id_, fields) for id_, fields in found]


def load_archived_events(store: ObjectStore, names: Names) -> list[Entry]:
    """Every archived event, in the order of the ids, each id once (blocking)."""
    keys = [info.key for info in store.list(names.event_archive)]
    with ThreadPoolExecutor(_PARALLEL_GETS, thread_name_prefix="events") as pool:
        parts = pool.map(lambda key: _decode(store.get(key), store.uri(key)), keys)
        found: dict[str, Entry] = {}
        for entry in (entry for part in parts for entry in part):
            found.setdefault(entry.id, entry)
    return sorted(found.values(), key=lambda entry: id_order(entry.id))


def load_newest_archived(store: ObjectStore, names: Names) -> Entry | None:
    """The archived event with the highest id; None if none is archived (blocking)."""
    # A name ends in its last id, padded to sort as text.
    keys = sorted((info.key for info in store.list(names.event_archive)), key=lambda key: key.rpartition("_")[2])
    return list(_decode(store.get(keys[-1]), store.uri(keys[-1])))[-1] if keys else None


def _encode(entries: Sequence[Entry]) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_checksum=True).compress(b"".join(_fields(entries)))


def _fields(entries: Iterable[Entry]) -> Iterator[bytes]:
    for entry in entries:
        for field in (entry.id.encode(), str(entry.v).encode(), entry.tp.encode(), entry.d):
            yield _LENGTH.pack(len(field))
            yield field


def _decode(data: bytes, where: str) -> Iterator[Entry]:
    try:
        if not 0 <= (size := zstandard.frame_content_size(data)) <= _MAX_OBJECT_BYTES:
            raise ValueError(f"it says that it has {size} bytes, which is not from 0 to {_MAX_OBJECT_BYTES}")
        rest = memoryview(zstandard.ZstdDecompressor().decompress(data, max_output_size=_MAX_OBJECT_BYTES))
        while rest:
            fields = []
            for _ in range(4):
                (length,) = _LENGTH.unpack_from(rest)
                end = _LENGTH.size + length
                if end > len(rest):
                    raise ValueError("it ends in the middle of an event")
                fields.append(bytes(rest[_LENGTH.size : end]))
                rest = rest[end:]
            id_, version, tp, raw = fields
            entry_hash = hashlib.sha256(raw).hexdigest()
            yield Entry(id=id_.decode(), v=int(version), h=entry_hash, d=raw, tp=tp.decode())
    except (zstandard.ZstdError, struct.error, ValueError) as error:
        raise CorruptObjectError(
            f"{where} holds no archived events: {error}",
            reason="EVENT_ARCHIVE_CORRUPT",
            remedy="restore that object from a replica of the bucket; without it these events are lost",
        ) from error
