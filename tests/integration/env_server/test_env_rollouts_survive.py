"""Finished rollouts outlive this process, a wiped Redis, and a Redis that lost its tail: each is in the log once."""

import asyncio
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio
import redis.asyncio as redis_asyncio

from millrace.env_server.sink import RolloutSink, RunAppender
from millrace.env_server.spool import Kept, Spool
from millrace.errors import UnavailableError
from millrace.internal.v1 import batch_pb2, rollout_pb2
from millrace.rollouts.types import Purpose, Rollout, RolloutError, RolloutStatus
from millrace.rollouts.wire import encode_rollout
from millrace.runlog.names import Names, Stream
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.records.revisions import has_ended
from millrace.runlog.redis.connection import open_redis
from millrace.runlog.redis.log import RunLog
from millrace.storage.local import LocalStore
from millrace.telemetry import waits
from millrace_testing.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

META = b'{"run_hash": "0"}'


def a_rollout(run_uid: str, ordinal: int, purpose: Purpose = Purpose.TRAIN) -> Rollout:
    return Rollout(
        run_uid=run_uid,
        purpose=purpose,
        ordinal=ordinal,
        member=0,
        attempt=0,
        group_size=1,
        env="e",
        task_index=0,
        task_id="t",
        status=RolloutStatus.ENV_ERROR,
        error=RolloutError(type="E", message="failed"),
    )


@dataclass
class Setup:
    """One run's log, and sinks over one spool directory, one after the other."""

    redis: redis_asyncio.Redis
    store: LocalStore
    log: RunLog
    directory: Path
    sink: RolloutSink

    @property
    def uid(self) -> str:
        return self.log.uid

    def make_sink(self, **options: float) -> RolloutSink:
        async def open_log(run_uid: str) -> RunLog:
            return await RunLog.open(self.redis, self.store, prefix="test", uid=run_uid)

        async def is_over(run_uid: str) -> bool:
            return await asyncio.to_thread(has_ended, self.store, Names("test", run_uid))

        spool = Spool(self.directory, limit_bytes=1 << 20)
        return RolloutSink(spool, open_log, is_over, max_delay_s=0.1, **options)

    async def restart(self, **options: float) -> RolloutSink:
        """Return a successor on the same directory."""
        await self.sink.close()
        self.sink = self.make_sink(**options)
        return self.sink

    def rollout(self, ordinal: int, purpose: Purpose = Purpose.TRAIN) -> Rollout:
        return a_rollout(self.uid, ordinal, purpose)

    async def ordinals(self) -> Counter[int]:
        """Return how often each ordinal is in the stream."""
        entries = await self.log.read(Stream.ROLLOUTS, count=10_000)
        return Counter(rollout_pb2.Rollout.FromString(entry.d).ordinal for entry in entries)

    async def wipe(self) -> None:
        """What FLUSHALL does to this run."""
        await self.redis.delete(*self.log.names.all_keys)

    async def rebuild(self) -> str:
        """Return a new, empty copy of the log; returns its instance."""
        self.log = await open_or_rebuild(self.redis, self.store, prefix="test", uid=self.uid, owner="test")
        return await self.log.read_instance()


@pytest_asyncio.fixture(loop_scope="session")
async def setup(redis_url: str, tmp_path: Path) -> AsyncIterator[Setup]:
    redis, store = open_redis(redis_url), LocalStore(tmp_path / "store")
    log = await RunLog.create(redis, store, "test", f"r{uuid.uuid4().hex[:12]}", META)
    made = Setup(redis, store, log, tmp_path / "spool", None)  # type: ignore[arg-type] - set in the next line
    made.sink = made.make_sink()
    yield made
    await made.sink.close()
    await redis.aclose()


