"""Events: numbered without gaps, ordered by cursor, written through outages of Redis."""

import asyncio
import json
import threading
import time

import pytest

from millrace.errors import CapacityError, InvalidSpecError, InvalidStateError, NotFoundError, UnavailableError
from millrace.local.redis import EmbeddedRedis
from millrace.orchestrator.catalog import RunCatalog
from millrace.runlog import EventReader, EventWriter, RunLog, Stream, event_archive, new_uid, open_redis
from millrace.runlog.event_archive import EventArchive
from millrace.runlog.records.run_record import RunRecord
from millrace.telemetry import waits
from millrace.v1 import event_pb2
from millrace_testing.lanes import pairs_by_default
from millrace_testing.patience import patient


def _warning(number: int) -> event_pb2.Event:
    return event_pb2.Event(warning=event_pb2.Warning(reason="TEST", message=str(number)))


async def _all(log: RunLog) -> list[event_pb2.Event]:
    return list(await EventReader(log).read(count=1000))


async def test_events_come_in_order_with_cursor_writer_and_number(log):
    writer = EventWriter(log, "trainer-0")
    for number in range(50):
        await writer.write(_warning(number))
    await writer.close()
    events = await _all(log)
    assert [event.warning.message for event in events] == [str(number) for number in range(50)]
    assert [event.writer_sequence for event in events] == list(range(1, 51))
    assert {event.writer for event in events} == {"trainer-0"}
    assert [event.cursor for event in events] == [f"1-{number}" for number in range(50)]
    assert all(event.time.seconds > 1_600_000_000 for event in events)


async def test_a_reader_continues_behind_its_cursor(log):
    writer = EventWriter(log, "w")
    for number in range(5):
        await writer.write(_warning(number))
    await writer.flush()
    reader = EventReader(log)
    first = await reader.read(count=2)
    rest = await reader.read(after=first[-1].cursor)
    assert [event.warning.message for event in rest] == ["2", "3", "4"]
    assert list(await reader.read(after=rest[-1].cursor)) == []
    reading = asyncio.create_task(reader.read(after=rest[-1].cursor, block_s=5))
    await asyncio.sleep(0.05)
    await writer.write(_warning(5))
    async with asyncio.timeout(min(patient(2), 4.5)):
        assert [event.warning.message for event in await reading] == ["5"]
    await writer.close()


async def test_a_successor_continues_the_numbers(log):
    for number in range(3):
        writer = EventWriter(log, "trainer-0")
        await writer.write(_warning(number))
        await writer.close()
    assert [event.writer_sequence for event in await _all(log)] == [1, 2, 3]


async def test_two_writers_of_one_name_do_not_lose_an_event(log):
    first, second = EventWriter(log, "w"), EventWriter(log, "w")
    for number in range(20):
        await first.write(_warning(number))
        await second.write(_warning(100 + number))
    await asyncio.gather(first.close(), second.close())
    events = await _all(log)
    assert sorted(event.writer_sequence for event in events) == list(range(1, 41))
    assert len({event.warning.message for event in events}) == 40


async def test_a_trimmed_cursor_is_named(log, redis):
    writer = EventWriter(log, "w")
    for number in range(6):
        await writer.write(_warning(number))
    await writer.close()
    cursor = (await EventReader(log).read(count=1))[0].cursor
    await redis.execute_command("XTRIM", log.names.stream(Stream.EVENTS), "MINID", "1-3")
    with pytest.raises(InvalidStateError, match="trimmed") as caught:
        await EventReader(log).read(after=cursor)
    assert caught.value.metadata["oldest_cursor"] == "1-3"
    assert len(await EventReader(log).read(after="1-2")) == 3


@pytest.mark.parametrize("cursor", ["x", "1", "-1-0", "1-0-0", "1-" + "9" * 20, "1-" + "9" * 30])
async def test_a_bad_cursor_is_refused(log, cursor):
    with pytest.raises(InvalidSpecError, match="cursor"):
        await EventReader(log).read(after=cursor)


async def test_an_oversized_event_is_refused(log):
    writer = EventWriter(log, "w")
    with pytest.raises(CapacityError, match="bytes"):
        await writer.write(event_pb2.Event(warning=event_pb2.Warning(message="x" * 300_000)))
    await writer.close()


