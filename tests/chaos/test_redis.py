"""Redis dies, loses its tail, or forgets everything while a run needs it: the run goes on, and its log is clean."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chaos_logs import said_at
from chaos_run import ChaosRun
from chaos_stack import PREFIX, SERVICES, ChaosStack

from millrace.client import Client
from millrace.local.redis import EmbeddedRedis
from millrace.runlog.names import Names, Stream
from millrace.v1 import run_pb2

NOTICED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A Redis of the tests' own, as the stack would start it, which only they start and stop."""
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
    print(f"{run.recovery_s(killed_at):.1f} s to progress")
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
    print(f"{lost} bytes lost, {run.recovery_s(killed_at):.1f} s to progress")


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
    print(f"{run.recovery_s(flushed_at):.1f} s to progress")
    assert _generation(stack, run) >= 2
    assert [reason for reason, _ in run.warnings()].count("LOG_REBUILT") >= 1
    assert all(stack.restarts(name) == 0 for name in SERVICES), "no process dies of it"


def test_flushall_while_a_run_is_paused_and_when_it_has_ended(stack: ChaosStack) -> None:
    ended = stack.submit(max_steps=1)
    stack.finish(ended)
    run = stack.submit(max_steps=4)
    run.wait_step(1)
    asyncio.run(_pause(stack, run))
    run.wait_event(
        lambda e: e.HasField("state_changed") and e.state_changed.new_state == run_pb2.RUN_STATE_PAUSED, what="pause"
    )
    stack.redis().flushall()
    stack.redis().flushall()
    states = asyncio.run(_states(stack))
    assert states[run.name] == run_pb2.RUN_STATE_PAUSED
    assert states[ended.name] == run_pb2.RUN_STATE_SUCCEEDED
    asyncio.run(_resume(stack, run))
    stack.finish(run)
    stack.audit(ended)
    assert asyncio.run(_states(stack))[ended.name] == run_pb2.RUN_STATE_SUCCEEDED
    events = stack.redis().xlen(Names(PREFIX, ended.uid).stream(Stream.EVENTS))
    print(f"{events} events of the ended run in Redis")


async def _pause(stack: ChaosStack, run: ChaosRun) -> None:
    async with Client(stack.address) as client:
        await client.runs.pause(run.name)


async def _resume(stack: ChaosStack, run: ChaosRun) -> None:
    async with Client(stack.address) as client:
        await client.runs.resume(run.name)


async def _states(stack: ChaosStack) -> dict[str, int]:
    async with Client(stack.address) as client:
        return {run.name: run.state for run in await client.runs.list()}
