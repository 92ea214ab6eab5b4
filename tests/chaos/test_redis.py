"""Redis dies, loses its tail, or forgets everything while a run needs it: the run goes on, and its log is clean."""

import hashlib
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from millrace.client import Client
from millrace.client.runs import RunsClient
from millrace.local.redis import EmbeddedRedis
from millrace.runlog import Stream
from millrace.runlog.names import Names
from millrace.runlog.redis.entry import FORMAT_MAJOR
from millrace.v1 import run_pb2
from millrace_testing.chaos import loop as chaos_loop
from millrace_testing.chaos.logs import said_at
from millrace_testing.chaos.run import ChaosRun, Event
from millrace_testing.chaos.stack import PREFIX, SERVICES, ChaosStack

pytestmark = pytest.mark.long

T = TypeVar("T")

NOTICED_WITHIN_S = 5.0
SHOWN_WITHIN_S = 90.0


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """Yield a Redis of the tests' own, as the stack would start it, which only they start and stop."""
    with EmbeddedRedis(tmp_path_factory.mktemp("chaos-redis"), append_only="everysec") as server:
        yield server


@pytest.fixture(scope="module")
def shared_stack(warm, redis_server: EmbeddedRedis) -> Iterator[ChaosStack]:
    with ChaosStack(warm, "redis", env={"MILLRACE_REDIS_URL": redis_server.url}) as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: ChaosStack) -> ChaosStack:
    shared_stack.wait_ready()
    return shared_stack


def _generation(stack: ChaosStack, run: ChaosRun) -> int:
    found = stack.redis().hget(Names(PREFIX, run.uid).meta, "generation")
    return int(found) if found else 0  # pyright: ignore[reportArgumentType]


def _require_noticed(stack: ChaosStack, since: float) -> None:
    """Every service that has the run's log open wrote within 5 s that it is gone, or held it in its new generation."""
    for service in ("orchestrator", "env-server", "trainer"):
        said = [said_at(stack, service, words, since=since) for words in ("LOG_GONE", "new generation", "rebuilding")]
        first = min((at for at in said if at is not None), default=None)
        assert first is not None, f"{service} never noticed:\n{stack.log_of(service)}"
        print(f"{service} noticed after {first - since:.1f} s")
        assert first - since <= NOTICED_WITHIN_S, f"{service} noticed after {first - since:.1f} s"


def _aof_size(server: EmbeddedRedis) -> tuple[Path, int]:
    newest = max((server.directory / "appendonlydir").glob("*.incr.aof"), key=lambda path: path.stat().st_mtime)
    return newest, newest.stat().st_size


def test_kill_9_with_an_append_only_file(stack: ChaosStack, redis_server: EmbeddedRedis) -> None:
    run = stack.submit(max_steps=6)
    run.wait_step(1)
    killed_at = time.time()
    redis_server.kill()
    redis_server.start()
    stack.finish(run)
    print(run.require_recovery(killed_at))
    assert _generation(stack, run) == 1, "nothing had to be rebuilt"


def test_the_unsynced_tail_is_lost(stack: ChaosStack, redis_server: EmbeddedRedis) -> None:
    """More than everysec can lose: all that was written while two steps were trained."""
    run = stack.submit(max_steps=8)
    run.wait_step(1)
    path, size = _aof_size(redis_server)
    run.wait_step(3)
    killed_at = time.time()
    redis_server.kill()
    lost = path.stat().st_size - size
    with path.open("r+b") as file:
        file.truncate(size)
    redis_server.start()
    stack.finish(run)
    assert lost > 1000
    print(f"{lost} bytes lost, {run.require_recovery(killed_at)}")


@pytest.mark.parametrize("moment", ["generation", "commit", "publish"])
def test_flushall_during_a_run(stack: ChaosStack, moment: str) -> None:
    run = stack.submit(max_steps=6)
    match moment:
        case "generation":
            run.wait_step(1)
        case "commit":
            run.wait_event(lambda e: e.HasField("batch_committed") and e.batch_committed.step >= 2)
        case _:
            run.wait_event(lambda e: e.HasField("policy_published") and e.policy_published.version >= 2)
    flushed_at = time.time()
    stack.redis().flushall()
    stack.finish(run)
    _require_noticed(stack, flushed_at)
    print(run.require_recovery(flushed_at))
    assert _generation(stack, run) >= 2
    assert [reason for reason, _ in run.warnings()].count("LOG_REBUILT") >= 1
    assert all(stack.restarts(name) == 0 for name in SERVICES), "no process dies of it"


