"""Leases: one holder, renewal by comparison, and the half-ttl rule on the holder's own clock."""

import asyncio
import time

import pytest

from millrace.errors import FencedError, LogGoneError
from millrace.runlog import Lease, RunLog
from millrace.runlog.names import Names
from millrace.runlog.redis.lease import last_end, read_held
from millrace_testing.leases import lease_holder
from millrace_testing.patience import patient


@pytest.fixture
async def other(log, redis, local_store, prefix) -> RunLog:
    return await RunLog.open(redis, local_store, prefix=prefix, uid=log.uid)


async def test_one_holder_until_released(log, other):
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None and lease.may_write
    assert await Lease.acquire(other, "orchestrator", "b", 30) is None
    assert await Lease.acquire(other, "trainer", "b", 30) is not None, "roles are independent"
    assert await lease_holder(log, "orchestrator") == ("a", 0, "")
    await lease.release()
    assert not lease.may_write
    assert await lease_holder(log, "orchestrator") is None
    assert await Lease.acquire(other, "orchestrator", "b", 30) is not None


async def test_who_gives_it_back_may_leave_words_for_the_next_holder(log, other):
    lease = await Lease.acquire(log, "trainer", "a", 30)
    assert lease is not None and await last_end(log, "trainer") is None
    await lease.renew(epoch=3)
    await lease.release("its process was asked to end")
    assert await last_end(other, "trainer") == ("a", 3, "its process was asked to end")
    assert 0 < await log.redis.pttl(log.names.lease_end("trainer")) <= 7 * 24 * 3600 * 1000
    await lease.release("a second time")
    assert await last_end(other, "trainer") == ("a", 3, "its process was asked to end"), "only who holds it says so"
    await log.redis.set(log.names.lease_end("trainer"), b"\xff{")
    assert await last_end(other, "trainer") is None


async def test_a_lease_says_whose_it_was_if_nobody_gave_it_back(log, other):
    lease = await Lease.acquire(log, "trainer", "a", 30, slot="host/1")
    heir = await Lease.acquire(other, "trainer", "b", 30, slot="host/1")
    assert lease is not None and lease.taken_from == ""
    assert heir is not None and heir.taken_from == "a"


async def test_renewal_keeps_it_beyond_its_ttl_and_tells_the_epoch(log, other):
    lease = await Lease.acquire(log, "orchestrator", "a", ttl_s := patient(1.0))
    assert lease is not None
    ends = time.monotonic() + 1.7 * ttl_s
    while time.monotonic() < ends:
        await asyncio.sleep(0.2 * ttl_s)
        assert await lease.renew(epoch=7)
    assert await Lease.acquire(other, "orchestrator", "b", ttl_s) is None
    assert await lease_holder(log, "orchestrator") == ("a", 7, "")
    assert await lease.renew()
    assert await lease_holder(log, "orchestrator") == ("a", 7, "")


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
    assert await lease_holder(log, "orchestrator") == ("b", 0, ""), "releasing must not drop the next holder's lease"


