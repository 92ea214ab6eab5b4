"""What a run keeps in Redis does not grow with its length, and what was removed there is missed by nobody."""

import json
from typing import Any

import pytest
import redis.asyncio as redis_asyncio

from millrace.orchestrator import manager
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.drive import housekeeping, sealer
from millrace.runlog import Names, RunLog, Stream, event_archive, new_uid, open_redis, rebuild
from millrace.runlog.index import create_run, note_ended, read_open
from millrace.runlog.names import Deployment
from millrace.runlog.rebuild import ENDED_S
from millrace.runlog.redis import log as redis_log
from millrace.storage import open_store
from millrace.v1 import run_pb2
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    get,
    headers_of,
    require_clean,
    resolutions,
    states,
    watch,
    wipe,
)
from millrace_testing.polling import until

STEPS = 12
KEPT_EVENTS = 4


class CountedStore:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(self._store, name)


async def num_commands(redis: redis_asyncio.Redis) -> int:
    """Return how many commands this server has had for hashes."""
    stats = await redis.info("commandstats")
    return sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("hgetall", "hset", "hget", "hdel"))


@pytest.mark.parametrize("is_wiped", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_batches_policies_and_events_in_redis_are_those_of_a_window(stack, monkeypatch, is_wiped) -> None:
    """The run writes no checkpoint. With `is_wiped` Redis loses everything before the last step."""
    monkeypatch.setattr(housekeeping, "TRIM_S", 0.05)
    monkeypatch.setattr(redis_log, "KEPT_POLICIES", 3)
    monkeypatch.setattr(housekeeping, "ARCHIVE_S", 0.05)
    for module in (event_archive, rebuild):
        monkeypatch.setattr(module, "KEPT_EVENTS", KEPT_EVENTS)
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    run = await create(stack, max_steps=STEPS)
    redis = open_redis(stack.redis_url)
    try:
        await until(lambda: len(trainer.headers) > STEPS - 3, timeout_s=60.0)
        trainer.hold.clear()
        if is_wiped:
            await wipe(stack)
        else:
            log = await RunLog.open(redis, stack.deps["store"], prefix=stack.prefix, uid=run.uid)
            newest = trainer.status.step

            async def held(stream: Stream) -> list[int]:
                return [int(entry.id.partition("-")[0]) for entry in await log.read(stream, count=1000)]

            async def is_trimmed() -> bool:
                return min(await held(Stream.BATCHES), default=newest) >= newest

            await until(is_trimmed, timeout_s=20.0)
            assert len(await held(Stream.POLICIES)) <= 3
        trainer.hold.set()
        events = await watch(stack, run, timeout_s=60.0)
        assert states(events)[-1] == "SUCCEEDED" and len(events) > 6 * KEPT_EVENTS
        if not is_wiped:  # else those of the last moment are lost
            assert [each.step for each in bodies(events, "batch_committed")] == list(range(STEPS))
        # The last events are removed after the one that was waited for.
        events_key = Names(stack.prefix, run.uid).stream(Stream.EVENTS)

        async def is_events_trimmed() -> bool:
            return await redis.xlen(events_key) <= 2 * KEPT_EVENTS

        await until(is_events_trimmed, timeout_s=20.0)
        headers = await headers_of(stack, run)
        assert [header.step for header in headers] == list(range(STEPS + 1))
        resolutions(headers)
        await require_clean(stack, run)
    finally:
        await redis.aclose()


async def test_an_ended_run_expires_from_redis_and_is_shown_from_the_store(stack, monkeypatch) -> None:
    """Nobody looks at it unless asked; watching it puts its log back for a while."""
    monkeypatch.setattr(manager, "RETIRED_S", 0.0)
    monkeypatch.setattr(sealer, "RETIRED_S", 0.0)
    monkeypatch.setattr(sealer, "RETRY_S", 0.5)
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    run = await create(stack, max_steps=1)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    redis, deployment, names = stack.deps["redis"], Deployment(stack.prefix), Names(stack.prefix, run.uid)

    async def is_retired() -> bool:
        return not [mark for mark in await redis.hkeys(deployment.open_key) if mark != b"*"]

    await until(is_retired, timeout_s=20.0)
    assert not list(stack.deps["store"].list(deployment.open_prefix))
    held = [key for key in names.all_keys if await redis.exists(key)]
    assert len(held) >= 3 and all([0 < await redis.ttl(key) <= ENDED_S for key in held])

    await redis.delete(*held)
    catalog = RunCatalog(**stack.deps, owner="another")
    assert await catalog.refresh() == []
    (view,) = await catalog.read_listed(await catalog.list_names())
    shown = await get(stack, run)
    assert view.run == shown and shown.state == run_pb2.RUN_STATE_SUCCEEDED and shown.progress.num_groups == 2
    assert not await redis.exists(names.meta), "a run that is only shown takes no room in Redis"
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert 0 < await redis.ttl(names.meta) <= ENDED_S and 0 < await redis.ttl(names.stream(Stream.EVENTS)) <= ENDED_S
    await require_clean(stack, run)


@pytest.mark.parametrize("is_wiped", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_the_look_for_open_runs_costs_the_same_however_many_have_ended(stack_urls, is_wiped) -> None:
    """With `is_wiped` Redis has lost everything, and the open runs come from the store."""
    redis, store, prefix = open_redis(stack_urls[0]), CountedStore(open_store(stack_urls[1])), f"g{new_uid()}"
    costs: list[tuple[int, int]] = []
    try:
        await read_open(redis, store, prefix, is_compared=True)  # an orchestrator does so before it has any run
        for number in (2, 10):
            for name in [f"ended-{len(costs)}-{index}" for index in range(number)]:
                uid = new_uid()
                data = json.dumps({"uid": uid, "name": name, "run_hash": "0" * 64}).encode()
                await create_run(redis, store, prefix, uid=uid, name=name, run_json=data)
                await note_ended(redis, store, prefix, uid=uid, number=0)
            await read_open(redis, store, prefix, is_compared=False)
            if is_wiped:
                await redis.delete(Deployment(prefix).open_key, Deployment(prefix).runs_key)
            store.num_calls, before = 0, await num_commands(redis)
            assert await read_open(redis, store, prefix, is_compared=False) == {}
            costs.append((store.num_calls, await num_commands(redis) - before))
        assert costs[0] == costs[1] and costs[0][0] <= 2 * is_wiped
    finally:
        await redis.aclose()
