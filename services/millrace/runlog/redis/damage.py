"""Damage in Redis: a log that is not what was written is given up, and its rebuild comes from the store.

Redis is the fast copy. What is there and cannot be used, or claims what the store does not know, never ends a run:

* rollouts and events: the entry is skipped (`Entry.damage`); the run's orchestrator counts it, reports it, removes it
* batches, policies, meta, and ids after which nothing can be appended: `mark_damaged` takes the copy's generation away,
  in one atomic step. From then on nobody appends to it or reads from it, as if Redis had lost it, until an orchestrator
  has rebuilt it

Every reader that meets damage may call `mark_damaged`: it costs a rebuild, never a fact. That the *store* lacks
something is found by comparing with it, and is an error of its own.
"""

import asyncio
import hashlib
import logging
from typing import Any, Protocol

from millrace.decoding import MAX_JSON_BYTES, decode_message, decode_object
from millrace.errors import CorruptObjectError, LogGoneError, NotFoundError
from millrace.internal.v1 import policy_pb2
from millrace.rollouts.batch_wire import MAX_HEADER_BYTES
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.run_record import list_policies
from millrace.runlog.redis import connection, script
from millrace.runlog.redis.entry import Entry
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision

logger = logging.getLogger(__name__)

MAX_POLICY_BYTES = 64 << 10
"""Largest entry of the policy stream: it names one manifest."""


class LogCopy(Protocol):
    """What of a run's log is asked here: `RunLog` is one."""

    redis: Any
    store: ObjectStore
    names: Names
    generation: int

    @property
    def uid(self) -> str:
        """Return the uid of the run."""
        ...

    async def next_position(self, stream: Stream) -> int:
        """Return the step or version that the stream takes next."""
        ...

    async def read_range(self, stream: Stream, first: str, last: str) -> list[Entry]:
        """Return the entries of a stream with ids from `first` to `last`, inclusive."""
        ...


def log_damaged(text: str) -> LogGoneError:
    """Make (not raise) the error of a log whose copy in Redis is damaged; `text` says where and how."""
    return LogGoneError(
        f"redis: {text}; being rebuilt",
        reason="LOG_DAMAGED",
        remedy="an orchestrator rebuilds it from the object store; find out who else writes to this Redis",
    )


async def mark_damaged(log: LogCopy, what: str, cause: str) -> LogGoneError:
    """Mark this generation of the log in Redis as damaged, so that it is rebuilt, and return (not raise) the error for
    it.

    `what` is a part such as `stream batches`, `cause` what is wrong with it. Nothing is marked if Redis holds another
    generation by now.
    """
    text = f"{what} of run {log.uid} is damaged{cause and ' '}{cause}"
    answer, _ = await connection.call(
        log.redis,
        f"giving the damaged log of run {log.uid} up",
        lambda: script.CONDEMN.run(log.redis, [log.names.meta], [log.generation, text]),
    )
    # Otherwise another process has marked or rebuilt it first.
    if connection.as_text(answer) == "OK":
        logger.error(
            "the log of the run is damaged and will be rebuilt: %s", text, extra={"uid": log.uid, "damage": text}
        )
    return log_damaged(text)


async def check_entries(log: LogCopy, stream: Stream, entries: list[Entry]) -> list[Entry]:
    """Return the entries of a page, which was read while the log was there, if they are fit for its stream.

    Else mark the log as damaged and raise `LogGoneError`: for a damaged batch or policy, or an event of a later
    generation. Damaged rollouts and events pass.
    """
    for entry in entries:
        if stream in (Stream.BATCHES, Stream.POLICIES) and entry.damage:
            raise await mark_damaged(log, f"stream {stream}", f"at {entry.id}: {entry.damage}")
        if stream is Stream.EVENTS and int(entry.id.partition("-")[0]) > log.generation:
            raise await mark_damaged(
                log, f"stream {stream}", f"at {entry.id}: ids begin with the generation {log.generation}"
            )
    return entries


async def require_backed(log: LogCopy, stream: Stream, position: int) -> None:
    """Raise `LogGoneError`, and mark the Redis copy as damaged, unless the store has the step or version `position`.

    Redis gets a batch or policy after the store, so that it never holds one that the store never had. A later
    version in the store will do.
    """
    if not await asyncio.to_thread(_is_in_store, log, stream, position):
        raise await mark_damaged(
            log, f"stream {stream}", f"at {position}-1: the object store has nothing of that number"
        )


async def require_committed(log: LogCopy, step: int, data: bytes) -> None:
    """Mark the Redis copy as damaged, without raising, unless the store has a header of the step with the bytes `data`.

    Where a run was reopened a step has several headers (`revisions`).
    """
    if not await asyncio.to_thread(_is_in_store, log, Stream.BATCHES, step, data):
        await mark_damaged(log, f"stream {Stream.BATCHES}", f"at {step}-1: it is not the committed header")


