"""Commit of a batch: in the store first (its header object is the commit point), in Redis after that."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Sequence
from typing import Any

from millrace.errors import FencedError, InternalError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import check_header, decode_header, decode_link, verify_chunk
from millrace.runlog.names import Stream
from millrace.runlog.records.known import KnownObjects
from millrace.runlog.records.numbered import Epoch, latest_epoch
from millrace.runlog.recover import MAX_REDIS_BATCH_BYTES, reappend_committed
from millrace.runlog.redis.log import AppendResult, RunLog
from millrace.telemetry import faults

logger = logging.getLogger(__name__)

_PARALLEL_PUTS = 4


async def commit_batch(
    log: RunLog,
    epoch: Epoch,
    header: batch_pb2.BatchHeader,
    chunks: Sequence[bytes],
    archive: bytes,
    *,
    known: KnownObjects | None = None,
) -> bytes:
    """Commit a batch and return the stored bytes of its header (chain hashes are over these).

    `header` comes from `pack_batch`; this fills in object keys, the writer's epoch, and the objects that the headers
    before it do not name, which `known` knows (without it, all). `archive` is what `encode_archive` made, or empty.

    After an error, calling it again with the same batch is right: data that no header names is garbage, and a header
    that this epoch committed before is found again. `FencedError` if another holder committed the step, or holds a
    newer epoch.
    """
    check_header(header)
    if len(chunks) != len(header.chunks) or header.run_uid != log.uid:
        raise InternalError(
            f"step {header.step} of run {log.uid}: the header is of run {header.run_uid!r} and names "
            f"{len(header.chunks)} chunks, {len(chunks)} were given",
            reason="BATCH_INVALID",
        )
    for index, data in enumerate(chunks):
        verify_chunk(header, index, data)
    if await log.current_epoch(epoch.role) > epoch.number:
        AppendResult.FENCED.require(f"committing step {header.step} of run {log.uid}")
    header.writer_epoch = epoch.number
    known = known or KnownObjects()
    naming = asyncio.to_thread(known.fill, log.store, log.names, header)
    await _all((_upload(log, epoch, header, chunks, archive), naming))
    faults.reach(faults.Point.ORCHESTRATOR_MID_COMMIT, step=header.step)
    # The store knows every epoch, also where Redis was wiped or lost its tail.
    if await asyncio.to_thread(latest_epoch, log.store, log.names, epoch.role) > epoch.number:
        AppendResult.FENCED.require(f"committing step {header.step} of run {log.uid}")
    header_bytes = await _write_header(log, header)
    known.note(decode_link(header_bytes), header_bytes)
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_HEADER, step=header.step)
    result = await log.append_batch(epoch, header_bytes, chunks if fits_redis(header) else ())
    if result is AppendResult.CONFLICT and await log.next_position(Stream.BATCHES) <= header.step:
        await reappend_committed(log, epoch)  # Redis lost its tail; this step comes with the ones before
    else:
        if result is AppendResult.LOGGONE:
            await log.check()  # its error says which generation is there instead of ours
        result.require(f"appending step {header.step} of run {log.uid}")
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_COMMIT, step=header.step)
    return header_bytes


def fits_redis(header: batch_pb2.BatchHeader) -> bool:
    """Return whether the chunks go into Redis, too; a larger batch is there by its header only."""
    return sum(chunk.size_bytes for chunk in header.chunks) <= MAX_REDIS_BATCH_BYTES


async def _upload(
    log: RunLog, epoch: Epoch, header: batch_pb2.BatchHeader, chunks: Sequence[bytes], archive: bytes
) -> None:
    """Upload data under names of this writer alone, and name it in the header."""
    nonce = secrets.token_hex(8)
    objects: dict[str, bytes] = {}
    data_prefix = log.names.batch_data(header.step, epoch.number, nonce)
    for index, data in enumerate(chunks):
        header.chunks[index].key = f"{data_prefix}chunk-{index:05d}.pb"
        objects[header.chunks[index].key] = data
    header.rollouts_key, header.rollouts_sha256 = "", b""
    if archive:
        header.rollouts_key = f"{log.names.rollout_data(header.step, epoch.number, nonce)}rollouts.pb.zst"
        header.rollouts_sha256 = hashlib.sha256(archive).digest()
        objects[header.rollouts_key] = archive
    gate = asyncio.Semaphore(_PARALLEL_PUTS)

    async def put(key: str, data: bytes) -> None:
        async with gate:
            await asyncio.to_thread(log.store.put, key, data)

    await _all(put(key, data) for key, data in objects.items())


async def _write_header(log: RunLog, header: batch_pb2.BatchHeader) -> bytes:
    """Create the header object, or find that this very batch was committed before; returns the stored bytes."""
    key = log.names.batch_header(header.step, header.revision)
    data = header.SerializeToString(deterministic=True)
    if await asyncio.to_thread(log.store.create, key, data):
        return data
    stored = await asyncio.to_thread(log.store.get, key)
    if stored == data:
        return stored
    if _content(decode_header(stored)) == _content(header):
        # Ours: an epoch has one writer, and it has called commit_batch again after an error.
        logger.info("step was committed before", extra={"uid": log.uid, "step": header.step})
        return stored
    raise FencedError(
        f"step {header.step} of run {log.uid} was committed with other content ({log.store.uri(key)})",
        reason="STEP_COMMITTED",
        remedy="load the committed headers and continue after them, if this process still holds the newest epoch",
        metadata={"uid": log.uid, "step": str(header.step)},
    )


def _content(header: batch_pb2.BatchHeader) -> bytes:
    """Return the header without what differs between two uploads of one batch by one writer."""
    content = batch_pb2.BatchHeader()
    content.CopyFrom(header)
    content.rollouts_key = ""
    del content.objects[:]
    for chunk in content.chunks:
        chunk.key = ""
    return content.SerializeToString(deterministic=True)


async def _all(awaitables: Any) -> None:
    """Await all, then raise the first error: none is left running after the return."""
    todo: list[Awaitable[None]] = list(awaitables)
    for result in await asyncio.gather(*todo, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
