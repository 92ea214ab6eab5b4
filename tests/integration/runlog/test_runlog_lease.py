"""Leases: one holder, renewal by comparison, and the half-ttl rule on the holder's own clock."""

import asyncio

import pytest

from millrace.errors import FencedError, LogGoneError
from millrace.runlog import Lease, RunLog
from millrace.runlog.lease import lease_holder


@pytest.fixture
async def other(log, redis, local_store, prefix) -> RunLog:
    return await RunLog.open(redis, local_store, prefix=prefix, uid=log.uid)


async def test_one_holder_until_released(log, other):
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None and lease.may_write
    assert await Lease.acquire(other, "orchestrator", "b", 30) is None
    assert await Lease.acquire(other, "trainer", "b", 30) is not None, "roles are independent"
    assert await lease_holder(log, "orchestrator") == ("a", 0)
    await lease.release()
    assert not lease.may_write
    assert await lease_holder(log, "orchestrator") is None
    assert await Lease.acquire(other, "orchestrator", "b", 30) is not None


async def test_renewal_keeps_it_beyond_its_ttl_and_tells_the_epoch(log, other):
    lease = await Lease.acquire(log, "orchestrator", "a", 0.6)
    assert lease is not None
    for _ in range(5):
        await asyncio.sleep(0.2)
        assert await lease.renew(epoch=7)
    assert await Lease.acquire(other, "orchestrator", "b", 0.6) is None
    assert await lease_holder(log, "orchestrator") == ("a", 7)
    assert await lease.renew()
    assert await lease_holder(log, "orchestrator") == ("a", 7)


async def test_a_lost_lease_is_noticed_and_not_taken_back(log, other):
    lease = await Lease.acquire(log, "orchestrator", "a", 0.1)
    assert lease is not None
    await asyncio.sleep(0.2)
    theirs = await Lease.acquire(other, "orchestrator", "b", 30)
    assert theirs is not None
    assert await lease.renew() is False
    assert not lease.may_write
    with pytest.raises(FencedError, match="not renewed"):
        lease.require()
    await lease.release()
    assert await lease_holder(log, "orchestrator") == ("b", 0), "releasing must not drop the next holder's lease"


async def test_the_holder_stops_writing_at_half_its_ttl(log, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("millrace.runlog.lease.time.monotonic", lambda: clock[0])
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    clock[0] += 14.9
    assert lease.may_write
    clock[0] += 0.2
    assert not lease.may_write
    assert await lease.renew()
    assert lease.may_write


async def test_two_leases_of_one_owner_are_two(log):
    assert await Lease.acquire(log, "orchestrator", "a", 30) is not None
    assert await Lease.acquire(log, "orchestrator", "a", 30) is None


async def test_no_lease_without_a_log(log, redis):
    await redis.delete(log.names.meta)
    with pytest.raises(LogGoneError):
        await Lease.acquire(log, "orchestrator", "a", 30)


async def test_racing_processes_have_one_holder(log):
    found = await asyncio.gather(*(Lease.acquire(log, "orchestrator", f"o{i}", 30) for i in range(16)))
    assert sum(lease is not None for lease in found) == 1