async def require_own(log: LogCopy, stream: Stream, position: int, data: bytes) -> None:
    """Check the Redis copy against the store, after `data` could not be appended to a stream at `position`.

    Raises `LogGoneError`, and marks the copy as damaged, if the store lacks the entry that Redis has at `position`, or
    the newest entry of the stream. Does nothing if Redis has not come as far as `position`, or if the store lacks
    `data` itself.
    """
    # A stream that is only further on has this entry in its past.
    newest = await log.next_position(stream) - 1
    if newest >= position and await asyncio.to_thread(_is_in_store, log, stream, position, data):
        await require_backed(log, stream, newest)
        for entry in await log.read_range(stream, f"{position}-1", f"{position}-1"):
            if entry.d != data and not await asyncio.to_thread(_is_in_store, log, stream, position, entry.d):
                raise await mark_damaged(
                    log, f"stream {stream}", f"at {entry.id}: the object store has something else there"
                )


async def checked_policy(log: LogCopy, entry: Entry) -> policy_pb2.PolicyEntry | None:
    """Return the policy version that an entry of the policy stream announces.

    None if the store does not keep it any more. `LogGoneError`, and a rebuild, if its manifest in the store is another
    one, or was never written. A damaged manifest is no error here, because a rebuild does not repair it: its reader
    finds it, and the trainer publishes it anew.
    """
    try:
        policy = _decode_policy(entry.d)
        major = int(entry.id.partition("-")[0])
        # The id orders the stream, so that it has to be the version's.
        if entry.id != f"{policy.version}-1":
            raise CorruptObjectError(f"it names version {policy.version}", reason="ENTRY_CORRUPT")
        if policy.manifest_key != log.names.policy_manifest(policy.lineage, policy.version):
            raise CorruptObjectError(f"it names {policy.manifest_key[:200]!r}", reason="ENTRY_CORRUPT")
        # Missing is no damage yet: retention removes manifests, too.
        manifest = await asyncio.to_thread(_manifest, log, policy)
        if manifest is not None and not _is_of(manifest, policy):
            raise CorruptObjectError(f"{policy.manifest_key} has another sha256 and digest", reason="ENTRY_CORRUPT")
    except CorruptObjectError as error:
        raise await mark_damaged(log, f"stream {Stream.POLICIES}", f"at {entry.id}: {error.message}") from error
    if manifest is None:
        await require_backed(log, Stream.POLICIES, major)
        return None
    return policy


def _is_of(manifest: bytes, policy: policy_pb2.PolicyEntry) -> bool:
    """Return whether a stored manifest is the announced one, or is damaged, or names the same weights.

    A manifest that was lost is made again, with other bytes.
    """
    if hashlib.sha256(manifest).digest() == policy.manifest_sha256:
        return True
    try:
        digest = decode_object(manifest, what=policy.manifest_key, reason="POLICY_CORRUPT").get("digest")
    except CorruptObjectError:
        return True
    return digest == policy.digest


def _decode_policy(data: bytes) -> policy_pb2.PolicyEntry:
    """Return the message in a policy entry's bytes; CorruptObjectError if they hold none."""
    return decode_message(policy_pb2.PolicyEntry, data, what="it", reason="ENTRY_CORRUPT", max_bytes=MAX_POLICY_BYTES)


def _is_in_store(log: LogCopy, stream: Stream, position: int, data: bytes | None = None) -> bool:
    """Return whether the store has a batch of that number (`position`), or a policy of that version or a later one.

    With `data`, whether the store has a header of that step with these bytes, or the policy that these bytes announce.
    """
    if stream is Stream.BATCHES:
        stored = _headers(log, position)
        return data in stored if data is not None else bool(stored)
    if data is not None:
        try:
            policy = _decode_policy(data)
        except CorruptObjectError:
            return False
        manifest = _manifest(log, policy)
        return manifest is not None and _is_of(manifest, policy)
    # Retention may have removed this one, but never the newest.
    return any(version >= position for version, _ in list_policies(log.store, log.names))


def _headers(log: LogCopy, step: int) -> list[bytes]:
    """Return the stored bytes of every header of a step: more than one where a run was reopened."""
    found: list[bytes] = []
    # Revisions are numbered without gaps.
    while (data := _get(log, log.names.batch_header(step, len(found)), max_bytes=MAX_HEADER_BYTES)) is not None:
        found.append(data)
    return found


def _manifest(log: LogCopy, policy: policy_pb2.PolicyEntry) -> bytes | None:
    """Return the bytes of a version's manifest as it was written first, or of its newest successor if that one is lost.

    None if there is none; empty bytes if it is too large to be one.
    """
    key = log.names.policy_manifest(policy.lineage, policy.version)
    try:
        first = _get(log, key, max_bytes=MAX_JSON_BYTES)
        return first if first is not None else _get(log, newest_revision(log.store, key), max_bytes=MAX_JSON_BYTES)
    except CorruptObjectError:
        return b""


def _get(log: LogCopy, key: str, *, max_bytes: int) -> bytes | None:
    """Return an object's bytes, by its whole key.

    None if there is none, CorruptObjectError if it is larger than `max_bytes`.
    """
    try:
        return log.store.get(key, max_bytes=max_bytes)
    except NotFoundError:
        return None
