"""The look at open runs asks Redis once for all of them, and reads those that have news."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis_asyncio

from millrace.errors import UnavailableError
from millrace.orchestrator.catalog import RunCatalog
from millrace.runlog import RunLog, new_uid, open_redis
from millrace.runlog.index import create_run, read_states
from millrace.runlog.names import Names, Stream
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.redis import connection
from millrace.storage import ObjectStore, open_store
from millrace.v1 import event_pb2, run_pb2


class Place:
    """A deployment of its own, and how often Redis was asked."""

    def __init__(self, redis: redis_asyncio.Redis, store: ObjectStore, prefix: str) -> None:
        self.redis, self.store, self.prefix = redis, store, prefix
        self.num_requests = 0

    def catalog(self) -> RunCatalog:
        return RunCatalog(redis=self.redis, store=self.store, prefix=self.prefix, owner="o")

    async def create(self, name: str) -> str:
        config = {"model": {"name": "m"}}
        record = RunRecord(
            uid=new_uid(), name=name, kind="RL", config=config, run_hash="0" * 64, create_time="2026-01-01T00:00:00Z"
        )
        await create_run(self.redis, self.store, self.prefix, uid=record.uid, name=name, run_json=record.encode())
        return record.uid

    async def write(self, uid: str, sequence: int, state: run_pb2.RunState) -> None:
        log = await RunLog.open(self.redis, self.store, prefix=self.prefix, uid=uid)
        event = event_pb2.Event(writer="w", writer_sequence=sequence, state_changed={"new_state": state})
        event.time.GetCurrentTime()
        (await log.append_event(event.SerializeToString(), writer="w", sequence=sequence)).require("event")

    async def refreshed(self, catalog: RunCatalog) -> tuple[dict[str, run_pb2.RunState], int]:
        """Return the states of the open runs by name after one look, and how often it asked Redis."""
        before = self.num_requests
        views = await catalog.refresh()
        return {view.record.name: view.run.state for view in views}, self.num_requests - before


@pytest.fixture
async def place(stack_urls, monkeypatch) -> AsyncIterator[Place]:
    place = Place(open_redis(stack_urls[0]), open_store(stack_urls[1]), f"o{new_uid()}")
    call = connection.call

    async def counted(*args, **kwargs):
        place.num_requests += 1
        return await call(*args, **kwargs)

    monkeypatch.setattr(connection, "call", counted)
    yield place
    await place.redis.aclose()


@pytest.mark.parametrize("num_runs", [1, 20])
async def test_open_runs_without_news_cost_two_requests_however_many_they_are(place, num_runs) -> None:
    uids = [await place.create(f"run-{index}") for index in range(num_runs)]
    catalog = place.catalog()
    states, _ = await place.refreshed(catalog)
    assert set(states.values()) == {run_pb2.RUN_STATE_QUEUED} and len(states) == num_runs
    assert await place.refreshed(catalog) == (states, 2)

    await place.write(uids[0], 1, run_pb2.RUN_STATE_RUNNING)
    changed, asked = await place.refreshed(catalog)
    assert changed == states | {"run-0": run_pb2.RUN_STATE_RUNNING}
    assert 2 < asked < 16, "of the runs only the one with news is read"
    assert await place.refreshed(catalog) == (changed, 2)


async def test_a_log_that_redis_loses_is_rebuilt_at_the_next_look(place) -> None:
    uid = await place.create("run")
    names, catalog = Names(place.prefix, uid), place.catalog()
    await place.write(uid, 1, run_pb2.RUN_STATE_RUNNING)
    await place.refreshed(catalog)
    await place.redis.delete(*names.all_keys)
    assert (await read_states(place.redis, [names])) == {}
    await place.refreshed(catalog)
    assert await place.redis.hget(names.meta, "generation") == b"2"


async def test_a_log_that_cannot_be_asked_is_opened(place) -> None:
    names = Names(place.prefix, await place.create("run"))
    await place.redis.delete(names.stream(Stream.EVENTS))
    await place.redis.set(names.stream(Stream.EVENTS), "no stream")
    assert (await read_states(place.redis, [names])) == {}
    catalog = place.catalog()
    await place.refreshed(catalog)
    assert await place.redis.type(names.stream(Stream.EVENTS)) == b"stream", "it is rebuilt"


async def test_without_info_every_open_run_is_read(place) -> None:
    """A restart of the server would go unseen, and that it lost the newest events."""
    uid = await place.create("run")
    assert (await read_states(place.redis, [Names(place.prefix, uid)]))[uid].server
    await place.redis.execute_command("ACL", "SETUSER", "quiet", "on", ">pw", "~*", "+@all", "-info")
    denied = open_redis(f"redis://quiet:pw@{connection.describe(place.redis)}")
    try:
        assert await read_states(denied, [Names(place.prefix, uid)]) == {}
        catalog = RunCatalog(redis=denied, store=place.store, prefix=place.prefix, owner="o")
        for _ in range(2):
            states, asked = await place.refreshed(catalog)
            assert states == {"run": run_pb2.RUN_STATE_QUEUED} and asked > 2
    finally:
        await denied.aclose()
        await place.redis.execute_command("ACL", "DELUSER", "quiet")


async def test_what_came_while_a_run_could_not_be_read_is_read_later(place, monkeypatch) -> None:
    uid, catalog = await place.create("run"), place.catalog()
    await place.refreshed(catalog)
    await place.write(uid, 1, run_pb2.RUN_STATE_RUNNING)

    async def refuse(uid: str) -> RunLog:
        raise UnavailableError(f"run {uid}")

    with monkeypatch.context() as patch:
        patch.setattr(catalog, "open_log", refuse)
        assert await place.refreshed(catalog) == ({"run": run_pb2.RUN_STATE_QUEUED}, 2)
    states, _ = await place.refreshed(catalog)
    assert states == {"run": run_pb2.RUN_STATE_RUNNING}
