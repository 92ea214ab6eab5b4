"""Which copy of the log Redis holds: named, and adopted in place when it was rebuilt."""

import asyncio

import pytest

from millrace.errors import LogGoneError
from millrace.local.redis import EmbeddedRedis
from millrace.runlog import AppendResult, RunLog, new_uid, open_redis


async def test_an_instance_names_generation_and_server(log, redis):
    run_id = (await redis.info("server"))["run_id"]
    assert await log.read_instance() == f"1.{run_id}"
    log.store.create(log.names.epoch("log", 2), b"")
    await redis.hset(log.names.meta, "generation", "2")
    with pytest.raises(LogGoneError):
        await log.read_instance()
    await log.reopen()
    assert await log.read_instance() == f"2.{run_id}"
    assert await log.append_rollouts([b"x"]) is AppendResult.OK


async def test_a_generation_that_never_was_is_not_adopted(log, redis):
    await redis.hset(log.names.meta, "generation", "7")
    for _ in range(2):
        with pytest.raises(LogGoneError, match="generation"):
            await log.reopen()
    assert log.generation == 1


async def test_there_is_nothing_to_adopt_while_the_log_is_gone(log, redis):
    await redis.delete(log.names.meta)
    with pytest.raises(LogGoneError):
        await log.reopen()
    assert log.generation == 1


async def test_an_older_generation_is_not_adopted(log, redis):
    log.generation = 2
    with pytest.raises(LogGoneError):
        await log.reopen()
    assert log.generation == 2


async def test_a_restarted_server_is_another_instance(tmp_path, local_store, run_json):
    server = EmbeddedRedis(tmp_path / "redis", append_only="always")
    server.start()
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        before = await log.read_instance()
        assert await log.read_instance() == before
        await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        after = await log.read_instance()
        assert after != before and after.startswith("1.")
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_where_info_is_denied_the_server_has_no_name(tmp_path, local_store, run_json):
    with EmbeddedRedis(tmp_path / "redis", append_only="none") as server:
        client = open_redis(server.url)
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        await client.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+@all", "-info")
        await client.aclose()
        weak = open_redis(f"redis://weak:pw@127.0.0.1:{server.port}/0")
        assert await (await RunLog.open(weak, local_store, prefix="t", uid=log.uid)).read_instance() == "1."
        await weak.aclose()
