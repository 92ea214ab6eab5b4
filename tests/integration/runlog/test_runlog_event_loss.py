"""Events when Redis loses them: writers append again what is lacking, cursors stay good."""

import asyncio
import hashlib
import time

import pytest

from millrace.errors import CorruptObjectError, LogGoneError
from millrace.runlog import EventReader, EventWriter, RunLog, Stream
from millrace.runlog import event_writer as event_writer
from millrace.runlog.event_archive import EventArchive, load_archived_events
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.redis.damage import mark_damaged
from millrace.runlog.redis.entry import FORMAT_MAJOR, AppendResult
from millrace.v1 import event_pb2
from millrace_testing.patience import patient


@pytest.fixture(autouse=True)
def fast_looks(monkeypatch):
    monkeypatch.setattr(event_writer, "LOOK_S", 0.1)


@pytest.fixture
def rebuild(durable, durable_log, local_store, prefix):
    async def run() -> RunLog:
        return await open_or_rebuild(durable.client, local_store, prefix=prefix, uid=durable_log.uid, owner="o")

    return run


async def _write(writer: EventWriter, first: int, last: int) -> None:
    for number in range(first, last + 1):
        await writer.write(event_pb2.Event(warning=event_pb2.Warning(reason="TEST", message=str(number))))


async def _read(log: RunLog, after: str = "") -> list[event_pb2.Event]:
    """Return every event but those of rebuilds."""
    found = await EventReader(log).read(after=after, count=5000)
    return [event for event in found if event.writer != "log"]


def _contents(found: list[event_pb2.Event]) -> list[bytes]:
    """Return what was written, without where it is."""
    contents = []
    for event in found:
        copy = event_pb2.Event()
        copy.CopyFrom(event)
        copy.ClearField("cursor")
        contents.append(copy.SerializeToString(deterministic=True))
    return contents


def _is_gapless(found: list[event_pb2.Event]) -> bool:
    numbers: dict[str, list[int]] = {}
    for event in found:
        numbers.setdefault(event.writer, []).append(event.writer_sequence)
    return all(of_writer == list(range(1, len(of_writer) + 1)) for of_writer in numbers.values())


async def test_a_wipe_loses_no_event_of_a_living_writer(durable, durable_log, rebuild):
    first, second = EventWriter(durable_log, "a"), EventWriter(durable_log, "b")
    await _write(first, 1, 10)
    await first.flush()
    assert await EventArchive(durable_log).archive() == 10
    await _write(first, 11, 20)
    await _write(second, 1, 5)
    await asyncio.gather(first.flush(), second.flush())
    before = _contents(await _read(durable_log))
    await durable.client.flushall()
    await _write(first, 21, 22)  # goes on: it does not know yet
    await rebuild()
    await asyncio.gather(first.close(), second.close())
    after = await _read(durable_log)
    assert _is_gapless(after) and len(after) == 27
    assert set(before) < set(_contents(after)), "the same numbers and the same bytes"
    assert [event.cursor for event in after[:10]] == [f"1-{number}" for number in range(10)]
    assert all(event.cursor.startswith("2-") for event in after[10:])


async def test_an_event_whose_answer_is_lost_with_the_log_is_there_once(durable, durable_log, rebuild, monkeypatch):
    writer, append, is_lost = EventWriter(durable_log, "a"), durable_log.append_event, asyncio.Event()
    await _write(writer, 1, 3)
    await writer.flush()

    async def append_and_lose(*args, **options):
        """Append the event, then lose the answer and the log."""
        answer = await append(*args, **options)
        if is_lost.is_set():
            return answer
        await mark_damaged(durable_log, "meta", "for a test")
        is_lost.set()
        return AppendResult.LOGGONE

    monkeypatch.setattr(durable_log, "append_event", append_and_lose)
    await _write(writer, 4, 5)
    await is_lost.wait()
    log = await rebuild()
    await writer.close()
    after = await _read(log)
    assert [event.warning.message for event in after] == ["1", "2", "3", "4", "5"]
    assert _is_gapless(after)


async def test_a_writer_that_is_idle_appends_again_by_itself(durable, durable_log):
    writer = EventWriter(durable_log, "a")
    await _write(writer, 1, 3)
    await writer.flush()
    await durable.mark()
    await _write(writer, 4, 6)
    await writer.flush()
    before = _contents(await _read(durable_log))
    await durable.lose_tail()
    async with asyncio.timeout(10):
        while _contents(await _read(durable_log)) != before:
            await asyncio.sleep(0.02)
    await writer.close()


async def test_a_writer_that_goes_on_finds_its_tail_missing(durable, durable_log, monkeypatch):
    monkeypatch.setattr(event_writer, "LOOK_S", 60.0)
    writer = EventWriter(durable_log, "a")
    await durable.mark()  # Redis forgets even that it ever heard of this writer
    await _write(writer, 1, 6)
    await writer.flush()
    await durable.lose_tail()
    await _write(writer, 7, 7)
    await writer.close()
    found = await _read(durable_log)
    assert _is_gapless(found) and [event.warning.message for event in found] == list("1234567")


async def test_closing_looks_once_more(durable, durable_log, monkeypatch):
    monkeypatch.setattr(event_writer, "LOOK_S", 60.0)
    writer = EventWriter(durable_log, "a")
    await durable.mark()
    await _write(writer, 1, 2)
    await writer.flush()
    await durable.lose_tail()
    await writer.close()
    assert [event.warning.message for event in await _read(durable_log)] == ["1", "2"]


