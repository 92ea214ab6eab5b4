"""Read one batch: wait for its header in Redis, take from the store what Redis does not (or no longer) hold."""

import asyncio
import logging
import time
from collections.abc import Sequence

from millrace.errors import CorruptObjectError, LogGoneError, NotFoundError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header, verify_chunk
from millrace.runlog.names import Stream
from millrace.runlog.records.revisions import is_failed_closing, load_step, read_chunk, read_header
from millrace.runlog.records.run_record import require_exists
from millrace.runlog.redis import damage
from millrace.runlog.redis.connection import MAX_BLOCK_S
from millrace.runlog.redis.entry import Entry
from millrace.runlog.redis.log import RunLog
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_PARALLEL_GETS = 4
_POLL_S = 0.5
_REOPENED_POLL_S = 1.0  # each time the store is asked, too


async def read_batch(
    log: RunLog, step: int, *, want_chunks: Sequence[int] | None = None, timeout_s: float | None = None
) -> tuple[batch_pb2.BatchHeader, bytes, dict[int, bytes]]:
    """Wait for batch `step`; return its header, the header's stored bytes, and its chunks by index.

    Only the chunks `want_chunks` are read, or all. What Redis lacks comes from the store; every chunk is checked
    against the sha256 in the header. `UnavailableError` (BATCH_WAIT_TIMEOUT) after `timeout_s`; None waits without
    end.
    """
    header_bytes = await _wait_in_force(log, step, timeout_s=timeout_s)
    header = decode_header(header_bytes)
    if header.step != step or header.run_uid != log.uid:
        raise CorruptObjectError(
            f"header {step} of run {log.uid} says step {header.step} of run {header.run_uid}",
            reason="BATCH_CORRUPT",
            remedy="restore that object from a replica of the bucket",
        )
    wanted = range(len(header.chunks)) if want_chunks is None else want_chunks
    gate = asyncio.Semaphore(_PARALLEL_GETS)

    async def fetch(index: int) -> bytes:
        async with gate:
            return await _read_chunk(log, header, index)

    found = await asyncio.gather(*(fetch(index) for index in wanted))
    return header, header_bytes, dict(zip(wanted, found, strict=True))


async def _wait_in_force(log: RunLog, step: int, *, timeout_s: float | None) -> bytes:
    """Wait for the header of a step that counts: after a failed closing header that was reopened, for its successor."""
    started = time.monotonic()
    left_s = timeout_s
    while True:
        data = await wait_for_header(log, step, timeout_s=left_s)
        if not is_failed_closing(decode_header(data)):
            return data
        found = await asyncio.to_thread(load_step, log.store, log.names, step)
        in_force = data if found is None else found.in_force
        if in_force is not None:
            return in_force
        if left_s == 0.0:
            raise _timed_out(log, step, timeout_s)
        with waits.waiting(f"batch {step}, at which the run was reopened", waits_on="orchestrator"):
            await asyncio.sleep(_REOPENED_POLL_S)
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - started))


async def wait_for_header(log: RunLog, step: int, *, timeout_s: float | None = None) -> bytes:
    """Wait until Redis or the store has header `step`, and return its stored bytes.

    The store is asked first, and whenever Redis was silent for 5 s: the step may be trimmed, or its append lost.
    What Redis has is compared with it, too: an entry that is not the committed header costs the log a rebuild.
    While Redis does not hold the log the store goes on being asked, and a rebuilt log is adopted; `NotFoundError`
    when the run is being deleted. `UnavailableError` (BATCH_WAIT_TIMEOUT) after `timeout_s`.
    """
    started = time.monotonic()
    # The first look must not block: the store may have the step although Redis has trimmed it.
    limit_s = 0.0
    with waits.waiting(f"batch {step}", waits_on="orchestrator", deadline_s=timeout_s or 0.0) as wait:
        while True:
            left_s = MAX_BLOCK_S if timeout_s is None else timeout_s - (time.monotonic() - started)
            block_s = max(0.0, min(limit_s, left_s))
            limit_s = MAX_BLOCK_S
            entries = await _read_or_adopt(log, step, block_s)
            wait.update(reason=f"batch {step}" + (" (the log of the run is gone)" if entries is None else ""))
            try:
                stored = await asyncio.to_thread(read_header, log.store, log.names, step)
            except NotFoundError as error:
                if entries:
                    await _require_lost(log, step, entries[0], error)
            else:
                # The store decides. An entry that differs from the committed header is damage in Redis.
                if entries and entries[0].id == f"{step}-1" and entries[0].d != stored:
                    await damage.require_committed(log, step, entries[0].d)
                return stored
            if timeout_s is not None and time.monotonic() - started >= timeout_s:
                raise _timed_out(log, step, timeout_s)


def _timed_out(log: RunLog, step: int, timeout_s: float | None) -> UnavailableError:
    return UnavailableError(
        f"batch {step} of run {log.uid} did not come within {timeout_s or 0.0:g} s",
        reason="BATCH_WAIT_TIMEOUT",
        remedy="see `millrace run why` for what the orchestrator waits for",
        metadata={"uid": log.uid, "step": str(step)},
    )


async def _read_or_adopt(log: RunLog, step: int, block_s: float) -> list[Entry] | None:
    """Return the next batch entry from `step` on, if it comes in time; None while Redis does not hold the log."""
    try:
        return await log.read(Stream.BATCHES, after=f"{step}-0", count=1, block_s=block_s)
    except LogGoneError:
        pass
    try:
        await log.reopen()
    except LogGoneError:
        await asyncio.to_thread(require_exists, log.store, log.names)
        await asyncio.sleep(min(block_s, _POLL_S))
        return None
    return []


async def _require_lost(log: RunLog, step: int, entry: Entry, error: NotFoundError) -> None:
    """Raise `error` if the store lost the header: Redis has a later step, which the store has, too.

    What Redis has and the store never had is foreign: the copy is marked as damaged, and nothing is raised.
    """
    found = int(entry.id.partition("-")[0])
    try:
        if found == step:
            raise await damage.mark_damaged(
                log, f"stream {Stream.BATCHES}", f"at {entry.id}: that step is not committed"
            )
        await damage.require_backed(log, Stream.BATCHES, found)
    except LogGoneError as gone:
        logger.warning("a batch in Redis is foreign", extra={"uid": log.uid, "step": step, "error": gone.message})
        return
    raise error


async def _read_chunk(log: RunLog, header: batch_pb2.BatchHeader, index: int) -> bytes:
    id_ = f"{header.step}-{index + 2}"
    try:
        entries = await log.read_range(Stream.BATCHES, id_, id_)
        if entries and not entries[0].damage:
            verify_chunk(header, index, entries[0].d)
            return entries[0].d
    except CorruptObjectError as error:
        logger.warning("chunk in Redis is damaged, reading the store", extra={"uid": log.uid, "error": str(error)})
    return await asyncio.to_thread(read_chunk, log.store, header, index)