async def test_the_holder_stops_writing_at_half_its_ttl(log, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("millrace.runlog.redis.lease.time.monotonic", lambda: clock[0])
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    clock[0] += 14.9
    assert lease.may_write
    clock[0] += 0.2
    assert not lease.may_write
    assert await lease.renew()
    assert lease.may_write


async def test_no_lease_without_a_log(log, redis):
    await redis.delete(log.names.meta)
    with pytest.raises(LogGoneError):
        await Lease.acquire(log, "orchestrator", "a", 30)


async def test_racing_processes_have_one_holder(log):
    found = await asyncio.gather(*(Lease.acquire(log, "orchestrator", f"o{i}", 30) for i in range(16)))
    assert sum(lease is not None for lease in found) == 1


async def test_a_lease_of_our_own_slot_is_taken_over_at_once(log, other):
    dead = await Lease.acquire(log, "orchestrator", "a", 30, slot="host/1")
    assert dead is not None and await dead.renew(epoch=3)
    assert await Lease.acquire(other, "orchestrator", "b", 30, slot="host/2") is None
    assert await Lease.acquire(other, "orchestrator", "b", 30) is None, "no slot is nobody's slot"
    ours = await Lease.acquire(other, "orchestrator", "b", 30, slot="host/1")
    assert ours is not None
    assert await lease_holder(log, "orchestrator") == ("b", 0, "host/1")
    assert await dead.renew() is False and not dead.may_write
    await dead.release()
    assert await ours.renew(epoch=4) and await lease_holder(log, "orchestrator") == ("b", 4, "host/1")


async def test_two_without_a_slot_never_take_each_other_over_nor_does_one_owner_hold_two(log, other):
    assert await Lease.acquire(log, "orchestrator", "a", 30) is not None
    assert await Lease.acquire(log, "orchestrator", "a", 30) is None
    assert await Lease.acquire(other, "orchestrator", "a", 30, slot="") is None


async def test_racing_successors_in_one_slot_have_one_holder(log):
    assert await Lease.acquire(log, "trainer", "dead", 30, slot="s") is not None
    found = await asyncio.gather(*(Lease.acquire(log, "trainer", f"t{i}", 30, slot="s") for i in range(8)))
    renewed = [lease for lease in found if lease is not None and await lease.renew()]
    assert len(renewed) == 1, "the last that took it over holds it; the others hear that they do not"


async def test_a_lease_that_redis_lost_is_taken_again(log, redis):
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    await redis.delete(log.names.lease("orchestrator"))
    assert await lease.renew(epoch=2) and lease.may_write
    assert await lease_holder(log, "orchestrator") == ("a", 2, "")


async def test_a_lease_outlives_the_loss_of_the_log(log, redis):
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    await redis.delete(log.names.lease("orchestrator"), log.names.meta)
    assert await lease.renew() and lease.may_write


async def test_an_older_value_of_ours_is_overwritten(log, redis):
    """A restarted Redis brings back what the lease said before its last renewals."""
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    older = await redis.get(log.names.lease("orchestrator"))
    assert await lease.renew(epoch=5)
    await redis.set(log.names.lease("orchestrator"), older, px=30_000)
    assert await lease.renew()
    assert await lease_holder(log, "orchestrator") == ("a", 5, "")
    await redis.set(log.names.lease("orchestrator"), older, px=30_000)
    await lease.release()
    assert await lease_holder(log, "orchestrator") is None


async def test_a_released_lease_is_not_taken_again(log):
    lease = await Lease.acquire(log, "orchestrator", "a", 30)
    assert lease is not None
    await lease.release()
    assert await lease.renew() is False
    assert await lease_holder(log, "orchestrator") is None


DAMAGED = {
    "no JSON": b"x",
    "not UTF-8": b"\xff\xfe",
    "no object": b"[1]",
    "deep": b"[" * 50_000,
    "another's object": b'{"owner": 1}',
    "no epoch": b'{"owner": "x", "token": "y", "epoch": 1.5, "slot": ""}',
    "twice a key": b'{"owner": "x", "owner": "x", "token": "y", "epoch": 1, "slot": ""}',
    "long": b"x" * (1 << 20),
}


async def damage(redis, key: str, what: str) -> None:
    await redis.delete(key)
    if what == "list":
        await redis.rpush(key, "x")
    else:
        await redis.set(key, DAMAGED[what])  # it never expires


@pytest.mark.parametrize("what", [*DAMAGED, "list"])
async def test_a_damaged_lease_is_written_anew_by_its_holder(log, redis, caplog, what):
    lease = await Lease.acquire(log, "trainer", "a", 30, slot="host/1")
    assert lease is not None and await lease.renew(epoch=3)
    await damage(redis, log.names.lease("trainer"), what)
    assert await lease.renew() and lease.may_write
    assert await lease_holder(log, "trainer") == ("a", 3, "host/1")
    assert 0 < await redis.pttl(log.names.lease("trainer")) <= 30_000
    [named] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert named.key == log.names.lease("trainer") and "lease of trainer of run" in named.error


@pytest.mark.parametrize("what", [*DAMAGED, "list"])
async def test_a_damaged_lease_without_a_holder_keeps_nobody_out_for_longer_than_a_ttl(log, redis, caplog, what):
    key = log.names.lease("trainer")
    await damage(redis, key, what)
    for slot in ("", "host/1"):
        assert await Lease.acquire(log, "trainer", "b", 0.3, slot=slot) is None, "its holder may still be there"
    assert 0 < await redis.pttl(key) <= 300
    assert [record.key for record in caplog.records if record.levelname == "WARNING"] == [key], "named once"
    async with asyncio.timeout(10):
        while (lease := await Lease.acquire(log, "trainer", "b", 0.3, slot="host/1")) is None:
            await asyncio.sleep(0.05)
    assert await lease.renew()


@pytest.mark.parametrize("what", [*DAMAGED, "list"])
async def test_a_damaged_lease_does_not_count_as_held_and_hides_no_other(log, redis, prefix, what):
    damaged, free = Names(prefix, "damaged"), Names(prefix, "free")
    await damage(redis, damaged.lease("orchestrator"), what)
    assert await Lease.acquire(log, "orchestrator", "a", 30, slot="host/1") is not None
    names = [damaged, log.names, free]
    assert await read_held(redis, names, "orchestrator") == {log.uid}
    assert await read_held(redis, names, "orchestrator", slot="host/2") == {log.uid}
    assert await read_held(redis, names, "orchestrator", slot="host/1") == frozenset(), "a dead predecessor's"


async def test_a_lease_of_another_holder_is_no_damage(log, redis, caplog):
    lease = await Lease.acquire(log, "trainer", "a", 30)
    assert lease is not None
    await redis.delete(log.names.lease("trainer"))
    assert await Lease.acquire(log, "trainer", "b", 30) is not None
    assert not await lease.renew() and not lease.may_write
    assert await lease_holder(log, "trainer") == ("b", 0, "") and not caplog.records
