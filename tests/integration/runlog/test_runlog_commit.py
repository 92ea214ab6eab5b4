"""Commit in the store before Redis, reading back from either, chain and recovery."""

import asyncio

import numpy as np
import pytest

from millrace.errors import CorruptObjectError, FencedError, UnavailableError
from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header, unpack_batch
from millrace.runlog import Frontier, RunLog, Stream, chain_hash, commit_batch, new_uid, reappend_committed, recover
from millrace.runlog.records.frontier import genesis_hash
from millrace.runlog.records.run_record import RunOrigin, load_origin
from millrace.telemetry import faults
from millrace.telemetry.faults import Action, Fault, Point
from millrace.trainer.log.client import read_batch
from millrace_testing.patience import patient
from millrace_testing.runlog.committed import load_committed, load_headers


def genesis(log: RunLog) -> bytes:
    return load_origin(log.store, log.names).chain_hash


async def _commit(log, epoch, make_batch, steps):
    chain = genesis(log)
    for step in steps:
        header, chunks = make_batch(step, chain=chain)
        chain = chain_hash(chain, await commit_batch(log, epoch, header, chunks, b"archive"))
    return chain


async def test_commit_is_in_the_store_and_in_redis(log, local_store, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    stored = await commit_batch(log, epoch, header, chunks, b"archive")
    assert local_store.get(log.names.batch_header(0)) == stored
    committed = decode_header(stored)
    assert committed.writer_epoch == 1
    assert local_store.get(committed.rollouts_key) == b"archive"
    assert [local_store.get(chunk.key) for chunk in committed.chunks] == chunks
    assert "/e00000001-" in committed.chunks[0].key and "/e00000001-" in committed.rollouts_key
    entries = await log.read("batches")
    assert [entry.d for entry in entries] == [stored, *chunks]


async def test_read_batch_whole_and_in_part(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    stored = await commit_batch(log, epoch, header, chunks, b"")
    got, got_bytes, got_chunks = await read_batch(log, 0, timeout_s=60)
    assert got_bytes == stored and dict(got_chunks) == dict(enumerate(chunks))
    _, _, part = await read_batch(log, 0, want_chunks=[1], timeout_s=60)
    assert dict(part) == {1: chunks[1]}
    samples = unpack_batch(got, got_chunks)
    assert len(samples) == 4 and samples[3].ordinal == 1


async def test_read_batch_waits_for_a_later_commit(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    reading = asyncio.create_task(read_batch(log, 0, timeout_s=10))
    await asyncio.sleep(0.2)
    assert not reading.done()
    await _commit(log, epoch, make_batch, [0])
    async with asyncio.timeout(min(patient(3), 9)):
        header, _, _ = await reading
    assert header.step == 0


async def test_read_batch_times_out_with_a_name(log):
    with pytest.raises(UnavailableError, match=r"batch 7 .* 0\.2 s"):
        await read_batch(log, 7, timeout_s=0.2)


async def test_read_batch_from_the_store_when_redis_has_only_the_header(log, make_batch, monkeypatch):
    monkeypatch.setattr(recover, "MAX_REDIS_BATCH_BYTES", 10)
    monkeypatch.setattr("millrace.runlog.commit.MAX_REDIS_BATCH_BYTES", 10)
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    await commit_batch(log, epoch, header, chunks, b"")
    assert len(await log.read("batches")) == 1
    _, _, got = await read_batch(log, 0, timeout_s=60)
    assert dict(got) == dict(enumerate(chunks))


async def test_read_batch_from_the_store_when_redis_trimmed(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    await _commit(log, epoch, make_batch, [0, 1, 2])
    await log.trim_batches(3)
    header, _, chunks = await read_batch(log, 1, timeout_s=60)
    assert header.step == 1 and len(chunks) == len(header.chunks)
    await log.trim_batches(2)


async def test_a_damaged_chunk_in_the_store_is_never_returned(log, local_store, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    stored = decode_header(await commit_batch(log, epoch, header, chunks, b""))
    damaged = bytearray(chunks[0])
    damaged[10] ^= 1
    local_store.put(stored.chunks[0].key, bytes(damaged))
    await log.trim_batches(1)
    with pytest.raises(CorruptObjectError, match="sha256"):
        await read_batch(log, 0, timeout_s=60)


async def test_committing_again_after_an_error_finds_the_first_commit(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    header, chunks = make_batch(0)
    first = await commit_batch(log, epoch, header, chunks, b"archive")
    header, chunks = make_batch(0)
    assert await commit_batch(log, epoch, header, chunks, b"archive") == first
    assert await log.next_position(Stream.BATCHES) == 1


async def test_other_content_for_a_committed_step_is_fenced(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    await _commit(log, epoch, make_batch, [0])
    header, chunks = make_batch(0, seed=5)
    with pytest.raises(FencedError, match="other content"):
        await commit_batch(log, epoch, header, chunks, b"")


async def test_two_orchestrators_commit_one_batch(log, redis, local_store, prefix, make_batch):
    """The same step by two holders: exactly one header object, and the loser learns that it lost."""
    second = await RunLog.open(redis, local_store, prefix=prefix, uid=log.uid)
    old = await log.acquire_epoch("orchestrator", "o1")
    new = await second.acquire_epoch("orchestrator", "o2")
    mine, mine_chunks = make_batch(0)
    theirs, theirs_chunks = make_batch(0, seed=1)
    with pytest.raises(FencedError):
        await commit_batch(log, old, mine, mine_chunks, b"")
    await commit_batch(second, new, theirs, theirs_chunks, b"")
    last, _ = await load_committed(log)
    assert last is not None and last.writer_epoch == new.number


async def test_load_committed_walks_the_chain(log, make_batch):
    assert await load_committed(log) == (None, genesis(log))
    epoch = await log.acquire_epoch("orchestrator", "o")
    chain = await _commit(log, epoch, make_batch, range(20))
    headers, found = await load_headers(log)
    assert [header.step for header in headers] == list(range(20)) and found == chain
    assert Frontier.from_header(headers[-1]) == Frontier(40)


async def test_a_lost_or_replaced_header_breaks_the_chain(log, local_store, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    await _commit(log, epoch, make_batch, range(4))
    header, _ = make_batch(1, seed=9)
    saved = local_store.get(log.names.batch_header(1))
    local_store.put(log.names.batch_header(1), header.SerializeToString())
    with pytest.raises(CorruptObjectError, match="chain"):
        await load_committed(log)
    local_store.delete(log.names.batch_header(1))
    with pytest.raises(CorruptObjectError, match="step 2 is committed"):
        await load_committed(log)
    local_store.put(log.names.batch_header(1), saved)
    assert (await load_committed(log))[0] is not None


async def test_what_redis_lost_is_repeated_from_the_store(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    await _commit(log, epoch, make_batch, range(5))
    before = [(entry.id, entry.d) for entry in await log.read("batches")]
    key = log.names.stream(Stream.BATCHES)
    # A crash without the append-only file's tail: the stream is as it was after step 1.
    kept = [(id_, fields) for id_, fields in await redis.xrange(key) if int(id_.split(b"-")[0]) < 2]
    await redis.delete(key)
    for id_, fields in kept:
        await redis.xadd(key, fields, id=id_)
    assert await reappend_committed(log, epoch) == 3
    assert [(entry.id, entry.d) for entry in await log.read("batches")] == before
    assert await reappend_committed(log, epoch) == 0


async def test_commit_heals_the_gap_that_a_lost_tail_left(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    chain = await _commit(log, epoch, make_batch, range(2))
    await redis.delete(log.names.stream(Stream.BATCHES))
    header, chunks = make_batch(2, chain=chain)
    await commit_batch(log, epoch, header, chunks, b"")
    assert await log.next_position(Stream.BATCHES) == 3


async def test_a_committed_step_that_never_reached_redis_is_read_from_the_store(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o")
    await _commit(log, epoch, make_batch, [0])
    await redis.delete(log.names.stream(Stream.BATCHES))
    header, _, chunks = await read_batch(log, 0, timeout_s=60)
    samples = unpack_batch(header, chunks)
    assert all(np.isfinite(sample.advantages).all() for sample in samples)


async def test_intents_keep_their_order(log):
    await asyncio.gather(*(log.write_intent("cancel", {"n": n}) for n in range(6)))
    found = await log.read_intents()
    assert [intent.sequence for intent in found] == [1, 2, 3, 4, 5, 6]
    assert sorted(intent.payload["n"] for intent in found) == list(range(6))
    assert [intent.sequence for intent in await log.read_intents(after=4)] == [5, 6]


async def test_the_log_lives_in_s3_too(redis, s3_store, prefix, run_json):
    log = await RunLog.create(redis, s3_store, prefix, new_uid(), run_json())
    epochs = [await log.acquire_epoch("orchestrator", f"o{number}") for number in range(3)]
    header = batch_pb2.BatchHeader(run_uid=log.uid, kind=batch_pb2.BATCH_KIND_CLOSE, previous_chain_hash=genesis(log))
    stored = await commit_batch(log, epochs[-1], header, [], b"archive")
    last, chain = await load_committed(log)
    assert last is not None and last.writer_epoch == 3 and chain == chain_hash(genesis(log), stored)
    await log.write_intent("cancel", {})
    assert [intent.kind for intent in await log.read_intents()] == ["cancel"]
    await log.trim_batches(1)
    assert (await read_batch(log, 0, timeout_s=60))[1] == stored


async def test_the_log_of_a_fork_begins_at_its_origin(redis, local_store, prefix, run_json, make_batch):
    chain, ordinals = b"\1" * 32, {"resolved_below": 6, "resolved_above": [8]}
    parent = {"uid": "p", "name": "p", "step": 5, "base_step": 3, "chain_hash": chain.hex(), **ordinals}
    log = await RunLog.create(redis, local_store, prefix, new_uid(), run_json(parent=parent))
    continued, chain = chain, genesis_hash(chain, local_store.get(log.names.run_json))
    assert load_origin(local_store, log.names) == RunOrigin(3, chain, continued, Frontier(6, frozenset([8])))
    assert await load_committed(log) == (None, chain)
    assert [await log.next_position(stream) for stream in (Stream.BATCHES, Stream.POLICIES)] == [3, 3]
    epoch = await log.acquire_epoch("orchestrator", "o")
    for step in (3, 4):
        header, chunks = make_batch(step, chain=chain)
        header.run_uid = log.uid
        chain = chain_hash(chain, await commit_batch(log, epoch, header, chunks, b""))
    headers, found = await load_headers(log)
    assert [header.step for header in headers] == [3, 4] and found == chain
    assert (await read_batch(log, 3, timeout_s=60))[0].step == 3


async def test_a_parent_without_a_base_begins_at_zero(redis, local_store, prefix, run_json):
    for parent in (None, {}, {"uid": "p", "name": "p", "step": 5}):
        log = await RunLog.create(redis, local_store, prefix, new_uid(), run_json(parent=parent))
        assert load_origin(local_store, log.names) == RunOrigin(chain_hash=chain_hash(bytes(32), await log.run_json()))
    with pytest.raises(CorruptObjectError, match=r"run\.json .*chain_hash"):
        await RunLog.create(redis, local_store, prefix, new_uid(), run_json(parent={"base_step": 2}))


@pytest.mark.parametrize(
    "point", [Point.ORCHESTRATOR_MID_COMMIT, Point.ORCHESTRATOR_AFTER_HEADER, Point.ORCHESTRATOR_AFTER_COMMIT]
)
async def test_a_commit_that_was_broken_off_at_a_fault_point_is_finished(log, make_batch, tmp_path, monkeypatch, point):
    monkeypatch.setattr(faults, "DIRECTORY", str(tmp_path))
    epoch = await log.acquire_epoch("orchestrator", "o")
    chain = await _commit(log, epoch, make_batch, [0])
    fired = faults.arm(tmp_path, Fault(point=point, action=Action.RAISE, when={"step": 1}))
    header, chunks = make_batch(1, chain=chain)
    with pytest.raises(UnavailableError, match=r"fault injected at orchestrator\."):
        await commit_batch(log, epoch, header, chunks, b"archive")
    assert fired.exists()
    is_durable = log.store.head(log.names.batch_header(1)) is not None
    assert is_durable == (point is not Point.ORCHESTRATOR_MID_COMMIT)
    assert await log.next_position(Stream.BATCHES) == (2 if point is Point.ORCHESTRATOR_AFTER_COMMIT else 1)
    successor = await log.acquire_epoch("orchestrator", "o-2")
    assert await reappend_committed(log, successor) == (1 if point is Point.ORCHESTRATOR_AFTER_HEADER else 0)
    assert await log.next_position(Stream.BATCHES) == (2 if is_durable else 1)
