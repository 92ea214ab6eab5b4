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
    """Commit a batch: upload its data, create its header object, append both to Redis.

    Return the header's stored bytes. Chain hashes are over these bytes. `header` and `chunks` come from `pack_batch`,
    or from `iter_chunks`, which runs in a thread as chunks are uploaded: then no more of a large batch than a few
    chunks is in memory. This fills into the header object keys, the writer's epoch, and the objects that the headers
    before it do not name, which `known` knows (without it, all). `archive` is what `encode_archive` made of the
    resolved rollouts, or empty.

    After an error, calling it again with the same batch is right (with new chunks of `iter_chunks`): data that no
    header names is garbage, and a header that this epoch committed before is found again. `FencedError` if another
    holder committed the step, or holds a newer epoch.
    """
    if header.run_uid != log.uid:
        raise _invalid(log, header, f"is of run {header.run_uid!r}")
    # A cheap look first: a writer that is fenced uploads nothing.
    if await log.current_epoch(epoch.role) > epoch.number:
        AppendResult.FENCED.require(f"committing step {header.step} of run {log.uid}")
    # Data first, header last: a process that dies in between leaves objects that nothing names, and no step. Naming
    # reads the store and needs nothing of the upload, so both go on at once.
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
    # The looks at the epochs do not decide: of two writers that pass them, the create-only header has one winner.
    header_bytes = await _write_header(log, header)
    # The step is committed, also if the append to Redis fails: the next header must not name these objects again.
    known.note(decode_link(header_bytes), header_bytes)
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_HEADER, step=header.step)
    result = await log.append_batch(epoch, header_bytes, upload.kept)
    if result is AppendResult.CONFLICT and await log.next_position(Stream.BATCHES) <= header.step:
        # Redis lost its tail; this step comes with the ones before.
        await reappend_committed(log, epoch)
    else:
        if result is AppendResult.LOGGONE:
            # Raises an error that says which generation Redis holds instead of ours.
            await log.check()
        result.require(f"appending step {header.step} of run {log.uid}")
    faults.reach(faults.Point.ORCHESTRATOR_AFTER_COMMIT, step=header.step)
    return header_bytes


class _Upload:
    """Uploads the data of a batch under names of this writer alone, and names it in the header."""

    def __init__(self, log: RunLog, epoch: Epoch, header: batch_pb2.BatchHeader) -> None:
        """Prepare the upload: object names get a random nonce, so that no other writer has them."""
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
        """Upload the archive (empty: none) and all chunks, and write their keys into the header.

        A chunk's hash is checked. When this returns or raises an error, no upload is under way. After a cancellation an
        upload may still end in its thread, under a key that no header names. InternalError if the number of chunks is
        not that of the header.
        """
        try:
            await self._put_all(chunks, archive)
        except asyncio.CancelledError:
            for task in self._puts:
                task.cancel()
            raise
        finally:
            # Also after an error: the caller may begin the next attempt at once.
            await _all(self._puts)

    async def _put_all(self, chunks: Iterable[bytes], archive: bytes) -> None:
        """Begin every upload, a few at a time, and write the objects' keys into the header.

        Nothing new begins after a failure. Keeps the chunks for Redis in `kept`, unless the batch is too large for it.
        """
        header, source, keys, num_bytes = self._header, iter(chunks), list[str](), 0
        header.rollouts_key, header.rollouts_sha256 = "", b""
        if archive:
            header.rollouts_key = f"{self._rollouts}rollouts.pb.zst"
            header.rollouts_sha256 = await asyncio.to_thread(lambda: hashlib.sha256(archive).digest())
            await self._begin_put(header.rollouts_key, archive)
        while not self._has_failed and (data := await asyncio.to_thread(self._next, source, len(keys))) is not None:
            keys.append(f"{self._chunks}chunk-{len(keys):05d}.pb")
            num_bytes += len(data)
            # A batch that is too large for Redis has none of its chunks there.
            self.kept = [*self.kept, data] if num_bytes <= MAX_REDIS_BATCH_BYTES else []
            # This waits for room before the next chunk is made, which bounds the memory that a large batch takes.
            await self._begin_put(keys[-1], data)
        if not self._has_failed and len(keys) != len(header.chunks):
            raise _invalid(self._log, header, f"names {len(header.chunks)} chunks, {len(keys)} were given")
        # There are fewer keys than chunks after a failed upload, whose error `run` raises.
        for chunk, key in zip(header.chunks, keys, strict=False):
            chunk.key = key

    def _next(self, source: Iterator[bytes], index: int) -> bytes | None:
        """Return the next chunk of `source`; None after the last.

        `CorruptObjectError` if it differs from chunk `index` that the header describes.
        """
        data = next(source, None)
        if data is not None and index < len(self._header.chunks):
            verify_chunk(self._header, index, data)
        return data

    async def _begin_put(self, key: str, data: bytes) -> None:
        """Begin to upload an object in the background; wait first while `_PARALLEL_PUTS` uploads are in progress."""
        await self._gate.acquire()
        self._puts.append(asyncio.create_task(self._put(key, data)))

    async def _put(self, key: str, data: bytes) -> None:
        """Upload one object, and let another upload begin; a failure keeps all later ones from beginning."""
        try:
            await asyncio.to_thread(self._log.store.put, key, data)
        except MillraceError:
            # Looked at by `_put_all`, which begins no further upload.
            self._has_failed = True
            raise
        finally:
            self._gate.release()


def _invalid(log: RunLog, header: batch_pb2.BatchHeader, problem: str) -> InternalError:
    """Make the error for a batch that its caller put together wrongly; `problem` continues "the header …"."""
    return InternalError(f"step {header.step} of run {log.uid}: the header {problem}", reason="BATCH_INVALID")


async def _write_header(log: RunLog, header: batch_pb2.BatchHeader) -> bytes:
    """Create the header object, which commits the step, or find that this very batch was committed.

    Return the stored bytes. `FencedError` if another header is stored there.
    """
    key = log.names.batch_header(header.step, header.revision)
    data = header.SerializeToString(deterministic=True)
    if await asyncio.to_thread(log.store.create, key, data):
        return data
    stored = await asyncio.to_thread(log.store.get, key)
    if stored == data:
        return stored
    # The keys differ because each upload has a nonce of its own; the hashes of the chunks are compared.
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
    """Return a header's bytes without what differs between two uploads of one batch by one writer: object keys and
    names.
    """
    content = batch_pb2.BatchHeader()
    content.CopyFrom(header)
    content.rollouts_key = ""
    del content.objects[:]
    for chunk in content.chunks:
        chunk.key = ""
    return content.SerializeToString(deterministic=True)


async def _all(awaitables: Any) -> None:
    """Await all of them to their ends, then raise the first error, if any: none is left running after the return."""
    todo: list[Awaitable[None]] = list(awaitables)
    for result in await asyncio.gather(*todo, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
