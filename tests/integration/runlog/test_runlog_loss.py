"""Batches, policies, leases and fences when Redis is killed, loses its tail, or is wiped: real servers, real files."""

import asyncio
import json
import time

import pytest

from millrace.errors import ConflictError, FencedError, LogGoneError, NotFoundError
from millrace.internal.v1 import policy_pb2
from millrace.local.redis import EmbeddedRedis
from millrace.runlog import (
    AppendResult,
    EventReader,
    EventWriter,
    Lease,
    RunLog,
    Stream,
    chain_hash,
    commit_batch,
    new_uid,
    open_redis,
    reappend_committed,
    reappend_policies,
)
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.rebuild import open_or_rebuild
from millrace.telemetry import waits
from millrace.trainer.log.client import read_batch
from millrace.v1 import event_pb2
from millrace_testing.runlog.committed import load_committed, load_headers


@pytest.fixture
def rebuild(durable, durable_log, local_store, prefix):
    async def run() -> RunLog:
        return await open_or_rebuild(durable.client, local_store, prefix=prefix, uid=durable_log.uid, owner="o")

    return run


@pytest.fixture
def commit(make_batch):
    async def run(log, epoch, steps, chain=None, seed=0):
        for step in steps:
            header, chunks = make_batch(step, chain=chain, seed=seed)
            header.run_uid = log.uid
            chain = chain_hash(header.previous_chain_hash, await commit_batch(log, epoch, header, chunks, b"archive"))
        return chain

    return run


async def _publish(log, epoch, versions) -> None:
    for version in versions:
        manifest = json.dumps({"digest": str(version)}).encode()
        log.store.create(log.names.policy_manifest(0, version), manifest)
        entry = policy_pb2.PolicyEntry(version=version, manifest_key=log.names.policy_manifest(0, version))
        (await log.append_policy(epoch, entry.SerializeToString(), version)).require("policy")


async def test_a_lost_tail_of_batches_and_policies_is_repeated(durable, durable_log, commit):
    log = durable_log
    orchestrator, trainer = await log.acquire_epoch("orchestrator", "o"), await log.acquire_epoch("trainer", "t")
    chain = await commit(log, orchestrator, [0, 1])
    await _publish(log, trainer, [0, 1])
    await durable.mark()
    chain = await commit(log, orchestrator, [2, 3], chain)
    await _publish(log, trainer, [2, 3])
    before, instance = await load_headers(log), await log.read_instance()
    await durable.lose_tail()
    assert await log.read_instance() != instance
    assert [await log.next_position(stream) for stream in (Stream.BATCHES, Stream.POLICIES)] == [2, 2]
    assert (await read_batch(log, 3, timeout_s=60))[0].step == 3, "the store has it"
    chain = await commit(log, orchestrator, [4], chain)  # repeats 2 and 3, too
    assert await log.next_position(Stream.BATCHES) == 5
    assert await reappend_policies(log, trainer) == 2 and await reappend_policies(log, trainer) == 0
    headers, found = await load_headers(log)
    assert found == chain and headers[:4] == before[0]


async def test_a_lost_epoch_is_written_again_by_its_holder_and_fences(durable, durable_log, commit):
    log = durable_log
    old = await log.acquire_epoch("orchestrator", "old")
    await durable.mark()
    new = await log.acquire_epoch("orchestrator", "new")
    await commit(log, new, [0])
    await durable.lose_tail()
    assert await log.current_epoch("orchestrator") == old.number
    with pytest.raises(FencedError):
        await commit(log, old, [0], seed=1)
    await reappend_committed(log, new)
    assert await log.current_epoch("orchestrator") == new.number
    assert await log.append_batch(old, b"", ()) is AppendResult.FENCED


async def test_kill_9_with_everysec_loses_nothing_that_is_a_second_old(tmp_path, local_store, prefix, run_json, commit):
    """The default of the local stack: what is not synced comes again from the store, the spool and the rings."""
    server = EmbeddedRedis(tmp_path / "redis", append_only="everysec")
    await asyncio.to_thread(server.start)
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, prefix, new_uid(), run_json())
        epoch = await log.acquire_epoch("orchestrator", "o")
        lease = await Lease.acquire(log, "orchestrator", "o", 30)
        writer = EventWriter(log, "a")
        chain, number = None, 0
        assert lease is not None
        for round_ in range(3):
            chain = await commit(log, epoch, [2 * round_], chain)
            for _ in range(20):
                number += 1
                await writer.write(event_pb2.Event(warning=event_pb2.Warning(message=str(number))))
            await writer.flush()
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            assert await lease.renew() and lease.may_write
            chain = await commit(log, epoch, [2 * round_ + 1], chain)
        await writer.close()
        events = await EventReader(log).read(count=1000)
        assert [event.warning.message for event in events] == [str(index + 1) for index in range(60)]
        assert [event.writer_sequence for event in events] == list(range(1, 61))
        assert await log.next_position(Stream.BATCHES) == 6
        assert (await load_committed(log))[1] == chain
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_the_next_batch_is_found_across_a_wipe(durable, durable_log, rebuild, commit):
    log = durable_log
    epoch = await log.acquire_epoch("orchestrator", "o")
    chain = await commit(log, epoch, [0])
    reader = await RunLog.open(durable.client, log.store, prefix=log.names.prefix, uid=log.uid)
    reading = asyncio.create_task(read_batch(reader, 1))
    await asyncio.sleep(0.2)  # blocked in Redis
    began = time.monotonic()
    await durable.client.flushall()
    while not any("batch 1 (the log of the run is gone)" in wait.reason for wait in waits.snapshot("t")):
        await asyncio.sleep(0.05)
        assert time.monotonic() - began < 5
    await rebuild()
    await log.reopen()
    assert await reappend_committed(log, epoch) == 1
    await commit(log, epoch, [1], chain)
    async with asyncio.timeout(5):
        assert (await reading)[0].step == 1
    assert reader.generation == 2


