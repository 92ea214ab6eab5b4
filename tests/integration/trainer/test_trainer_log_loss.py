"""The trainer lives through a wiped and a restarted Redis with its position, and finds it when it has been replaced."""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.config.sections.rl import RLConfig
from millrace.errors import FencedError, LogGoneError
from millrace.internal.v1 import policy_pb2
from millrace.local.redis import EmbeddedRedis
from millrace.policies.manifest import PolicyManifest
from millrace.runlog import Stream, open_redis, reappend_committed
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.records.numbered import create_epoch
from millrace.storage.local import LocalStore
from millrace.telemetry import waits
from millrace.trainer.log.background import BackgroundLoop
from millrace.trainer.log.hold import Hold
from millrace_testing.leases import lease_holder

Recorder = Any  # conftest.Recorder; tests are not importable from one another

NOTICED_WITHIN_S = 5.0
REJOINED_WITHIN_S = 15.0
LOST = "the run's log to be rebuilt, which Redis lost"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """Yield a Redis of the test's own, to be wiped and killed."""
    with EmbeddedRedis(tmp_path / "redis", append_only="always") as redis:
        yield redis


@pytest.fixture
def run(
    server: EmbeddedRedis, background: BackgroundLoop, local_store: LocalStore, new_recorder: Any, make_config: Any
) -> Recorder:
    """Return a run with two committed batches that waits for its third."""
    recorder = type(new_recorder())(background, local_store, server.url)
    recorder.create(make_config(ckpt={}))
    for step in range(2):
        recorder.commit(step, recorder.make_samples(step))
    return recorder


class Training:
    """`recorder.train` in a thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._stopping = threading.Event()
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self.result = self._pool.submit(recorder.train, stop=self._stopping.is_set)

    def until_published(self, version: int) -> None:
        _until(lambda: version in self._recorder.digests() or self.result.done(), f"version {version}")

    def stop(self) -> None:
        self._stopping.set()
        self._pool.shutdown()


@pytest.fixture
def train(run: Recorder) -> Iterator[Callable[[], Training]]:
    started: list[Training] = []

    def start() -> Training:
        started.append(Training(run))
        started[-1].until_published(2)
        return started[-1]

    yield start
    for training in started:
        training.stop()


def _until_announced(run: Recorder) -> None:
    _until(lambda: len(_policies(run)) == 3, "policies")


def _until(condition: Callable[[], bool], what: str, *, timeout_s: float = 240.0) -> float:
    """Return seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"no {what} within {timeout_s} s"
        time.sleep(0.02)
    return time.monotonic() - began


def _is_waiting_for_the_log() -> bool:
    return any(wait.reason == LOST and wait.waits_on == "orchestrator" for wait in waits.snapshot("test"))


def _rebuild(run: Recorder) -> None:
    """What the orchestrator does when Redis lost a log."""

    async def rebuild() -> None:
        log = await open_or_rebuild(
            open_redis(run.redis_url), run.store, prefix=run.prefix, uid=run.uid, owner="orchestrator-2"
        )
        run.epoch = await log.acquire_epoch("orchestrator", "orchestrator-2")
        await reappend_committed(log, run.epoch)
        run.log = log

    run.call(rebuild())


def _policies(run: Recorder) -> list[policy_pb2.PolicyEntry]:
    return [policy_pb2.PolicyEntry.FromString(entry.d) for entry in run.call(run.log.read(Stream.POLICIES))]


def _finish(run: Recorder, training: Training) -> None:
    run.commit(2, run.make_samples(2))
    run.commit(3, [], closing=True)
    assert training.result.result(240) == 3
    assert [(p.lineage, p.version) for p in _policies(run)] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert {p.version: p.digest for p in _policies(run)} == run.digests()
    assert run.checkpoints() == [3]


def test_a_wiped_redis_costs_neither_position_nor_epoch(
    run: Recorder, train: Callable[[], Training], new_recorder: Any, make_config: Callable[..., RLConfig]
) -> None:
    training = train()
    _until_announced(run)
    run.call(run.log.redis.flushall())
    assert _until(_is_waiting_for_the_log, "wait for the log", timeout_s=NOTICED_WITHIN_S) < NOTICED_WITHIN_S
    assert not training.result.done()
    _rebuild(run)
    seconds = _until(lambda: len(_policies(run)) == 3, "policies")
    assert seconds < REJOINED_WITHIN_S and not training.result.done()
    assert not _is_waiting_for_the_log()
    holder = run.call(lease_holder(run.log, "trainer"))
    assert (holder.owner, holder.epoch, holder.slot) == ("trainer-test", 1, "test/trainer")
    _finish(run, training)
    assert run.call(run.log.current_epoch("trainer")) == 1  # the same trainer, to its end
    undisturbed = new_recorder()
    undisturbed.record(make_config(ckpt={}), steps=3)
    undisturbed.train()
    assert run.digests() == undisturbed.digests()
    steps = [event.step_completed.step for event in run.events() if event.HasField("step_completed")]
    assert steps[-1] == 2