async def test_a_writer_waits_visibly_for_a_gone_log_and_close_stays_bounded(log, redis):
    writer = EventWriter(log, "w")
    await redis.delete(log.names.meta)
    await writer.write(_warning(0))
    with pytest.raises(UnavailableError, match="1 events of w"):
        await writer.flush(timeout_s=0.2)
    assert [wait.waits_on for wait in waits.snapshot("t") if "append events of w" in wait.reason] == ["orchestrator"]
    await writer.write(_warning(1))
    with pytest.raises(UnavailableError, match="rebuilds the log"):
        await writer.close(timeout_s=0.2)
    assert not [wait for wait in waits.snapshot("t") if "append events of w" in wait.reason]


async def test_a_deleted_run_ends_the_writer(log, redis, local_store):
    writer = EventWriter(log, "w")
    local_store.create(log.names.tombstone, b"{}")
    await redis.delete(log.names.meta)
    await writer.write(_warning(0))
    for call in (writer.flush, lambda: writer.write(_warning(1)), writer.close):
        with pytest.raises(NotFoundError, match="being deleted"):
            await call()


async def test_events_survive_an_outage_of_redis(tmp_path, local_store, run_json):
    """Redis is killed and comes back with its append-only file: nothing is lost, doubled or out of order."""
    server = EmbeddedRedis(tmp_path / "redis", append_only="always")
    server.start()
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        writer = EventWriter(log, "w")
        for number in range(10):
            await writer.write(_warning(number))
        await writer.flush()
        await asyncio.to_thread(server.kill)
        for number in range(10, 20):
            await writer.write(_warning(number))
        with pytest.raises(UnavailableError, match="events of w"):
            await writer.flush(timeout_s=0.3)
        await asyncio.to_thread(server.start)
        await writer.close()
        events = await _all(log)
        assert [event.warning.message for event in events] == [str(number) for number in range(20)]
        assert [event.writer_sequence for event in events] == list(range(1, 21))
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_a_full_queue_makes_the_writer_wait(tmp_path, local_store, run_json):
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        writer = EventWriter(log, "w", queue_size=2)
        await asyncio.to_thread(server.kill)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                for number in range(10):
                    await writer.write(_warning(number))
        with pytest.raises(UnavailableError):
            await writer.close(timeout_s=0.2)
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_trimmed_events_are_read_from_the_archive(log, redis, local_store, monkeypatch):
    """Two archivers wrote objects that overlap; Redis keeps a window, whatever the number of events."""
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 5)
    writer, archives = EventWriter(log, "w"), [EventArchive(log), EventArchive(log)]
    for number in range(60):
        await writer.write(_warning(number))
        if number % 7 == 0:
            await writer.flush()
            await archives[number % 2].archive()
            await archives[number % 2].trim()
    await writer.close()
    assert await archives[0].archive() and await archives[0].trim()
    stream = log.names.stream(Stream.EVENTS)
    assert await redis.xlen(stream) == 6, "of these five and the newest archived one"
    for first in (0, 1, 6, 7, 8, 30, 53, 54, 59):
        reader, cursor, seen = EventReader(log), f"1-{first - 1}" if first else "", []
        while events := await reader.read(after=cursor, count=4):
            assert len(events) <= 4
            seen += [event.warning.message for event in events]
            cursor = events[-1].cursor
        assert seen == [str(number) for number in range(first, 60)]
    assert await archives[0].trim() == 0


async def test_events_that_are_in_no_archive_are_never_trimmed(log, redis, monkeypatch):
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 2)
    writer, archive = EventWriter(log, "w"), EventArchive(log)
    for number in range(10):
        await writer.write(_warning(number))
    await writer.flush()
    assert await archive.trim() == 0, "nothing is archived"
    await archive.archive()
    for number in range(10, 50):
        await writer.write(_warning(number))
    await writer.close()
    await archive.trim()
    assert await redis.xlen(log.names.stream(Stream.EVENTS)) == 3 + 40


