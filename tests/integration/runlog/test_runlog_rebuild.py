"""Redis loses a run's log: it is rebuilt from the store, once, whichever process dies or races meanwhile."""

import asyncio
import json
from typing import Any

import pytest
import redis.asyncio as redis_asyncio
from redis.exceptions import ResponseError

from millrace.errors import InternalError, LogGoneError, NotFoundError, UnavailableError
from millrace.internal.v1 import policy_pb2
from millrace.runlog import (
    AppendResult,
    EventReader,
    EventWriter,
    RunLog,
    Stream,
    chain_hash,
    commit_batch,
    new_uid,
    open_redis,
    reappend_committed,
    reappend_policies,
)
from millrace.runlog import rebuild as rebuild_module
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.rebuild import open_or_rebuild
from millrace.trainer.log.client import read_batch
from millrace.v1 import event_pb2


def _warning(text: str) -> event_pb2.Event:
    return event_pb2.Event(warning=event_pb2.Warning(reason="TEST", message=text))


async def _write(log: RunLog, writer: str, *texts: str) -> None:
    events = EventWriter(log, writer)
    for text in texts:
        await events.write(_warning(text))
    await events.close()


async def _read(log: RunLog) -> list[event_pb2.Event]:
    return list(await EventReader(log).read(count=1000))


async def _wipe(redis: redis_asyncio.Redis, log: RunLog) -> dict[bytes, bytes | None]:
    """Remove every key of the deployment; returns what they held, for a Redis that comes back from an old file."""
    keys = [key async for key in redis.scan_iter(match=f"{log.names.prefix}:*", count=1000)]
    dumped = {key: await redis.dump(key) for key in keys}
    if keys:
        await redis.delete(*keys)
    return dumped


@pytest.fixture
def rebuild(redis, local_store, prefix, log):
    async def run(store=local_store, owner: str = "o-1") -> RunLog:
        return await open_or_rebuild(redis, store, prefix=prefix, uid=log.uid, owner=owner)

    return run


async def test_a_log_that_is_there_is_opened(log, rebuild, local_store):
    opened = await rebuild()
    assert (opened.generation, opened.run_hash) == (1, log.run_hash)
    assert list(local_store.list(log.names.epochs("log")))[-1].key == log.names.epoch("log", 1)


async def test_meta_and_archived_events_come_back(log, rebuild, redis):
    trainer = await log.acquire_epoch("trainer", "t")
    await log.acquire_epoch("orchestrator", "o")
    newest = await log.acquire_epoch("orchestrator", "o")
    await _write(log, "a", "1", "2")
    await _write(log, "b", "3")
    before = await _read(log)
    assert await EventArchive(log).archive() == 3
    await _wipe(redis, log)
    with pytest.raises(LogGoneError):
        await log.reopen()
    rebuilt = await rebuild()
    assert (rebuilt.generation, rebuilt.run_hash) == (2, log.run_hash)
    assert await rebuilt.current_epoch("trainer") == trainer.number == 1
    assert await rebuilt.current_epoch("orchestrator") == newest.number == 2
    events = await _read(rebuilt)
    assert events[:3] == before, "same cursors, same contents"
    assert events[3].cursor == "2-0" and events[3].warning.reason == "LOG_REBUILT" and len(events) == 4
    assert "3 archived events" in events[3].warning.message
    assert [await rebuilt.writer_sequence(writer) for writer in ("a", "b", "log", "c")] == [2, 1, 1, 0]
    await log.reopen()
    await _write(log, "a", "4")
    assert [(event.cursor, event.writer_sequence) for event in (await _read(log))[4:]] == [("2-1", 3)]
    assert await redis.ttl(log.names.stream(Stream.EVENTS)) == -1, "the restored events do not expire"
    assert not [key async for key in redis.scan_iter(match=f"{log.names.prefix}:*rebuild*", count=1000)]