def test_a_wipe_in_the_middle_of_a_step_is_noticed_when_the_policy_is_announced(
    run: Recorder, train: Callable[[], Training], monkeypatch: pytest.MonkeyPatch
) -> None:
    from millrace.trainer.publish import commit

    commit_policy, wiped = commit.commit_policy, threading.Event()

    def commit_then_wipe(store: Any, key: str, manifest: PolicyManifest) -> Any:
        published = commit_policy(store, key, manifest)
        if manifest.version == 2 and not wiped.is_set():
            run.call(run.log.redis.flushall())
            wiped.set()
        return published

    monkeypatch.setattr(commit, "commit_policy", commit_then_wipe)
    training = train()
    assert wiped.wait(240)
    _until(_is_waiting_for_the_log, "wait for the log", timeout_s=NOTICED_WITHIN_S)
    _rebuild(run)
    assert _until(lambda: len(_policies(run)) == 3, "policies") < REJOINED_WITHIN_S
    _finish(run, training)


def test_what_a_restarted_redis_lost_of_the_policies_is_appended_again(
    run: Recorder, train: Callable[[], Training], server: EmbeddedRedis
) -> None:
    training = train()
    _until_announced(run)
    # Redis comes back without what it had not synced: here, every policy.
    run.call(run.log.command("losing", "DEL", run.log.names.stream(Stream.POLICIES)))
    server.kill()
    time.sleep(1)
    server.start()
    seconds = _until(lambda: len(_policies(run)) == 3, "policies")
    assert seconds < REJOINED_WITHIN_S and not training.result.done()
    _finish(run, training)
    assert run.call(run.log.current_epoch("trainer")) == 1


def test_a_right_that_redis_takes_away_and_gives_back_ends_no_training(
    run: Recorder, train: Callable[[], Training], caplog: pytest.LogCaptureFixture
) -> None:
    training = train()
    _until_announced(run)
    run.call(run.log.redis.execute_command("ACL", "SETUSER", "default", "-@scripting"))
    _until(lambda: "lease not renewed" in caplog.text or training.result.done(), "refusal", timeout_s=60.0)
    assert not training.result.done(), "somebody gives the right back, and the run goes on"
    run.call(run.log.redis.execute_command("ACL", "SETUSER", "default", "+@scripting"))
    _finish(run, training)
    assert run.call(run.log.current_epoch("trainer")) == 1


def test_a_trainer_that_was_replaced_while_the_log_was_away_lets_go(
    run: Recorder, train: Callable[[], Training]
) -> None:
    training = train()
    _until_announced(run)
    run.call(run.log.redis.flushall())
    _until(_is_waiting_for_the_log, "wait for the log", timeout_s=NOTICED_WITHIN_S)
    # Redis counts from nothing again; the store does not.
    assert run.call(create_epoch(run.store, run.log.names, "trainer", "successor")).number == 2
    _rebuild(run)
    with pytest.raises(FencedError) as raised:
        training.result.result(REJOINED_WITHIN_S)
    assert raised.value.reason == "STALE_EPOCH"
    assert _policies(run) == []  # the successor appends them
    assert run.checkpoints() == []


def test_who_waits_for_the_log_hears_that_the_hold_was_lost_meanwhile(run: Recorder) -> None:
    """The wipe is noticed when nobody renews any more: nobody would say that the log is there again."""

    async def wait() -> None:
        hold = await Hold.take(run.log, owner="trainer-test", slot="test/trainer")

        async def attempt() -> None:
            hold.lost = FencedError("another trainer continues the run")
            raise LogGoneError("Redis was wiped")

        try:
            async with asyncio.timeout(60):
                await hold.outlasting(attempt)
        finally:
            await hold.release("the test ends")

    with pytest.raises(FencedError, match="another trainer continues"):
        run.call(wait())


def test_stop_is_heard_while_redis_is_away(run: Recorder, train: Callable[[], Training], server: EmbeddedRedis) -> None:
    training = train()
    _until_announced(run)
    server.kill()
    began = time.monotonic()
    training.stop()
    assert training.result.result(0) == 2 and time.monotonic() - began < 12
    assert run.checkpoints() == [2]


def test_a_run_that_is_sealed_is_taken_by_no_trainer(run: Recorder) -> None:
    names = run.log.names
    run.store.create(names.seal(0), b"{}")

    def take() -> Hold:
        return run.call(asyncio.wait_for(Hold.take(run.log, owner="late", slot="late/trainer"), 60))

    with pytest.raises(FencedError) as refused:
        take()
    assert refused.value.reason == "RUN_SEALED"
    assert run.call(run.log.current_epoch("trainer")) == 0 and not list(run.store.list(f"{names.root}epochs/trainer/"))
    run.store.create(f"{names.reopenings}00000001.json", b"{}")
    assert take().epoch.number == 1, "its seal is that of the end before it was reopened"