async def test_what_is_appended_stays_until_the_watermark_passes(setup: Setup) -> None:
    for ordinal in range(4):
        assert await setup.sink.append(setup.rollout(ordinal))
    assert await setup.sink.append(setup.rollout(0, Purpose.EVAL))
    assert len(setup.sink.spool.of_run(setup.uid)) == 5
    setup.sink.note_run(setup.uid, 3, "")
    setup.sink.note_run(setup.uid, 2, "")  # an older heartbeat: watermarks never go back
    await until(lambda: len(setup.sink.spool.of_run(setup.uid)) <= 2, timeout_s=120)
    assert sorted((kept.is_eval, kept.ordinal) for kept in setup.sink.spool.of_run(setup.uid)) == [(0, 3), (1, 0)]
    assert not await setup.sink.append(setup.rollout(2))  # a straggler of a resolved ordinal
    setup.sink.end_run(setup.uid)
    assert not setup.sink.spool.run_uids and setup.sink.num_orphans == 0, "at once"
    assert not await setup.sink.append(setup.rollout(5)), "a straggler"
    await until(lambda: not (setup.directory / setup.uid).exists(), timeout_s=120)
    setup.sink.note_run(setup.uid, 4, "")  # it had failed, and was reopened
    assert await setup.sink.append(setup.rollout(5))


async def test_what_was_kept_before_the_appender_is_appended_once(setup: Setup) -> None:
    """Members that finish together are kept together, and the first of them makes the appender, which takes all."""

    async def open_log(_run_uid: str) -> RunLog:
        return setup.log

    spool = setup.sink.spool
    first, second = [await spool.keep(setup.rollout(ordinal)) for ordinal in (0, 1)]
    appender = RunAppender(setup.uid, spool, open_log, on_closed_log=lambda: None)
    try:
        assert await appender.append(first)
        await until(lambda: appender.num_pending == 0, timeout_s=120)
        assert await appender.append(second)
        assert await setup.ordinals() == {0: 1, 1: 1}
    finally:
        await appender.close()


async def test_a_successor_appends_what_the_log_lacks_and_nothing_twice(setup: Setup) -> None:
    await setup.sink.append(setup.rollout(0))
    await setup.wipe()
    unappended = [asyncio.create_task(setup.sink.append(setup.rollout(ordinal))) for ordinal in (1, 2)]
    await until(lambda: setup.sink.num_pending >= 2, timeout_s=120)
    for task in unappended:
        task.cancel()
    await setup.sink.close()  # before the log is there, or this process might append it a second time
    await setup.rebuild()
    await setup.log.append_rollouts([encode_rollout(setup.rollout(1))])  # its answer was lost
    setup.sink = sink = setup.make_sink()
    assert sink.num_orphans == 3  # they count against the capacity until they are in the log
    await sink.recover(timeout_s=60)
    assert sink.num_orphans == 0 and await setup.ordinals() == {0: 1, 1: 1, 2: 1}


async def test_a_rebuilt_log_gets_everything_unresolved_back_once(setup: Setup) -> None:
    for ordinal in range(40):
        await setup.sink.append(setup.rollout(ordinal))
    setup.sink.note_run(setup.uid, 10, await setup.log.read_instance())
    await setup.wipe()
    late = asyncio.create_task(setup.sink.append(setup.rollout(40)))  # finishes while the log is away
    with pytest.raises(UnavailableError, match=r"bringing the run's log up to date: .* of run") as caught:
        await setup.sink.catch_up(setup.uid, "2.unknown", timeout_s=0.5)
    assert caught.value.reason == "RESYNC_RUNNING"
    waiting = [wait for wait in waits.snapshot("x") if wait.run == setup.uid]
    assert any("append of rollout" in wait.reason and "does not hold the log" in wait.reason for wait in waiting)
    instance = await setup.rebuild()
    await setup.sink.catch_up(setup.uid, instance, timeout_s=60)
    assert await late
    assert await setup.ordinals() == dict.fromkeys(range(10, 41), 1)
    await setup.sink.catch_up(setup.uid, instance, timeout_s=60)
    assert (await setup.ordinals()).total() == 31