async def test_a_second_wipe_gives_a_third_generation(log, rebuild, redis):
    await _write(log, "a", "1")
    for generation in (2, 3):
        await EventArchive(log).archive()
        await _wipe(redis, log)
        assert (await rebuild()).generation == generation
        await log.reopen()
    assert [event.cursor for event in await _read(log)] == ["1-0", "2-0", "3-0"]
    assert [event.writer_sequence for event in await _read(log)] == [1, 1, 2]


async def test_concurrent_rebuilds_yield_one_log(log, rebuild, redis, prefix, local_store, redis_url):
    await _write(log, "a", *map(str, range(20)))
    await EventArchive(log).archive()
    await _wipe(redis, log)
    clients = [open_redis(redis_url) for _ in range(4)]  # several processes: none waits for another's lock
    try:
        opened = await asyncio.gather(
            *(
                open_or_rebuild(client, local_store, prefix=prefix, uid=log.uid, owner=f"o-{number}")
                for number, client in enumerate(clients)
            )
        )
        assert len({found.generation for found in opened}) == 1
        await log.reopen()
        assert log.generation == opened[0].generation
        events = await _read(log)
        assert [event.warning.message for event in events[:-1]] == list(map(str, range(20)))
        assert events[-1].warning.reason == "LOG_REBUILT"
        assert not [key async for key in redis.scan_iter(match=f"{prefix}:*rebuild*", count=1000)]
        again = await asyncio.gather(*(rebuild() for _ in range(3)))
        assert {found.generation for found in again} == {log.generation}, "the losers' generations change nothing"
    finally:
        await asyncio.gather(*(client.aclose() for client in clients))


async def test_what_never_was_is_not_resurrected(redis, local_store, prefix, run_json):
    with pytest.raises(NotFoundError, match="not in the store"):
        await open_or_rebuild(redis, local_store, prefix=prefix, uid=new_uid(), owner="o")
    log = await RunLog.create(redis, local_store, prefix, new_uid(), run_json())
    await _wipe(redis, log)
    local_store.create(log.names.tombstone, b"{}")
    with pytest.raises(NotFoundError, match="being deleted"):
        await open_or_rebuild(redis, local_store, prefix=prefix, uid=log.uid, owner="o")
    assert not [key async for key in redis.scan_iter(match=f"{prefix}:*", count=1000)]


class DyingRedis(redis_asyncio.Redis):
    """A client whose process dies at command number `lives`."""

    lives = 0

    def _live(self) -> None:
        self.lives -= 1
        if self.lives < 0:
            raise ResponseError("dead")

    async def execute_command(self, *args, **options):
        self._live()
        return await super().execute_command(*args, **options)

    def pipeline(self, *args, **options):
        self._live()
        return super().pipeline(*args, **options)


async def test_a_rebuilder_may_die_at_every_command_to_redis(log, redis, local_store, prefix, redis_url):
    await log.acquire_epoch("orchestrator", "o")
    await _write(log, "a", "1", "2")
    await EventArchive(log).archive()
    await _wipe(redis, log)
    deaths = 0
    while True:
        client = DyingRedis(connection_pool=redis_asyncio.ConnectionPool.from_url(redis_url))
        client.lives = deaths
        try:
            await open_or_rebuild(client, local_store, prefix=prefix, uid=log.uid, owner="o")
            break
        except InternalError as error:
            assert "dead" in str(error)
            deaths += 1
        finally:
            await client.aclose()
    assert deaths > 6
    await log.reopen()
    events = await _read(log)
    assert [event.warning.message for event in events if event.writer == "a"] == ["1", "2"]
    assert [event.warning.reason for event in events[2:]] == ["LOG_REBUILT"], "the first that was installed stayed"
    assert await log.current_epoch("orchestrator") == 1


class ForgetfulRedis(redis_asyncio.Redis):
    """A client whose server is wiped before it sends its third pipeline."""

    count = 0

    def pipeline(self, *args, **options):
        pipeline = super().pipeline(*args, **options)
        self.count += 1
        if self.count == 3:
            pipeline.flushall()
        return pipeline


