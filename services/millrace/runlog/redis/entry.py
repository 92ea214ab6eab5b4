"""What an append answers and what a read returns: results, entries, their format and hash checks."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from millrace.errors import (
    ConflictError,
    CorruptObjectError,
    FencedError,
    InvalidStateError,
    LogGoneError,
    MillraceError,
)
from millrace.runlog.names import Stream
from millrace.runlog.redis.connection import as_text

FORMAT_MAJOR = 4
"""Major format of entries (field `v`) and logs: the one that this release writes and the only one that it reads."""
MAX_ENTRY_BYTES = 256 << 20
"""Largest entry that is decoded; a batch in Redis has at most 32 MiB, a rollout seldom more than one.

A reply is in memory before its size is known, so the Redis servers that we start take no larger value
(`proto-max-bulk-len`); docs/security.md asks the same for all other servers."""
MAX_TRACE_BYTES = 512
"""Longest trace context (a W3C `traceparent` has 55): it is archived with the event, whose size is bounded."""


class AppendResult(StrEnum):
    """The five answers of the append script."""

    OK = "OK"
    ALREADY = "ALREADY"
    CONFLICT = "CONFLICT"
    FENCED = "FENCED"
    LOGGONE = "LOGGONE"

    def require(self, what: str) -> None:
        """Return for OK and ALREADY, as the entry is in the log then; raise the error of any other answer.

        `what` says in words what was appended, for its message.
        """
        match self:
            case AppendResult.OK | AppendResult.ALREADY:
                return
            case AppendResult.FENCED:
                raise FencedError(
                    f"{what}: another process holds a newer epoch",
                    reason="STALE_EPOCH",
                    remedy="exit; the newer holder continues",
                )
            case AppendResult.LOGGONE:
                raise log_gone(what)
            case AppendResult.CONFLICT:
                raise ConflictError(
                    f"{what}: the log holds something else at that place, or lacks what comes before",
                    reason="APPEND_CONFLICT",
                    remedy="read the committed headers again and continue after them",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a stream: its id, format major, sha256 of `d` in hex, stored bytes, trace context."""

    id: str
    v: int
    h: str
    d: bytes
    tp: str
    damage: str = ""
    """What is wrong with it, in words; then `d` and `h` are empty, and a reader skips it."""


Page = Sequence[tuple[bytes, Mapping[bytes, bytes]]]
LAST_ID = "18446744073709551615-18446744073709551615"
"""The highest id there is: nothing can follow it, and Redis refuses to read after it."""
OnDamaged: TypeAlias = Callable[[Stream, Entry], None]
"""Called for each entry that is skipped, and again at every look as long as the entry is there. From any thread."""


def id_order(id_: str) -> tuple[int, int]:
    """Return the two numbers of an entry's id, `major-minor`, by which ids sort."""
    major, _, minor = id_.partition("-")
    return int(major), int(minor)


