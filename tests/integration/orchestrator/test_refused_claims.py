"""A run that was accepted and cannot be claimed says why, with what to do, and goes on once that is done."""

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis_asyncio

from millrace.client import Client
from millrace.errors import HELD_UP, RefusedError
from millrace.local.redis import EmbeddedRedis
from millrace.orchestrator import why
from millrace.runlog import open_redis
from millrace.v1 import run_pb2
from millrace_testing.lanes import one_by_default
from millrace_testing.orchestrator.runs import create
from millrace_testing.polling import until

CASES: dict[str, tuple[list[str], list[str], tuple[str, ...]]] = {
    "it became a replica": (
        ["REPLICAOF", "127.0.0.1", "1"],
        ["REPLICAOF", "NO", "ONE"],
        ("a replica that cannot be written to",),
    ),
    "its replicas are gone": (
        ["CONFIG", "SET", "min-replicas-to-write", "1"],
        ["CONFIG", "SET", "min-replicas-to-write", "0"],
        ("too few replicas follow it", "min-replicas-to-write 0"),
    ),
    "the user lost scripts": (
        ["ACL", "SETUSER", "ours", "-@scripting"],
        ["ACL", "SETUSER", "ours", "+@all"],
        ("lets its user not do what runs do", "ACL SETUSER"),
    ),
    "it is full": (
        ["CONFIG", "SET", "maxmemory", "1"],
        ["CONFIG", "SET", "maxmemory", "0"],
        ("maxmemory", "let the trainer catch up"),
    ),
}


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory):
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), append_only="none") as running:
        yield running


@pytest.fixture
async def admin(own_redis: EmbeddedRedis) -> AsyncIterator[redis_asyncio.Redis]:
    client = open_redis(own_redis.url)
    await client.execute_command("ACL", "SETUSER", "ours", "reset", "on", ">secret", "~*", "&*", "+@all")
    yield client
    await client.aclose()


@pytest.mark.parametrize("case", one_by_default(CASES))
async def test_a_queued_run_tells_what_keeps_it(stack, own_redis, admin, tmp_path, case: str) -> None:
    spoil, mend, said = CASES[case]
    url = f"redis://ours:secret@127.0.0.1:{own_redis.port}/0"
    stack = type(stack)(url, f"file://{tmp_path}/store", "refused")  # like the fixture's, on a Redis of its own
    await stack.start()
    try:
        run = await create(stack)
        async with Client(stack.address) as client:
            await admin.execute_command(*spoil)
            try:
                await stack.env_server(silent=set(range(1000)))
                await stack.inference()
                await stack.trainer()
                heard: list[str] = []
                async with client.runs.reporting_queued(run.name, heard.append, is_queued=lambda: True):

                    async def is_told() -> bool:
                        return any(all(word in text for word in said) for text in heard)

                    await until(is_told)
            finally:
                await admin.execute_command(*mend)

            async def is_claimed() -> bool:
                return "QUEUED" not in (await client.runs.explain(run.name)).summary.upper()

            await until(is_claimed)
    finally:
        await stack.stop()


@pytest.mark.parametrize("case", one_by_default(CASES))
async def test_who_waits_is_told_within_a_bound(stack, own_redis, admin, tmp_path, case: str, monkeypatch) -> None:
    spoil, mend, said = CASES[case]
    monkeypatch.setattr(why, "HELD_UP_S", 4.0)
    stack = type(stack)(f"redis://ours:secret@127.0.0.1:{own_redis.port}/0", f"file://{tmp_path}/store", "bound")
    await stack.start()
    try:
        run = await create(stack)
        async with Client(stack.address) as client:
            await admin.execute_command(*spoil)
            try:
                await stack.env_server(silent=set(range(1000)))
                await stack.inference()
                await stack.trainer()
                with pytest.raises(RefusedError) as caught:
                    async for _ in client.runs.watch(run.name):
                        pass
                found = await client.runs.get(run.name)
            finally:
                await admin.execute_command(*mend)
            assert caught.value.reason == HELD_UP
            told = f"{caught.value.message} {caught.value.remedy}"
            assert all(word in told for word in said)
            assert found.error.reason == caught.value.metadata["cause"]
            assert found.state == run_pb2.RUN_STATE_QUEUED

            async def is_well() -> bool:
                return not (await client.runs.get(run.name)).error.reason

            await until(is_well)
            async for event in client.runs.watch(run.name):  # it goes on, and who comes back may wait again
                if event.state_changed.new_state == run_pb2.RUN_STATE_RUNNING:
                    break
    finally:
        await stack.stop()


@pytest.mark.long
async def test_a_running_run_tells_what_keeps_it(stack, own_redis, admin, tmp_path) -> None:
    spoil, mend, said = CASES["its replicas are gone"]
    url = f"redis://ours:secret@127.0.0.1:{own_redis.port}/0"
    stack = type(stack)(url, f"file://{tmp_path}/store", "running")
    await stack.start()
    try:
        await stack.env_server(silent=set(range(1000)))
        await stack.inference()
        await stack.trainer()
        run = await create(stack)
        async with Client(stack.address) as client:

            async def says(*words: str) -> bool:
                summary = (await client.runs.explain(run.name)).summary
                return all(word in summary for word in words)

            await until(lambda: says("groups for batch 0"))
            await admin.execute_command(*spoil)
            try:
                await until(lambda: says(*said))
            finally:
                await admin.execute_command(*mend)
            await until(lambda: says("groups for batch 0"))
    finally:
        await stack.stop()