async def test_a_wipe_in_the_middle_of_a_rebuild_leaves_no_partial_log(durable, durable_log, local_store, monkeypatch):
    monkeypatch.setattr(rebuild_module, "PAGE_ENTRIES", 2)
    await _write(durable_log, "a", *map(str, range(9)))
    await EventArchive(durable_log).archive()
    await durable.client.flushall()
    pool = redis_asyncio.ConnectionPool.from_url(durable.server.url)
    client = ForgetfulRedis(connection_pool=pool)
    log = await open_or_rebuild(client, local_store, prefix=durable_log.names.prefix, uid=durable_log.uid, owner="o")
    assert log.generation == 3, "the second try"
    assert [event.warning.message for event in await _read(log)][:-1] == list(map(str, range(9)))
    await client.aclose()
    await pool.aclose()


class DyingStore:
    """A store whose user dies at call number `lives`."""

    def __init__(self, store, lives: int) -> None:
        self._store, self._lives = store, lives

    def __getattr__(self, name):
        self._lives -= 1
        if self._lives < 0:
            raise UnavailableError("dead")
        return getattr(self._store, name)


async def test_a_rebuilder_may_die_at_every_call_to_the_store(log, redis, local_store, prefix, redis_url):
    await log.acquire_epoch("orchestrator", "o")
    await _write(log, "a", "1", "2")
    await EventArchive(log).archive()
    await _wipe(redis, log)
    deaths = 0
    while True:
        client = open_redis(redis_url)  # a new process: it has proven nothing yet
        store: Any = DyingStore(local_store, deaths)
        try:
            await open_or_rebuild(client, store, prefix=prefix, uid=log.uid, owner="o")
            break
        except UnavailableError:
            deaths += 1
        finally:
            await client.aclose()
        await redis.delete(log.names.meta)  # also lost at once where the dead one had just installed it
    assert deaths > 8
    await log.reopen()
    events = await _read(log)
    assert [event.warning.message for event in events if event.writer == "a"] == ["1", "2"]
    assert await log.current_epoch("orchestrator") == 1
    numbers = [event.writer_sequence for event in events if event.writer == "log"]
    assert numbers == list(range(1, len(numbers) + 1))


async def test_batches_begin_behind_what_the_newest_policy_was_trained_on(
    log, rebuild, redis, local_store, make_batch, monkeypatch
):
    """Whatever the length of the run and its checkpoints: what is older is read in the store."""
    monkeypatch.setattr("millrace.runlog.rebuild.KEPT_POLICIES", 3)
    orchestrator, trainer = await log.acquire_epoch("orchestrator", "o"), await log.acquire_epoch("trainer", "t")
    chain = None
    for step in range(5):
        header, chunks = make_batch(step, chain=chain)
        chain = chain_hash(header.previous_chain_hash, await commit_batch(log, orchestrator, header, chunks, b""))
    for version in range(5):
        manifest = json.dumps({"digest": str(version)}).encode()
        local_store.create(log.names.policy_manifest(0, version), manifest)
        entry = policy_pb2.PolicyEntry(version=version)
        (await log.append_policy(trainer, entry.SerializeToString(), version)).require("policy")
    local_store.put(f"{log.names.policy(0, 5)}part", b"upload that was never committed")
    local_store.create(log.names.checkpoint_manifest(2), b"{}")
    await _wipe(redis, log)
    await rebuild()
    await log.reopen()
    assert [await log.next_position(stream) for stream in (Stream.BATCHES, Stream.POLICIES)] == [4, 2]
    assert await reappend_committed(log, orchestrator) == 1
    assert await reappend_policies(log, trainer) == 3
    assert [await log.next_position(stream) for stream in (Stream.BATCHES, Stream.POLICIES)] == [5, 5]
    assert (await read_batch(log, 4, timeout_s=60))[0].step == 4
    assert (await read_batch(log, 1, timeout_s=60))[0].step == 1, "what is older comes from the store"
    assert await reappend_committed(log, orchestrator) == await reappend_policies(log, trainer) == 0


