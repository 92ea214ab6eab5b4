"""Events: numbered without gaps, ordered by cursor, written through outages of Redis."""

import asyncio

import pytest

from millrace.errors import CapacityError, InvalidSpecError, InvalidStateError, NotFoundError, UnavailableError
from millrace.local.redis import EmbeddedRedis
from millrace.runlog import EventReader, EventWriter, RunLog, Stream, new_uid, open_redis
from millrace.telemetry import waits
from millrace.v1 import event_pb2
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