async def test_what_no_ring_holds_is_lost_without_a_gap(durable, durable_log, caplog):
    writer = EventWriter(durable_log, "a", ring_size=3)
    await durable.mark()
    await _write(writer, 1, 6)
    await writer.flush()
    await durable.lose_tail()
    await _write(writer, 7, 7)
    await writer.close()
    found = await _read(durable_log)
    assert _is_gapless(found) and [event.warning.message for event in found] == ["4", "5", "6", "7"]
    assert "events are lost" in caplog.text


async def test_a_cursor_stays_good_across_a_rebuild(durable, durable_log, rebuild):
    first, second = EventWriter(durable_log, "a"), EventWriter(durable_log, "b")
    await _write(first, 1, 10)
    await first.flush()
    await EventArchive(durable_log).archive()
    await _write(second, 1, 5)
    await second.flush()
    seen = await _read(durable_log)
    await durable.client.flushall()
    await rebuild()
    await _write(first, 11, 12)
    await asyncio.gather(first.close(), second.close())
    await durable_log.reopen()
    for known in (0, 5, 10, 12, 15):  # the last two cursors are of events that were not archived
        after = seen[known - 1].cursor if known else ""
        found = {(event.writer, event.writer_sequence) for event in [*seen[:known], *await _read(durable_log, after)]}
        assert found == {*(("a", number) for number in range(1, 13)), *(("b", number) for number in range(1, 6))}


async def test_a_blocked_reader_hears_of_a_wipe_within_5_s(durable, durable_log):
    reading = asyncio.create_task(EventReader(durable_log).read(block_s=5))
    rollouts = asyncio.create_task(durable_log.read("rollouts", block_s=5))
    await asyncio.sleep(0.2)  # both block in Redis now
    began = time.monotonic()
    await durable.client.flushall()
    for task in (reading, rollouts):
        with pytest.raises(LogGoneError):
            await task
    assert time.monotonic() - began < patient(4)


async def test_archiving_is_idempotent_and_several_do_no_harm(durable_log, local_store):
    writer, archive = EventWriter(durable_log, "a"), EventArchive(durable_log)
    assert await archive.archive() == 0
    assert await local_keys(local_store, durable_log) == []
    await _write(writer, 1, 700)
    await writer.flush()
    counts = await asyncio.gather(archive.archive(), EventArchive(durable_log).archive())
    assert counts == [700, 700], "each wrote what the store lacked when it looked"
    keys = await local_keys(local_store, durable_log)
    assert len(keys) == 2 and await archive.archive() == 0 and await local_keys(local_store, durable_log) == keys
    await _write(writer, 701, 703)
    await writer.close()
    assert await EventArchive(durable_log).archive() == 3
    assert await archive.archive() == 3, "it writes the same object again, which is create-only"
    found = load_archived_events(local_store, durable_log.names)
    assert [entry.id for entry in found] == [f"1-{number}" for number in range(703)]
    stored = await durable_log.read("events", count=1000)
    assert found == stored, "ids, hashes, bytes and trace contexts"


async def local_keys(store, log: RunLog) -> list[str]:
    return [info.key for info in await asyncio.to_thread(lambda: list(store.list(log.names.event_archive)))]


async def test_a_damaged_archive_is_named(durable_log, local_store):
    for data in (b"", b"x", b"\x28\xb5\x2f\xfd"):
        local_store.put(log_key := durable_log.names.archived_events("1-0", "1-1"), data)
        with pytest.raises(CorruptObjectError, match=f"{log_key} cannot be read"):
            load_archived_events(local_store, durable_log.names)
        local_store.delete(log_key)


async def test_an_entry_that_no_archive_could_hold_is_left_out(durable_log, durable, local_store):
    """Its event can be read, but what is archived beside it would make an object that nobody reads again."""
    event = event_pb2.Event(writer="nobody", writer_sequence=1)
    event.warning.reason = "FOREIGN"
    data = event.SerializeToString()
    fields = {"v": str(FORMAT_MAJOR), "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": "t" * (17 << 20)}
    await durable.client.xadd(durable_log.names.stream(Stream.EVENTS), fields, id="1-*")
    writer = EventWriter(durable_log, "w")
    await _write(writer, 1, 3)
    await writer.close()
    damaged: list[str] = []
    archive = EventArchive(durable_log, on_damaged=lambda stream, entry: damaged.append(entry.damage))
    assert await archive.archive() == 3
    assert len(load_archived_events(local_store, durable_log.names)) == 3
    assert damaged and "trace context" in damaged[0]


@pytest.mark.parametrize("writer", ["log", "w"])
@pytest.mark.parametrize("number", [(1 << 64) - 1, 10**18, 1 << 53, 1 << 52])
async def test_a_foreign_number_of_an_event_stops_no_rebuild(durable, durable_log, rebuild, writer, number):
    """Archived it would be in the way of every later number of its writer, in every copy of the log."""
    event = event_pb2.Event(writer=writer, writer_sequence=number)
    event.warning.reason = "FOREIGN"
    data = event.SerializeToString()
    fields = {"v": str(FORMAT_MAJOR), "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": ""}
    await durable.client.xadd(durable_log.names.stream(Stream.EVENTS), fields, id="1-*")
    own = EventWriter(durable_log, "w")
    await _write(own, 1, 3)
    await EventArchive(durable_log).archive()
    await durable.client.delete(durable_log.names.meta)
    async with asyncio.timeout(20):
        log = await rebuild()
    await _write(own, 4, 6)
    await own.close()
    async with asyncio.timeout(20):
        written = [event.warning.message for event in await _read(log) if event.warning.reason == "TEST"]
    assert sorted(written) == [str(number) for number in range(1, 7)]