async def test_a_log_that_lost_its_tail_gets_it_back(setup: Setup) -> None:
    """Redis was killed: the same generation, but the newest entries are gone."""
    for ordinal in range(200):  # more than a page of hashes
        await setup.sink.append(setup.rollout(ordinal))
    entries = await setup.log.read(Stream.ROLLOUTS, count=1000)
    await setup.redis.xdel(setup.log.names.stream(Stream.ROLLOUTS), *[entry.id for entry in entries[150:]])
    setup.sink.note_run(setup.uid, 0, f"{setup.log.generation}.after-the-restart")  # what the heartbeat says
    await setup.sink.catch_up(setup.uid, "", timeout_s=60)
    assert await setup.ordinals() == dict.fromkeys(range(200), 1)


async def test_appends_that_run_during_a_comparison_happen_once(setup: Setup) -> None:
    async def play(first: int) -> None:
        for ordinal in range(first, first + 25):
            await setup.sink.append(setup.rollout(ordinal))

    async def ask() -> None:
        for number in range(20):
            await setup.sink.catch_up(setup.uid, f"1.copy{number}", timeout_s=60)

    await asyncio.gather(*(play(25 * writer) for writer in range(8)), ask(), ask())
    assert await setup.ordinals() == dict.fromkeys(range(200), 1)


async def test_a_damaged_file_is_not_appended_and_the_others_are(setup: Setup) -> None:
    await setup.wipe()
    tasks = []
    async with asyncio.timeout(120):
        for ordinal in range(3):  # one by one, because those that finish together share a file
            tasks.append(asyncio.create_task(setup.sink.append(setup.rollout(ordinal))))
            while not list(setup.directory.glob(f"*/{ordinal:012d}-*.rollouts")):
                await asyncio.sleep(0.01)
    for task in tasks:
        task.cancel()
    await setup.sink.close()
    [torn] = setup.directory.glob("*/000000000001-*.rollouts")
    torn.write_bytes(b"")
    await setup.rebuild()
    setup.sink = setup.make_sink()
    await setup.sink.recover(timeout_s=60)
    assert await setup.ordinals() == {0: 1, 2: 1}
    assert len(list((setup.directory / "damaged").iterdir())) == 1


async def test_a_run_that_ended_while_nobody_told_us_is_forgotten(setup: Setup) -> None:
    await setup.sink.append(setup.rollout(0))
    for step in range(6):
        kind = batch_pb2.BATCH_KIND_CLOSE if step == 5 else batch_pb2.BATCH_KIND_TRAIN
        header = batch_pb2.BatchHeader(step=step, kind=kind, run_uid=setup.uid)
        setup.store.create(setup.log.names.batch_header(step), header.SerializeToString())
        names = Names("test", setup.uid)
        assert has_ended(setup.store, names) is (step == 5)
    sink = await setup.restart(look_for_end_s=0.05)
    await until(lambda: not sink.spool.run_uids, timeout_s=120)
    assert await setup.ordinals() == {0: 1}


async def test_what_an_old_orchestrator_says_of_an_end_ends_no_run(setup: Setup) -> None:
    """It knows that the run had failed; another one drives it again, and the store knows."""
    asked: list[str] = []

    async def store_says_no(run_uid: str) -> bool:
        asked.append(run_uid)
        return await asyncio.to_thread(has_ended, setup.store, Names("test", run_uid))

    async def open_log(run_uid: str) -> RunLog:
        return setup.log

    sink = RolloutSink(Spool(setup.directory / "other", limit_bytes=1 << 20), open_log, store_says_no, max_delay_s=0.1)
    await sink.append(setup.rollout(0))
    assert not sink.look_for_end(setup.uid)
    await asyncio.sleep(0.3)
    assert asked == [setup.uid] and not sink.look_for_end(setup.uid) and len(sink.spool.of_run(setup.uid)) == 1
    await sink.close()


