"""What the orchestrator does when Redis loses the log of a run: all of it, or its tail."""

import asyncio
import shutil
from pathlib import Path

import pytest

from millrace.local.redis import EmbeddedRedis
from millrace.orchestrator.drive import run_driver
from millrace.runlog import Names, RunLog, Stream, open_redis
from millrace.v1 import run_pb2
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    get,
    has_state,
    headers_of,
    numbers,
    require_clean,
    resolutions,
    states,
    watch,
    wipe,
)
from millrace_testing.patience import patient
from millrace_testing.polling import until


async def test_a_run_goes_on_after_redis_was_wiped(stack) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=5)
    watching = asyncio.create_task(watch(stack, run))
    await until(lambda: len(trainer.headers) >= 1)
    await wipe(stack)
    trainer.hold.set()
    events = await watching
    assert states(events)[-1] == "SUCCEEDED"
    headers = await headers_of(stack, run)
    assert [header.step for header in headers] == [0, 1, 2, 3, 4, 5]
    resolutions(headers)
    assert len({header.writer_epoch for header in headers}) == 2, "the run was claimed again on the rebuilt log"
    seen = numbers(events)
    assert all(found == sorted(set(found)) for found in seen.values()), "nothing comes twice, nothing out of order"
    assert all(found == list(range(found[0], found[-1] + 1)) for found in seen.values()), "nothing is left out"
    assert env.log_instance.startswith("2."), "env-servers appended to the new generation what it lacked"
    await require_clean(stack, run)


async def test_a_wiped_run_is_claimed_again_at_once(stack) -> None:
    env = await stack.env_server()
    env.go_on.clear()
    await stack.inference()
    await stack.trainer()
    run = await create(stack)
    await until(lambda: env.plays_of(0))
    await wipe(stack)
    await until(lambda: env.log_instance.startswith("2."), timeout_s=8.0)
    env.go_on.set()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert len(env.plays_of(0)) == 1, "what was being played is adopted, not played again"


async def test_an_ended_run_whose_events_were_lost_takes_its_state_from_the_closing_header(stack, monkeypatch) -> None:
    monkeypatch.setattr(run_driver, "TRAINER_SPARE_S", 0.2)
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    run = await create(stack)
    await watch(stack, run)
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    await stack.kill_worker(trainer.worker_id)
    await wipe(stack)
    names = Names(stack.prefix, run.uid)
    for info in list(stack.deps["store"].list(names.event_archive)):
        stack.deps["store"].delete(info.key)
    stack.deps["store"].create(f"{names.checkpoint(3)}manifest.json", b"{}")  # the last version is durable
    await stack.start_orchestrator(port)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_SUCCEEDED), timeout_s=15.0)
    assert (await get(stack, run)).end_time.seconds > 0


class DurableRedis:
    """A Redis of one test with an append-only file, which can be killed and can forget its tail."""

    def __init__(self, directory: Path) -> None:
        self.server = EmbeddedRedis(directory, append_only="always")

    async def mark(self) -> None:
        """Remember what the file holds now."""
        source = self.server.directory / "appendonlydir"
        await asyncio.to_thread(shutil.copytree, source, self.server.directory / "marked")

    async def lose_tail(self) -> None:
        """`kill -9`, and start again on what the file held at the mark."""
        await asyncio.to_thread(self.server.kill)
        shutil.rmtree(self.server.directory / "appendonlydir")
        (self.server.directory / "marked").rename(self.server.directory / "appendonlydir")
        await asyncio.to_thread(self.server.start)

    async def restart(self) -> None:
        """`kill -9`, and start again on the same file."""
        await asyncio.to_thread(self.server.kill)
        await asyncio.to_thread(self.server.start)


@pytest.fixture
def durable(tmp_path: Path):
    durable = DurableRedis(tmp_path / "redis")
    durable.server.start()
    yield durable
    durable.server.kill()


@pytest.fixture
def redis_url(redis_url: str, request: pytest.FixtureRequest) -> str:
    """Return the test's own server if it asks for one, else the session's."""
    return request.getfixturevalue("durable").server.url if "durable" in request.fixturenames else redis_url


async def test_a_redis_that_restarts_is_brought_up_to_date_in_place(stack, durable) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=5)
    watching = asyncio.create_task(watch(stack, run))
    await until(lambda: len(trainer.headers) >= 1)
    before = env.log_instance
    await durable.restart()
    await until(lambda: env.log_instance != before, timeout_s=patient(5.0), what="noticed within 5 s")
    trainer.hold.set()
    events = await watching
    assert states(events) == ["STARTING", "RUNNING", "STOPPING", "SUCCEEDED"], "the drive went on"
    assert [warning.reason for warning in bodies(events, "warning")].count("REDIS_RESTARTED") == 1
    headers = await headers_of(stack, run)
    assert all(outcome[2] == 1 for outcome in resolutions(headers).values()), "nothing was played twice"
    assert b'"num_duplicates": 0' in headers[-1].orchestrator_state, "what was read again is no duplicate"
    await require_clean(stack, run)


async def test_a_redis_that_lost_its_tail_gets_it_back(stack, durable) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=5)
    watching = asyncio.create_task(watch(stack, run, timeout_s=60.0))
    await until(lambda: env.plays_of(0))
    await durable.mark()
    await until(lambda: len(trainer.headers) >= 1)
    await durable.lose_tail()
    trainer.hold.set()
    events = await watching
    assert states(events)[-1] == "SUCCEEDED"
    headers = await headers_of(stack, run)
    assert [header.step for header in headers] == [0, 1, 2, 3, 4, 5]
    resolutions(headers)
    seen = numbers(events)
    assert all(found == sorted(set(found)) for found in seen.values()), "nothing comes twice, nothing out of order"
    await require_clean(stack, run)
    redis = open_redis(stack.redis_url)
    try:
        log = await RunLog.open(redis, stack.deps["store"], prefix=stack.prefix, uid=run.uid)
        assert await log.next_position(Stream.BATCHES) == 6, "Redis has every batch again"
    finally:
        await redis.aclose()