async def test_policies_begin_behind_a_hole(log, rebuild, redis, local_store):
    trainer = await log.acquire_epoch("trainer", "t")
    for version in (0, 1, 3, 4):
        local_store.create(log.names.policy_manifest(0, version), b'{"digest": "d"}')
    local_store.put(f"{log.names.policy(0, 5)}part", b"never committed")
    await _wipe(redis, log)
    await rebuild()
    await log.reopen()
    assert await log.next_position(Stream.POLICIES) == 3
    assert await reappend_policies(log, trainer) == 2


@pytest.mark.parametrize("is_archived", [True, False])
async def test_a_copy_from_before_a_rebuild_is_replaced(
    is_archived, log, rebuild, redis, redis_url, local_store, prefix
):
    """Redis is wiped, the log rebuilt, and then Redis comes back from a file that has neither."""
    await _write(log, "a", "1")
    await EventArchive(log).archive()
    await log.append_rollouts([b"rollout"])
    await _write(log, "a", "2")
    old = await _wipe(redis, log)
    rebuilt = await rebuild()
    if is_archived:
        await _write(rebuilt, "b", "3")
        await EventArchive(rebuilt).archive()
    await _wipe(redis, log)
    for key, value in old.items():
        assert value is not None
        await redis.restore(key, 0, value)
    with pytest.raises(LogGoneError):
        await rebuilt.reopen()
    client = open_redis(redis_url)
    try:
        mended = await open_or_rebuild(client, local_store, prefix=log.names.prefix, uid=log.uid, owner="o")
        assert mended.generation == 3
        found = [(event.cursor, event.writer, event.warning.message) for event in await _read(mended)]
        only_store = [("2-1", "b", "3")] if is_archived else []
        assert [item for item in found if item[1] != "log"] == [("1-0", "a", "1"), *only_store, ("3-0", "a", "2")]
        assert [item[0] for item in found if item[1] == "log"] == (["2-0", "3-1"] if is_archived else ["3-1"])
        assert [entry.d for entry in await mended.read("rollouts")] == [b"rollout"], "only Redis has these"
    finally:
        await client.aclose()


async def test_a_copy_that_lost_archived_events_is_replaced(log, rebuild, redis):
    """The tail is gone: what Redis numbers now would collide with what the store has."""
    archive = EventArchive(log)
    await _write(log, "a", "1", "2")
    old = await _wipe(redis, log)
    for key, value in old.items():
        assert value is not None
        await redis.restore(key, 0, value)
    await _write(log, "a", "3")
    await _write(log, "b", "4")
    assert await archive.archive() == 4
    await _wipe(redis, log)
    for key, value in old.items():
        assert value is not None
        await redis.restore(key, 0, value)
    await _write(log, "c", "new 1-2")
    with pytest.raises(LogGoneError, match="which the store has") as caught:
        await archive.archive()
    assert caught.value.reason == "LOG_BEHIND_STORE"
    mended = await rebuild()
    assert mended.generation == 2
    found = [(event.cursor, event.writer, event.warning.message) for event in await _read(mended)]
    assert found[:-1] == [
        ("1-0", "a", "1"),
        ("1-1", "a", "2"),
        ("1-2", "a", "3"),
        ("1-3", "b", "4"),
        ("2-0", "c", "new 1-2"),
    ]
    assert [await mended.writer_sequence(writer) for writer in "abc"] == [3, 1, 1]
    await log.reopen()
    assert await archive.archive() == 2


async def test_a_stale_writer_stays_fenced(log, rebuild, redis):
    await log.acquire_epoch("trainer", "old")
    old = await log.acquire_epoch("trainer", "old")
    newest = await log.acquire_epoch("trainer", "new")
    await _wipe(redis, log)
    await rebuild()
    await log.reopen()
    entry = policy_pb2.PolicyEntry(version=0).SerializeToString()
    assert await log.append_policy(old, entry, 0) is AppendResult.FENCED
    assert await log.append_policy(newest, entry, 0) is AppendResult.OK