async def test_an_answer_about_the_end_that_is_older_than_the_resume_ends_no_run(setup: Setup) -> None:
    answer = asyncio.Event()

    async def slow_store(run_uid: str) -> bool:
        await answer.wait()
        return True  # as it was when it was asked

    async def open_log(run_uid: str) -> RunLog:
        return setup.log

    sink = RolloutSink(Spool(setup.directory / "other", limit_bytes=1 << 20), open_log, slow_store, max_delay_s=0.1)
    await sink.append(setup.rollout(0))
    assert not sink.look_for_end(setup.uid)
    await asyncio.sleep(0.05)
    sink.note_driven(setup.uid)
    answer.set()
    await asyncio.sleep(0.1)
    assert not sink.look_for_end(setup.uid) and len(sink.spool.of_run(setup.uid)) == 1
    sink.end_run(setup.uid)
    assert not sink.spool.run_uids and sink.look_for_end(setup.uid), "an end that is none of the past counts"
    await sink.close()


async def test_a_successor_takes_no_time_over_a_run_that_has_ended(setup: Setup) -> None:
    """What is kept of it is neither compared nor appended, and counts against no capacity."""
    for ordinal in range(300):
        await setup.sink.spool.keep(setup.rollout(ordinal))
    header = batch_pb2.BatchHeader(step=0, kind=batch_pb2.BATCH_KIND_CLOSE, run_uid=setup.uid)
    setup.store.create(setup.log.names.batch_header(0), header.SerializeToString())
    sink = await setup.restart()
    await sink.recover(timeout_s=60)
    assert sink.num_orphans == 0 and sink.spool.num_bytes == 0 and not await setup.ordinals()


async def test_a_deleted_run_ends_the_wait_for_its_log(setup: Setup) -> None:
    await setup.wipe()
    setup.store.delete(setup.log.names.run_json)
    assert not await setup.sink.append(setup.rollout(0))
    assert setup.sink.spool.run_uids == []


@pytest.mark.parametrize("has_appender", [False, True])
async def test_what_was_being_kept_when_its_play_was_stopped_is_in_the_log_before_the_run_is_taken_over(
    setup: Setup, has_appender: bool
) -> None:
    """A pause stops plays at any await, and whoever resumes the run shall not have to play again what had finished."""
    if has_appender:
        assert await setup.sink.append(setup.rollout(0))
    stopped = asyncio.create_task(setup.sink.append(setup.rollout(1)))
    await asyncio.sleep(0)  # it is being written
    stopped.cancel()
    await asyncio.gather(stopped, return_exceptions=True)
    await setup.sink.catch_up(setup.uid, await setup.log.read_instance(), timeout_s=120)
    assert (await setup.ordinals())[1] == 1


def appending(run_uid: str) -> bool:
    """Return whether something waits for rollouts of the run."""
    return f"append {run_uid}" in {task.get_name() for task in asyncio.all_tasks()}


async def test_a_rollout_that_was_being_kept_at_the_end_of_its_run_leaves_nothing_behind(setup: Setup) -> None:
    keep = setup.sink.spool.keep

    async def keep_as_the_run_ends(rollout: Rollout) -> Kept:
        kept = await keep(rollout)
        setup.sink.end_run(setup.uid)
        return kept

    setup.sink.spool.keep = keep_as_the_run_ends
    assert not await setup.sink.append(setup.rollout(0))
    assert not appending(setup.uid)


async def test_nothing_waits_for_rollouts_of_a_run_whose_end_nobody_told(setup: Setup) -> None:
    sink = await setup.restart(look_for_end_s=0.1)
    assert await sink.append(setup.rollout(0))
    sink.note_run(setup.uid, 1, "")
    await until(lambda: not sink.spool.of_run(setup.uid))
    assert appending(setup.uid)
    close = batch_pb2.BatchHeader(run_uid=setup.uid, kind=batch_pb2.BATCH_KIND_CLOSE, step=0)
    setup.store.create(setup.log.names.batch_header(0), close.SerializeToString())
    await until(lambda: not appending(setup.uid))
