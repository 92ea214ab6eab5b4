"""What the store says was committed, and how Redis gets what it lacks of it."""

import asyncio
import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.decoding import MAX_JSON_BYTES
from millrace.errors import CorruptObjectError, NotFoundError
from millrace.internal.v1 import batch_pb2, policy_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.runlog.names import Stream
from millrace.runlog.records.frontier import chain_hash
from millrace.runlog.records.known import manifest_digest
from millrace.runlog.records.numbered import Epoch
from millrace.runlog.records.revisions import (
    StepHeaders,
    chain_broken,
    decode_stored,
    is_failed_closing,
    load_step,
    read_chunk,
)
from millrace.runlog.records.run_record import list_policies, load_origin
from millrace.runlog.redis import damage
from millrace.runlog.redis.log import RunLog
from millrace.storage import ObjectStore
from millrace.storage.base import newest_revision

logger = logging.getLogger(__name__)

MAX_REDIS_BATCH_BYTES = 32 << 20
"""Above this, a batch's chunks stay in the store and only its header goes to Redis (docs/architecture.md)."""

_WINDOW = 16  # headers fetched at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """What the store has of a log."""

    headers: list[batch_pb2.BatchHeader]
    """Every header in the order of the chain, the superseded ones included (`revisions`)."""
    chain: bytes
    """The chain hash after the last of them, or after the log's origin."""
    is_reopened: bool
    """The last one is a closing header that does not end the run: its successor comes next."""

    @property
    def last(self) -> batch_pb2.BatchHeader | None:
        """Return the last header; None if nothing is committed."""
        return self.headers[-1] if self.headers else None

    @property
    def num_reopened(self) -> int:
        """Return the number of failed closing headers that do not end the run."""
        ends = self.last is not None and is_failed_closing(self.last) and not self.is_reopened
        return sum(map(is_failed_closing, self.headers)) - ends


async def load_history(log: RunLog) -> Committed:
    """Load every committed header from the log's origin on; CorruptObjectError if one was replaced or lost.

    Each is checked against the chain hash before it, which at the origin is 32 zero bytes but for a fork
    (`load_origin`).
    """
    headers: list[batch_pb2.BatchHeader] = []
    origin = await asyncio.to_thread(load_origin, log.store, log.names)
    chain, step = origin.chain_hash, origin.base_step
    while True:
        window = range(step, step + _WINDOW)
        found = await asyncio.gather(*(_get_step(log, each) for each in window))
        for step, committed in zip(window, found, strict=True):
            if committed is None:
                _require_end(log, step, found[step - window.start :])
                return Committed(headers=headers, chain=chain, is_reopened=False)
            for revision, data in enumerate(committed.revisions):
                headers.append(_next_header(log, step, revision, data, chain))
                chain = chain_hash(chain, data)
            if committed.is_reopened:
                _require_end(log, step, [None, *found[step + 1 - window.start :]])
                return Committed(headers=headers, chain=chain, is_reopened=True)
        step += 1


def _next_header(log: RunLog, step: int, revision: int, data: bytes, chain: bytes) -> batch_pb2.BatchHeader:
    """Return the header in these bytes; `CorruptObjectError` unless it comes next after `chain`."""
    decode_stored(log.store, log.names, step, revision, data)
    header = decode_header(data)
    if (header.step, header.revision) != (step, revision) or header.previous_chain_hash != chain:
        where = log.store.uri(log.names.batch_header(step, revision))
        raise chain_broken(log.names, step, f"{where} does not continue the chain of batch {step - 1}")
    return header


async def reappend_committed(log: RunLog, epoch: Epoch) -> int:
    """Append to Redis every committed step that it lacks at its end, and return how many.

    `LogGoneError`, and a rebuild, if Redis has a step that was never committed.
    """
    step = await log.next_position(Stream.BATCHES)
    if step > 0 and await log.last_id(Stream.BATCHES) is not None:
        await damage.require_backed(log, Stream.BATCHES, step - 1)
    count = 0
    while (data := await _get_header_in_force(log, step)) is not None:
        chunks = await asyncio.to_thread(_load_chunks, log.store, decode_header(data))
        (await log.append_batch(epoch, data, chunks)).require(f"repeating step {step} of run {log.uid}")
        step += 1
        count += 1
    if count:
        logger.info("repeated committed steps in Redis", extra={"uid": log.uid, "count": count, "next": step})
    return count


async def reappend_policies(log: RunLog, epoch: Epoch) -> int:
    """Append to Redis every published policy version that it lacks at its end, and return how many.

    Of several lineages of a version the newest counts. `LogGoneError`, and a rebuild, if Redis has a version that
    was never published.
    """
    version = await log.next_position(Stream.POLICIES)
    if await log.last_id(Stream.POLICIES) is not None:
        await damage.require_backed(log, Stream.POLICIES, version - 1)
    entries = await asyncio.to_thread(_load_policies, log, version)
    for entry in entries:
        data = entry.SerializeToString(deterministic=True)
        (await log.append_policy(epoch, data, entry.version)).require(f"repeating version {entry.version}")
    return len(entries)


def _load_chunks(store: ObjectStore, header: batch_pb2.BatchHeader) -> list[bytes]:
    """Return the chunks of a batch, or none when they stay in the store (too large, or retention removed them)."""
    if sum(chunk.size_bytes for chunk in header.chunks) > MAX_REDIS_BATCH_BYTES:
        return []
    chunks = []
    for index, chunk in enumerate(header.chunks):
        try:
            chunks.append(read_chunk(store, header, index))
        except NotFoundError:
            logger.warning("chunk is not in the store any more", extra={"step": header.step, "key": chunk.key})
            return []
    return chunks


def _load_policies(log: RunLog, first: int) -> list[policy_pb2.PolicyEntry]:
    newest = {version: lineage for version, lineage in list_policies(log.store, log.names) if version >= first}
    entries = []
    for version in range(first, first + len(newest)):
        if version not in newest:
            break
        key = log.names.policy_manifest(newest[version], version)
        try:
            manifest = log.store.get(newest_revision(log.store, key), max_bytes=MAX_JSON_BYTES)
        except NotFoundError:  # uploaded in part: not published
            break
        except CorruptObjectError:  # larger than any manifest: damaged, as one that cannot be decoded is
            manifest = b""
        entries.append(
            policy_pb2.PolicyEntry(
                lineage=newest[version],
                version=version,
                manifest_key=key,
                manifest_sha256=hashlib.sha256(manifest).digest(),
                digest=manifest_digest(manifest),
            )
        )
    return entries


def _require_end(log: RunLog, step: int, rest: Sequence[StepHeaders | None]) -> None:
    """Raise CorruptObjectError if a step after `step`, which has no header, is committed: an object was lost.

    `rest` has the headers of `step` and of the steps after it.
    """
    later = [step + offset for offset, data in enumerate(rest) if data is not None]
    if later:
        where = log.store.uri(log.names.batch_header(step))
        raise chain_broken(log.names, step, f"header {where} is missing, but step {later[0]} is committed")


async def _get_step(log: RunLog, step: int) -> StepHeaders | None:
    return await asyncio.to_thread(load_step, log.store, log.names, step)


async def _get_header_in_force(log: RunLog, step: int) -> bytes | None:
    found = await _get_step(log, step)
    return None if found is None else found.in_force