async def test_a_batch_that_only_the_store_has_is_read_while_the_log_is_gone(durable, durable_log, commit):
    epoch = await durable_log.acquire_epoch("orchestrator", "o")
    await commit(durable_log, epoch, [0])
    await durable.client.flushall()
    header, _, chunks = await read_batch(durable_log, 0, timeout_s=60)
    assert header.step == 0 and len(chunks) == len(header.chunks)


async def test_a_reader_of_a_deleted_run_does_not_wait_for_ever(durable, durable_log, local_store):
    local_store.create(durable_log.names.tombstone, b"{}")
    await durable.client.flushall()
    with pytest.raises(NotFoundError, match="being deleted"):
        await read_batch(durable_log, 0)


async def test_a_commit_into_a_wiped_redis_is_durable_and_comes_again(durable, durable_log, rebuild, commit):
    log = durable_log
    epoch = await log.acquire_epoch("orchestrator", "o")
    chain = await commit(log, epoch, [0])
    await durable.client.flushall()
    with pytest.raises(LogGoneError):
        await commit(log, epoch, [1], chain)
    assert local_header(log, 1) is not None, "the header object is the commit"
    with pytest.raises(LogGoneError):
        await reappend_committed(log, epoch)
    await rebuild()
    await log.reopen()
    stored = local_header(log, 1)
    chain = await commit(log, epoch, [1], chain)  # again: finds its own commit, and repeats step 0 with it
    assert local_header(log, 1) == stored
    assert await log.next_position(Stream.BATCHES) == 2
    await commit(log, epoch, [2], chain)
    assert [entry.id for entry in await log.read("batches") if entry.id.endswith("-1")] == ["0-1", "1-1", "2-1"]


def local_header(log: RunLog, step: int) -> bytes | None:
    try:
        return log.store.get(log.names.batch_header(step))
    except NotFoundError:
        return None


async def test_an_older_epoch_loses_across_a_wipe_and_changes_nothing(durable, durable_log, rebuild, commit):
    """Two orchestrators and two trainers on one run, Redis wiped in between: its counters begin anew, fences do not."""
    log = durable_log
    old_log = await RunLog.open(durable.client, log.store, prefix=log.names.prefix, uid=log.uid)
    old = {role: await old_log.acquire_epoch(role, "old") for role in ("orchestrator", "trainer")}
    new = {role: await log.acquire_epoch(role, "new") for role in ("orchestrator", "trainer")}
    chain = await commit(log, new["orchestrator"], [0])
    await _publish(log, new["trainer"], [0])
    await EventArchive(log).archive()
    await durable.client.flushall()
    with pytest.raises(FencedError):  # Redis does not know any epoch now
        await commit(old_log, old["orchestrator"], [1], chain, seed=1)
    await rebuild()
    await log.reopen()
    await old_log.reopen()
    with pytest.raises(FencedError):
        await commit(old_log, old["orchestrator"], [1], chain, seed=1)
    assert local_header(log, 1) is None
    await reappend_committed(log, new["orchestrator"])
    await reappend_policies(log, new["trainer"])
    await commit(log, new["orchestrator"], [1], chain)
    await _publish(log, new["trainer"], [1])
    objects, entries = _objects(log), await _entries(log)
    for step in (0, 1, 2):
        with pytest.raises(ConflictError):  # FencedError is one
            await commit(old_log, old["orchestrator"], [step], chain, seed=2)
    for version in (0, 1, 2):
        entry = policy_pb2.PolicyEntry(version=version, digest="other").SerializeToString()
        assert await old_log.append_policy(old["trainer"], entry, version) is AppendResult.FENCED
    with pytest.raises(FencedError):
        await reappend_policies(await _without_policies(durable, old_log), old["trainer"])
    assert not log.store.create(log.names.epoch("trainer", old["trainer"].number), b"again")
    assert not log.store.create(log.names.epoch("trainer", new["trainer"].number), b"again")
    assert (await log.acquire_epoch("trainer", "third")).number == 3
    assert {key: data for key, data in _objects(log).items() if key in objects} == objects
    assert await _entries(log) | {"policies": []} == entries | {"policies": []}


async def _without_policies(durable, log: RunLog) -> RunLog:
    await durable.client.delete(log.names.stream(Stream.POLICIES))
    return log


def _objects(log: RunLog) -> dict[str, bytes]:
    return {info.key: log.store.get(info.key) for info in log.store.list(log.names.root)}


async def _entries(log: RunLog) -> dict[str, list[tuple[str, str]]]:
    return {
        stream.value: [(entry.id, entry.h) for entry in await log.read(stream, count=1000)]
        for stream in (Stream.BATCHES, Stream.POLICIES)
    }