def test_what_others_write_into_the_streams_of_a_run(stack: ChaosStack) -> None:
    """A rollout that is none, an event that does not decode, and a batch far ahead of all that could follow it."""
    run = stack.submit(max_steps=8)
    run.wait_step(1)
    redis, names, written_at = stack.redis(), Names(PREFIX, run.uid), time.time()
    redis.xadd(names.stream(Stream.ROLLOUTS), {"v": FORMAT_MAJOR, "h": "0" * 64, "d": b"foreign", "tp": ""})
    undecodable = {"v": FORMAT_MAJOR, "h": hashlib.sha256(b"\xff").hexdigest(), "d": b"\xff", "tp": ""}
    redis.xadd(names.stream(Stream.EVENTS), undecodable, id=f"{_generation(stack, run)}-*")
    run.wait_event(lambda e: e.HasField("warning") and e.warning.reason == "ENTRY_DAMAGED")
    run.wait_step(3)
    _call(stack, lambda runs: runs.pause(run.name))  # else a fast machine is done before the entry is there
    run.wait_event(_is_paused, what="pause")
    ahead = {"v": FORMAT_MAJOR, "h": hashlib.sha256(b"").hexdigest(), "d": b"", "tp": ""}
    redis.xadd(names.stream(Stream.BATCHES), ahead, id="1000000-1")
    _call(stack, lambda runs: runs.resume(run.name))
    stack.finish(run)
    print(run.require_recovery(written_at))
    told = [message for reason, message in run.warnings() if reason == "ENTRY_DAMAGED"]
    assert any("rollouts" in message for message in told), told
    rebuilt = [message for reason, message in run.warnings() if reason == "LOG_REBUILT"]
    assert any("batches" in message and "1000000-1" in message for message in rebuilt), rebuilt
    # The rebuild leaves the event out, if the archive, which comes by every 10 s, has not met it before.
    assert any("events" in each for each in told) or any("left out 1 damaged" in each for each in rebuilt), rebuilt
    assert all(stack.restarts(name) == 0 for name in SERVICES), "no process dies of it"


def test_flushall_while_a_run_is_paused_and_when_another_has_ended(stack: ChaosStack) -> None:
    ended = stack.submit(max_steps=1)
    stack.finish(ended)
    run = stack.submit(max_steps=4)
    run.wait_step(1)
    _call(stack, lambda runs: runs.pause(run.name))
    run.wait_event(_is_paused, what="pause")
    stack.redis().flushall()
    _wait_states(stack, {run.name: run_pb2.RUN_STATE_PAUSED, ended.name: run_pb2.RUN_STATE_SUCCEEDED})
    stack.redis().flushall()  # now that nobody drives it
    _wait_states(stack, {run.name: run_pb2.RUN_STATE_PAUSED, ended.name: run_pb2.RUN_STATE_SUCCEEDED})
    _call(stack, lambda runs: runs.resume(run.name))
    stack.finish(run)
    assert _generation(stack, run) >= 2
    events = _call(stack, lambda runs: runs.replay(ended.name))
    assert [event.step_completed.step for event in events if event.HasField("step_completed")] == [0]
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED, "also its events are still there"
    stack.audit(ended)


def test_a_run_that_was_created_and_never_claimed_survives(stack: ChaosStack) -> None:
    """Its only traces are objects; the trainer is busy with another run until Redis was wiped."""
    first = stack.submit(max_steps=3)
    first.wait_step(0)
    second = stack.submit(max_steps=2)
    assert second.state == run_pb2.RUN_STATE_QUEUED
    stack.redis().flushall()
    stack.finish(first)
    stack.finish(second)
    assert second.steps() == [0, 1] and _generation(stack, second) >= 2


def _is_paused(event: Event) -> bool:
    return event.HasField("state_changed") and event.state_changed.new_state == run_pb2.RUN_STATE_PAUSED


def _call(stack: ChaosStack, ask: Callable[[RunsClient], Awaitable[T]]) -> T:
    async def call() -> T:
        async with Client(stack.address) as client:
            return await ask(client.runs)

    return chaos_loop.call(call())


def _wait_states(stack: ChaosStack, expected: dict[str, run_pb2.RunState]) -> None:
    """`millrace run list` shows these states, soon."""
    ends = time.monotonic() + SHOWN_WITHIN_S
    while True:
        states = {run.name: run.state for run in _call(stack, lambda runs: runs.list())}
        if all(states.get(name) == state for name, state in expected.items()):
            return
        assert time.monotonic() < ends, f"{states}, expected {expected}"
        time.sleep(0.2)