async def _write_and_trim(log: RunLog, count: int) -> None:
    """Write `count` events; four are archived in each object."""
    writer, archive = EventWriter(log, "w"), EventArchive(log)
    for number in range(count):
        await writer.write(_warning(number))
        if number % 4 == 3:
            await writer.flush()
            await archive.archive()
            await archive.trim()
    await writer.close()


async def _follow(log: RunLog, after: str = "") -> list[int]:
    """Return the numbers of all events after a cursor, as a reader finds them page by page."""
    reader, seen = EventReader(log), []
    while events := await reader.read(after=after):
        seen += [int(event.warning.message) for event in events]
        after = events[-1].cursor
    return seen


@pytest.mark.parametrize(("lost", "how"), pairs_by_default([0, 2, 5, 8], ["damaged", "missing"]))
async def test_an_archive_object_that_is_lost_hides_no_other_event(
    redis, local_store, prefix, run_json, monkeypatch, caplog, how, lost
):
    """The reader, and an orchestrator that has not read the run before, go on behind it, with a warning."""
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 3)
    uid = new_uid()
    known = RunRecord(name="x", uid=uid, kind="RL", config={}, create_time="2026-01-01T00:00:00+00:00")
    record = run_json(**json.loads(known.encode()))
    log = await RunLog.create(redis, local_store, prefix, uid, record)
    await _write_and_trim(log, 40)
    store = log.store
    key = sorted(info.key for info in store.list(log.names.event_archive))[lost]
    data = store.get(key)
    store.delete(key)
    if how == "damaged":
        store.create(key, data[:-7] + b"x" * 7)
    hole = range(4 * lost, 4 * lost + 4)
    assert await _follow(log) == [number for number in range(40) if number not in hole]
    warnings = [vars(record) for record in caplog.records if record.levelname == "WARNING"]
    holes = [(each["after"], each["before"]) for each in warnings if "before" in each]
    assert holes == [(f"1-{hole[0] - 1}" if lost else "", f"1-{hole[-1] + 1}")]
    assert [each["key"] for each in warnings if "key" in each] == ([key] if how == "damaged" else [])
    catalog = RunCatalog(redis=log.redis, store=store, prefix=log.names.prefix, owner="o")
    view = await catalog.look_at(log.uid, "x", is_looked_at=True)
    assert view.damage is None and view.cursor == "1-39"


async def test_objects_of_the_archive_are_read_once_and_several_at_a_time(log, monkeypatch):
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 3)
    await _write_and_trim(log, 120)
    lock, now, most, keys = threading.Lock(), 0, 0, []
    get = type(log.store).get

    def slow(self, key: str, **options: int) -> bytes:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
            keys.append(key)
        time.sleep(0.02)
        with lock:
            now -= 1
        return get(self, key, **options)

    monkeypatch.setattr(type(log.store), "get", slow)
    assert await _follow(log) == list(range(120))
    archived = [key for key in keys if key.startswith(log.names.event_archive)]
    assert len(archived) == len(set(archived)) >= 28
    assert most >= 4


async def test_damaged_events_at_the_edge_of_what_redis_keeps_expire_no_cursor(log, monkeypatch):
    """They were removed before they were archived, and the oldest event in Redis is the one behind them."""
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 5)
    writer, archive = EventWriter(log, "w"), EventArchive(log)
    for number in range(20):
        await writer.write(_warning(number))
    await writer.close()
    await log.remove_entries(Stream.EVENTS, ["1-12", "1-13", "1-14"])
    await archive.archive()
    await archive.trim()
    rest = list(range(15, 20))
    assert await _follow(log) == [*range(12), *rest]
    assert await _follow(log, "1-11") == rest


async def test_a_trim_that_failed_is_tried_again(log, monkeypatch):
    monkeypatch.setattr(event_archive, "KEPT_EVENTS", 2)
    writer, archive = EventWriter(log, "w"), EventArchive(log)
    for number in range(10):
        await writer.write(_warning(number))
    await writer.close()
    await archive.archive()

    async def fail(below: str) -> int:
        raise UnavailableError("no answer", reason="TEST")

    with monkeypatch.context() as patched:
        patched.setattr(log, "trim_events", fail)
        with pytest.raises(UnavailableError):
            await archive.trim()
    assert await archive.trim() == 7
