"""A Redis is tried out by what runs do: what is wrong with it is named, with what to do."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis_asyncio

from millrace.errors import MillraceError, PermissionDeniedError, UnavailableError
from millrace.local.directory import free_port
from millrace.local.redis import EmbeddedRedis
from millrace.runlog import open_redis
from millrace.runlog.redis.connection import call, redis_self_test


@pytest.fixture(scope="module")
def own_url(tmp_path_factory: pytest.TempPathFactory):
    """Yield a Redis of this file's own, whose configuration may be changed."""
    with EmbeddedRedis(tmp_path_factory.mktemp("redis")) as running:
        yield running.url


@pytest.fixture
async def admin(own_url: str) -> AsyncIterator[redis_asyncio.Redis]:
    client = open_redis(own_url)
    yield client
    await client.aclose()


def as_user(url: str, name: str) -> redis_asyncio.Redis:
    return open_redis(f"redis://{name}:secret@{url.rpartition('@')[2].removeprefix('redis://')}")


async def refused(client: redis_asyncio.Redis) -> MillraceError:
    with pytest.raises(MillraceError) as raised:
        await redis_self_test(client, prefix="pre")
    assert "secret" not in str(raised.value)
    return raised.value


async def test_a_real_one_passes_and_keeps_nothing(admin: redis_asyncio.Redis) -> None:
    await redis_self_test(admin, prefix="pre")
    assert await admin.keys("*") == []


async def test_a_lease_that_is_over_before_it_is_looked_at_is_no_fault(
    admin: redis_asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, slow = admin.get, iter([0.06])

    async def late(key: str) -> bytes | None:
        await asyncio.sleep(next(slow, 0.0))
        return await real(key)

    monkeypatch.setattr(admin, "get", late)
    await redis_self_test(admin, prefix="pre")


USERS: dict[str, tuple[str, str]] = {
    "other keys": ("~other:* +@all", "no permissions|NOPERM|access"),
    "no scripts": ("~* +@all -@scripting", "evalsha|EVALSHA|scripting|command"),
    "no streams": ("~* +@all -@stream", "xadd|XADD|xread|command"),
}


@pytest.mark.parametrize("case", USERS)
async def test_a_user_without_rights_is_told_which(admin: redis_asyncio.Redis, own_url: str, case: str) -> None:
    rights, said = USERS[case]
    await admin.execute_command("ACL", "SETUSER", "few", "reset", "on", ">secret", *rights.split())
    client = as_user(own_url, "few")
    error = await refused(client)
    await client.aclose()
    assert isinstance(error, PermissionDeniedError) and error.reason == "REDIS_DENIED"
    assert "~PREFIX:*" in str(error)
    assert any(word in error.message for word in said.split("|"))


async def test_a_user_with_our_keys_and_no_administration_passes(admin: redis_asyncio.Redis, own_url: str) -> None:
    await admin.execute_command(
        "ACL", "SETUSER", "ours", "reset", "on", ">secret", "~pre:*", "+@all", "-@admin", "-info"
    )
    client = as_user(own_url, "ours")
    await redis_self_test(client, prefix="pre")
    await client.aclose()


async def test_too_few_replicas_are_named(admin: redis_asyncio.Redis) -> None:
    await admin.config_set("min-replicas-to-write", 1)
    try:
        error = await refused(admin)
    finally:
        await admin.config_set("min-replicas-to-write", 0)
    assert isinstance(error, UnavailableError) and error.reason == "REDIS_NO_REPLICAS"


async def test_a_replica_is_named(admin: redis_asyncio.Redis) -> None:
    await admin.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    try:
        error = await refused(admin)
    finally:
        await admin.execute_command("REPLICAOF", "NO", "ONE")
    assert isinstance(error, UnavailableError) and error.reason == "REDIS_READ_ONLY" and "primary" in str(error)


async def test_a_failover_amid_a_read_that_waits_is_an_outage(admin: redis_asyncio.Redis, own_url: str) -> None:
    """Redis ends such a read with UNBLOCKED, and not with READONLY; the read goes on where there is a primary again."""
    reader, answers = open_redis(own_url), 0

    async def read() -> list[object]:
        nonlocal answers
        answers += 1
        return await reader.execute_command("XREAD", "BLOCK", 60_000, "STREAMS", "pre:none", "0")

    reading = asyncio.create_task(call(reader, "a read", read, block_s=60.0))
    try:
        async with asyncio.timeout(30):
            while not (await admin.info("clients"))["blocked_clients"]:
                await asyncio.sleep(0.01)
            await admin.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
            while answers < 2 and not reading.done():
                await asyncio.sleep(0.01)
            await admin.execute_command("REPLICAOF", "NO", "ONE")
            while not (await admin.info("clients"))["blocked_clients"] and not reading.done():
                await asyncio.sleep(0.01)
            await admin.xadd("pre:none", {"a": "b"})
            assert await reading
    finally:
        reading.cancel()
        await admin.delete("pre:none")
        await reader.aclose()


ANSWERS: dict[str, tuple[dict[str, bytes], str, str]] = {
    "an old one": ({"INFO": b"$22\r\nredis_version:6.2.14\r\n\r\n"}, "REDIS_TOO_OLD", r"6\.2\.14.*7\.0 or newer"),
    "a node without slots": ({"EVALSHA": b"-CLUSTERDOWN Hash slot not served\r\n"}, "REDIS_CLUSTER", "no cluster"),
    "a node of others": ({"EVALSHA": b"-MOVED 3999 10.0.0.1:6379\r\n"}, "REDIS_CLUSTER", "no cluster"),
    "without scripts": ({"EVALSHA": b"-ERR unknown command 'EVALSHA'\r\n"}, "REDIS_SEMANTICS", "EVALSHA"),
    "a lookalike": ({"EVALSHA": b"+OK\r\n"}, "REDIS_SEMANTICS", "the script answered"),
}


@pytest.mark.parametrize("case", ANSWERS)
async def test_what_another_server_answers_is_named(case: str) -> None:
    answers, reason, message = ANSWERS[case]

    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readline():
            words = []
            for _ in range(int(head[1:])):
                size = int((await reader.readline())[1:])
                words.append((await reader.readexactly(size + 2))[:-2].decode())
            usual = {"INFO": b"$0\r\n\r\n", "PING": b"+PONG\r\n"}.get(words[0], b"+OK\r\n")
            writer.write(answers.get(words[0], usual))
        writer.close()
        ended.set()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    client = open_redis(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
    with pytest.raises(MillraceError, match=message) as raised:
        await redis_self_test(client, prefix="pre")
    assert raised.value.reason == reason
    await client.aclose()
    async with asyncio.timeout(10):
        await ended.wait()
    server.close()


@pytest.mark.parametrize("case", ["Redis 99.1.0", "Valkey 99.1.0", "Redis 7.2.5", "Valkey 9.1.2"])
async def test_a_newer_server_than_was_tried_is_named_and_tried_out(
    case: str, admin: redis_asyncio.Redis, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kind, version = case.split()
    said = {"redis_version": "7.2.4", "valkey_version": version} if kind == "Valkey" else {"redis_version": version}

    async def info(section: str) -> dict[str, str]:
        return said

    monkeypatch.setattr(admin, "info", info)
    await redis_self_test(admin, prefix="pre")
    warned = [record.message for record in caplog.records if "was tried with" in record.message]
    assert len(warned) == ("99" in case)
    assert all(f"{kind} at " in each and "is version 99.1.0" in each for each in warned)
