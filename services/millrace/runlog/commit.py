"""Commit of a batch: in the store first (its header object is the commit point), in Redis after that."""

import asyncio
import hashlib
import logging
import secrets
from collections.abc import Awaitable, Iterable, Iterator
from typing import Any

from millrace.errors import FencedError, InternalError, MillraceError
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
    chunks: Iterable[bytes],
    archive: bytes,
    *,
    known: KnownObjects | None = None,
) -> bytes:
    """Commit a batch and return the stored bytes of its header (chain hashes are over these).

    `header` and `chunks` come from `pack_batch`, or from `iter_chunks`, which runs in a thread as chunks are uploaded:
    then no more of a large batch than a few chunks is in memory. This fills in object keys, the writer's epoch, and the
    objects that the headers before it do not name, which `known` knows (without it, all). `archive` is what
    `encode_archive` made, or empty.

    After an error, calling it again with the same batch is right (with new chunks of `iter_chunks`): data that no
    header names is garbage, and a header that this epoch committed before is found again. `FencedError` if another
    holder committed the step, or holds a newer epoch.
    """
    if header.run_uid != log.uid:
        raise _invalid(log, header, f"is of run {header.run_uid!r}")
    if await log.current_epoch(epoch.role) > epoch.number:
        AppendResult.FENCED.require(f"committing step {header.step} of run {log.uid}")
    header.writer_epoch = epoch.number
    known = known or KnownObjects()
    naming = asyncio.to_thread(known.fill, log.store, log.names, header)
    upload = _Upload(log, epoch, header)
    await _all((upload.run(chunks, archive), naming))
    check_header(header)
    faults.reach(faults.Point.ORCHESTRATOR_MID_COMMIT, step=header.step)
    # The store knows every epoch, also where Redis was wiped or lost its tail.
    if await asyncio.to_thread(latest_epoch, log.store, log.names, epoch.role) > epoch.number:
        AppendResult.FENCED.require(f"committing step {header.step} of run {log.uid}")
    header_bytes = await _write_header(log, header)
    known.note(decode_link(header_bytes), header_bytes)
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_HEADER, step=header.step)
    result = await log.append_batch(epoch, header_bytes, upload.kept)
    if result is AppendResult.CONFLICT and await log.next_position(Stream.BATCHES) <= header.step:
        await reappend_committed(log, epoch)  # Redis lost its tail; this step comes with the ones before
    else:
        if result is AppendResult.LOGGONE:
            await log.check()  # its error says which generation is there instead of ours
        result.require(f"appending step {header.step} of run {log.uid}")
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_COMMIT, step=header.step)
    return header_bytes


class _Upload:
    """Uploads the data of a batch under names of this writer alone, and names it in the header."""

    def __init__(self, log: RunLog, epoch: Epoch, header: batch_pb2.BatchHeader) -> None:
        self._log, self._header = log, header
        nonce = secrets.token_hex(8)
        self._chunks = log.names.batch_data(header.step, epoch.number, nonce)
        self._rollouts = log.names.rollout_data(header.step, epoch.number, nonce)
        self._gate = asyncio.Semaphore(_PARALLEL_PUTS)
        self._puts: list[asyncio.Task[None]] = []
        self._has_failed = False
        self.kept: list[bytes] = []
        """The chunks that go into Redis, too: none of a large batch, which is there by its header only."""

    async def run(self, chunks: Iterable[bytes], archive: bytes) -> None:
        """Upload everything; when this returns or raises, nothing is under way."""
        try:
            await self._put_all(chunks, archive)
        except asyncio.CancelledError:
            for task in self._puts:
                task.cancel()
            raise
        finally:
            await _all(self._puts)

    async def _put_all(self, chunks: Iterable[bytes], archive: bytes) -> None:
        header, source, keys, num_bytes = self._header, iter(chunks), list[str](), 0
        header.rollouts_key, header.rollouts_sha256 = "", b""
        if archive:
            header.rollouts_key = f"{self._rollouts}rollouts.pb.zst"
            header.rollouts_sha256 = await asyncio.to_thread(lambda: hashlib.sha256(archive).digest())
            await self._begin_put(header.rollouts_key, archive)
        while not self._has_failed and (data := await asyncio.to_thread(self._next, source, len(keys))) is not None:
            keys.append(f"{self._chunks}chunk-{len(keys):05d}.pb")
            num_bytes += len(data)
            self.kept = [*self.kept, data] if num_bytes <= MAX_REDIS_BATCH_BYTES else []
            await self._begin_put(keys[-1], data)
        if not self._has_failed and len(keys) != len(header.chunks):
            raise _invalid(self._log, header, f"names {len(header.chunks)} chunks, {len(keys)} were given")
        for chunk, key in zip(header.chunks, keys, strict=False):
            chunk.key = key

    def _next(self, source: Iterator[bytes], index: int) -> bytes | None:
        """Return the next chunk, None after the last.

        `CorruptObjectError` if it differs from the one that the header names.
        """
        data = next(source, None)
        if data is not None and index < len(self._header.chunks):
            verify_chunk(self._header, index, data)
        return data

    async def _begin_put(self, key: str, data: bytes) -> None:
        """Begin to upload an object in the background. Waits while too many others are in progress."""
        await self._gate.acquire()
        self._puts.append(asyncio.create_task(self._put(key, data)))

    async def _put(self, key: str, data: bytes) -> None:
        try:
            await asyncio.to_thread(self._log.store.put, key, data)
        except MillraceError:
            self._has_failed = True  # of the rest nothing is begun
            raise
        finally:
            self._gate.release()


def _invalid(log: RunLog, header: batch_pb2.BatchHeader, problem: str) -> InternalError:
    return InternalError(f"step {header.step} of run {log.uid}: the header {problem}", reason="BATCH_INVALID")


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