def read_entry(key: str, id_: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    """Return an entry of Redis' stream `key` from its id and its fields.

    A damaged entry is returned as a placeholder whose `damage` is set; nothing is raised.
    """
    try:
        return decode_entry(key, id_, fields)
    except (CorruptObjectError, InvalidStateError) as error:
        return damaged_entry(as_text(id_), error)


def damaged_entry(id_: str, error: MillraceError) -> Entry:
    """Return the placeholder, without bytes, of an entry that cannot be used; the error's message is its `damage`."""
    return Entry(id=id_, v=0, h="", d=b"", tp="", damage=error.message)


def decode_entry(key: str, id_: bytes, fields: Mapping[bytes, bytes]) -> Entry:
    """Return an entry of Redis' stream `key` from its id and fields, with format, size and hash checked.

    CorruptObjectError or InvalidStateError (another format) if they fail.
    """
    where = f"entry {as_text(id_)} of {key}"
    try:
        version, stored_hash, data = fields[b"v"], as_text(fields[b"h"]), fields[b"d"]
    except KeyError as error:
        raise CorruptObjectError(
            f"{where} lacks the field {error}", reason="ENTRY_CORRUPT", remedy="find out who else writes to this key"
        ) from error
    # The format first: what the other fields mean depends on it.
    major = check_format(as_text(version), where)
    if len(data) > MAX_ENTRY_BYTES:
        raise CorruptObjectError(
            f"{where} has {len(data)} bytes, and at most {MAX_ENTRY_BYTES} are read",
            reason="ENTRY_CORRUPT",
            remedy="find out who else writes to this key",
        )
    if hashlib.sha256(data).hexdigest() != stored_hash:
        raise CorruptObjectError(
            f"{where} has not the sha256 that its field h names",
            reason="ENTRY_CORRUPT",
            remedy="rebuild the log from the object store",
        )
    if len(trace := fields.get(b"tp", b"")) > MAX_TRACE_BYTES:
        raise CorruptObjectError(
            f"{where} has a trace context of {len(trace)} bytes, and at most {MAX_TRACE_BYTES} are read",
            reason="ENTRY_CORRUPT",
            remedy="find out who else writes to this key",
        )
    return Entry(id=as_text(id_), v=major, h=stored_hash, d=data, tp=as_text(trace))


def check_format(version: str, where: str) -> int:
    """Return the major number of a format version such as "4" or "4.1"; `where` names what has it, for messages.

    `InvalidStateError` if this release does not read that major, `CorruptObjectError` if it is no version.
    """
    # Releases of one major read each other's minors.
    major = version.partition(".")[0]
    if not re.fullmatch(r"[1-9][0-9]{0,8}", major):
        raise CorruptObjectError(f"{where} has the format {version[:40]!r}", reason="ENTRY_CORRUPT")
    if int(major) > FORMAT_MAJOR:
        raise InvalidStateError(
            f"{where} has format {version}, this release reads up to {FORMAT_MAJOR}",
            reason="FORMAT_TOO_NEW",
            remedy="upgrade this service to the release that wrote it",
            metadata={"format": version},
        )
    if int(major) < FORMAT_MAJOR:
        raise InvalidStateError(
            f"{where} has format {version}, this release reads only {FORMAT_MAJOR}",
            reason="FORMAT_TOO_OLD",
            remedy="finish the run with the release that wrote it, or start it anew",
            metadata={"format": version},
        )
    return int(major)


async def scan(
    read_page: Callable[[str, int], Awaitable[Page | None]], num_at_once: int
) -> AsyncIterator[tuple[bytes, Mapping[bytes, bytes]]]:
    """Yield every raw entry (id and fields) of a stream, page by page, of at most `num_at_once` entries.

    `read_page` gets an id to begin at, exclusive after a `(`, and the most entries to return; None from it ends the
    scan.
    """
    start = "-"
    while page := await read_page(start, num_at_once):
        for raw in page:
            yield raw
        if len(page) < num_at_once or (last := as_text(page[-1][0])) == LAST_ID:
            return
        # A parenthesis makes the range exclusive in Redis (since 6.2).
        start = f"({last}"


def log_gone(what: str) -> LogGoneError:
    """Make (not raise) the error of a log that Redis does not hold any more; `what` was being done."""
    return LogGoneError(
        f"{what}: Redis does not hold the log of the run",
        reason="LOG_GONE",
        remedy="rebuild it from the object store",
    )


HASHED_HERE_BYTES = 256 << 10
"""Most bytes that are hashed on the event loop: a batch of 32 MiB would take it for some 30 ms."""


async def hashes_of(entries: Sequence[bytes]) -> list[str]:
    """Return the sha256 (hex) of each entry's bytes, of many bytes computed in a thread."""

    def compute() -> list[str]:
        return [hashlib.sha256(data).hexdigest() for data in entries]

    return await asyncio.to_thread(compute) if sum(map(len, entries)) > HASHED_HERE_BYTES else compute()
