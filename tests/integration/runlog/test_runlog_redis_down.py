"""Redis that cannot be reached, refuses, or comes back."""

import asyncio
import os
import signal
import time
import traceback

import pytest

from millrace.errors import CapacityError, InvalidSpecError, PermissionDeniedError, UnavailableError
from millrace.local.redis import EmbeddedRedis, free_port
from millrace.runlog import AppendResult, RunLog, new_uid, open_redis
from millrace.runlog.redis import connection
from millrace.telemetry import waits
from millrace_testing.polling import until


async def test_unreachable_names_address_and_remedy(local_store):
    port = free_port()
    client = open_redis(f"redis://:secret@127.0.0.1:{port}/0")
    with pytest.raises(UnavailableError, match=rf"cannot reach Redis at 127\.0\.0\.1:{port}") as caught:
        await connection.call(client, "a test", lambda: client.ping(), deadline_s=0.5)
    assert "MILLRACE_REDIS_URL" in str(caught.value) and "secret" not in str(caught.value)
    assert caught.value.reason == "REDIS_UNREACHABLE"
    await client.aclose()


@pytest.mark.parametrize("url", ["", "http://x", "127.0.0.1:6379"])
def test_a_bad_url_is_refused(url):
    with pytest.raises(InvalidSpecError, match="MILLRACE_REDIS_URL"):
        open_redis(url)


@pytest.mark.parametrize("url", ["redis://u:hunter/2@h:1/0", "redis://h:1/0?socket_timeout=hunter", "hunter://h:1"])
def test_a_bad_url_is_not_repeated(url):
    with pytest.raises(InvalidSpecError, match="MILLRACE_REDIS_URL") as caught:
        open_redis(url)
    assert "hunter" not in "".join(traceback.format_exception(caught.value))


async def test_an_append_waits_visibly_for_redis_to_come_back(tmp_path, local_store, run_json):
    server = EmbeddedRedis(tmp_path / "redis", append_only="always")
    server.start()
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        await asyncio.to_thread(server.kill)
        appending = asyncio.create_task(log.append_rollouts([b"data"]))
        await asyncio.sleep(0.3)
        assert not appending.done()
        assert any("appending to rollouts" in wait.reason and wait.waits_on == "redis" for wait in waits.snapshot("t"))
        await asyncio.to_thread(server.start)
        async with asyncio.timeout(10):
            assert await appending is AppendResult.OK
        assert [entry.d for entry in await log.read("rollouts")] == [b"data"]
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_a_full_redis_and_a_denied_command_are_named(tmp_path, local_store, run_json):
    with EmbeddedRedis(tmp_path / "redis", max_memory_bytes=4 << 20) as server:
        client = open_redis(server.url)
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        with pytest.raises(CapacityError, match="maxmemory"):
            for _ in range(20):
                await log.append_rollouts([b"x" * 1_000_000])
        entries = await log.read("rollouts")
        assert all(len(entry.d) == 1_000_000 for entry in entries)
        await client.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~*", "+get")
        await client.aclose()
        weak = open_redis(f"redis://weak:pw@127.0.0.1:{server.port}/0")
        with pytest.raises(PermissionDeniedError, match="MILLRACE_REDIS_URL"):
            await RunLog.open(weak, local_store, prefix="t", uid=log.uid)
        await weak.aclose()
        wrong = open_redis(f"redis://weak:wrong@127.0.0.1:{server.port}/0")
        with pytest.raises(PermissionDeniedError, match="MILLRACE_REDIS_URL"):
            await RunLog.open(wrong, local_store, prefix="t", uid=log.uid)
        await wrong.aclose()


async def test_a_frozen_redis_is_a_wait_that_names_it_and_an_outage_when_it_is_back(tmp_path, local_store, run_json):
    server = EmbeddedRedis(tmp_path / "redis", append_only="none")
    server.start()
    client = open_redis(server.url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        reading = asyncio.create_task(log.read("batches", block_s=0.5))
        assert await reading == []
        assert not [wait for wait in waits.snapshot("t") if "Redis" in wait.reason]  # an idle stream is no silent Redis
        os.kill(server.pid, signal.SIGSTOP)
        began = time.monotonic()
        with waits.of_run(log.uid):
            asking = [asyncio.create_task(log.current_epoch("trainer")) for _ in range(3)]
        found = await until(lambda: [wait for wait in waits.snapshot("t") if "Redis" in wait.reason], timeout_s=10)
        (wait,) = found
        assert wait.reason.startswith(f"Redis at 127.0.0.1:{server.port}, which does not answer (reading the epoch")
        assert wait.reason.endswith("(3 at once)") and (wait.waits_on, wait.run) == ("redis", log.uid)
        await asyncio.sleep(connection.OUTAGE_S)
        os.kill(server.pid, signal.SIGCONT)
        assert await asyncio.gather(*asking) == [0, 0, 0]
        outage = connection.OUTAGES[-1]
        assert (outage.address, began <= outage.began + 0.5) == (f"127.0.0.1:{server.port}", True)
        assert connection.OUTAGE_S < outage.seconds < time.monotonic() - began + 0.1
        assert [o.address for o in connection.OUTAGES].count(outage.address) == 1
    finally:
        await client.aclose()
        await asyncio.to_thread(server.kill)


async def test_a_loop_that_stood_still_itself_blames_no_redis(
    redis_url, local_store, run_json, monkeypatch, caplog
) -> None:
    """Its reads have timed out by the time it goes on: they are repeated at once, and nobody hears of an outage."""
    monkeypatch.setattr(connection, "SOCKET_TIMEOUT_S", 1.0)
    monkeypatch.setattr(connection, "OUTAGE_S", 1.5)
    client = open_redis(redis_url)
    try:
        log = await RunLog.create(client, local_store, "t", new_uid(), run_json())
        told = len(connection.OUTAGES)
        reading = asyncio.create_task(log.read("batches", block_s=0.5))
        await asyncio.sleep(0.1)
        time.sleep(4.0)
        assert await reading == []
        assert len(connection.OUTAGES) == told
        assert not [record for record in caplog.records if "not reachable" in record.message]
        assert not [wait for wait in waits.snapshot("t") if "Redis" in wait.reason]
    finally:
        await client.aclose()
