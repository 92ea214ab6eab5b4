"""The one append script: five answers, ids, fencing, and what happens when Redis loses something."""

import asyncio
import hashlib
import json
import random

import pytest

from millrace.errors import (
    AlreadyExistsError,
    ConflictError,
    FencedError,
    LogGoneError,
)
from millrace.internal.v1 import policy_pb2
from millrace.runlog import AppendResult, Epoch, RunLog, Stream, reappend_policies
from millrace.runlog.redis.entry import FORMAT_MAJOR
from millrace_testing.patience import patient

OK, ALREADY, CONFLICT = AppendResult.OK, AppendResult.ALREADY, AppendResult.CONFLICT
FENCED, LOGGONE = AppendResult.FENCED, AppendResult.LOGGONE


async def test_open_finds_what_create_made(log, redis, local_store, prefix):
    again = await RunLog.open(redis, local_store, prefix=prefix, uid=log.uid)
    assert (again.generation, again.run_hash, again.uid) == (1, "ab" * 32, log.uid)
    assert await redis.hgetall(f"{prefix}:{{{log.uid}}}:meta") == {
        b"generation": b"1",
        b"format": str(FORMAT_MAJOR).encode(),
        b"run_hash": b"ab" * 32,
    }


async def test_create_twice_is_one_run_and_other_content_is_refused(log, redis, local_store, prefix, run_json):
    again = await RunLog.create(redis, local_store, prefix, log.uid, run_json())
    assert again.generation == 1
    with pytest.raises(AlreadyExistsError, match=r"another run\.json"):
        await RunLog.create(redis, local_store, prefix, log.uid, run_json(name="other"))


async def test_open_of_an_unknown_run_is_log_gone(redis, local_store, prefix):
    with pytest.raises(LogGoneError, match="rebuild"):
        await RunLog.open(redis, local_store, prefix=prefix, uid="nobody")


async def test_rollouts_keep_their_order_and_fields(log, redis):
    for data in (b"one", b"two", b"three"):
        assert await log.append_rollouts([data], tp="trace") is OK
    entries = await log.read("rollouts")
    assert [entry.d for entry in entries] == [b"one", b"two", b"three"]
    assert entries[0].h == hashlib.sha256(b"one").hexdigest()
    assert (entries[0].v, entries[0].tp) == (FORMAT_MAJOR, "trace")
    raw = await redis.xrange(log.names.stream(Stream.ROLLOUTS))
    assert set(raw[0][1]) == {b"v", b"h", b"d", b"tp"}
    assert [entry.d for entry in await log.read("rollouts", after=entries[0].id, count=1)] == [b"two"]


async def test_batches_have_the_ids_of_their_step(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    for step in (0, 1):
        header, chunks = make_batch(step)
        assert len(chunks) > 1
        assert await log.append_batch(epoch, header.SerializeToString(), chunks) is OK
    ids = [id_.decode() for id_, _ in await redis.xrange(log.names.stream(Stream.BATCHES))]
    per_step = len(ids) // 2
    assert ids == [f"{step}-{number + 1}" for step in (0, 1) for number in range(per_step)]


async def test_a_repeated_step_is_already_and_another_one_conflict(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    header, chunks = make_batch(0)
    data = header.SerializeToString()
    assert await log.append_batch(epoch, data, chunks) is OK
    assert await log.append_batch(epoch, data, chunks) is ALREADY
    assert await log.append_batch(epoch, data) is ALREADY
    other, other_chunks = make_batch(0, seed=1)
    assert await log.append_batch(epoch, other.SerializeToString(), other_chunks) is CONFLICT
    gap, gap_chunks = make_batch(2)
    assert await log.append_batch(epoch, gap.SerializeToString(), gap_chunks) is CONFLICT
    assert len(await log.read("batches")) == 1 + len(chunks)


async def test_trimmed_streams_still_know_their_last_step(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    for step in range(3):
        header, chunks = make_batch(step)
        assert await log.append_batch(epoch, header.SerializeToString(), chunks) is OK
    await log.trim_batches(3)
    assert await log.read("batches") == []
    assert await log.next_position(Stream.BATCHES) == 3
    old, _ = make_batch(1)
    assert await log.append_batch(epoch, old.SerializeToString()) is CONFLICT
    gap, _ = make_batch(4)
    assert await log.append_batch(epoch, gap.SerializeToString()) is CONFLICT
    header, chunks = make_batch(3)
    assert await log.append_batch(epoch, header.SerializeToString(), chunks) is OK


async def test_the_older_epoch_is_fenced(log, make_batch):
    old = await log.acquire_epoch("orchestrator", "o1")
    header, chunks = make_batch(0)
    assert await log.append_batch(old, header.SerializeToString(), chunks) is OK
    new = await log.acquire_epoch("orchestrator", "o2")
    assert (old.number, new.number) == (1, 2)
    header, chunks = make_batch(1)
    answer = await log.append_batch(old, header.SerializeToString(), chunks)
    assert answer is FENCED
    with pytest.raises(FencedError, match="newer epoch"):
        answer.require("step 1")
    assert await log.next_position(Stream.BATCHES) == 1, "a fenced append must write nothing"
    assert await log.append_batch(new, header.SerializeToString(), chunks) is OK


async def test_epochs_of_roles_are_independent_and_unique_in_a_race(log):
    found = await asyncio.gather(*(log.acquire_epoch("trainer", f"t{i}") for i in range(8)), return_exceptions=True)
    numbers = [epoch.number for epoch in found if isinstance(epoch, Epoch)]
    assert len(numbers) == len(set(numbers)) >= 1
    assert all(isinstance(other, FencedError | Epoch) for other in found)
    assert await log.current_epoch("trainer") == 8
    assert await log.current_epoch("orchestrator") == 0


async def test_an_epoch_that_redis_lost_is_written_again(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    await redis.hdel(log.names.meta, "epoch:orchestrator")
    header, chunks = make_batch(0)
    assert await log.append_batch(epoch, header.SerializeToString(), chunks) is OK
    assert await log.current_epoch("orchestrator") == epoch.number


async def test_a_new_epoch_comes_from_the_store_even_when_redis_forgot(log, redis):
    await log.acquire_epoch("trainer", "a")
    await log.acquire_epoch("trainer", "b")
    await redis.hdel(log.names.meta, "epoch:trainer")
    assert (await log.acquire_epoch("trainer", "c")).number == 3


async def test_a_deleted_run_is_not_recreated_by_a_late_writer(log, redis, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    await redis.delete(*log.names.all_keys)
    header, chunks = make_batch(0)
    assert await log.append_rollouts([b"late"]) is LOGGONE
    assert await log.append_event(b"late", writer="w", sequence=1) is LOGGONE
    assert await log.append_batch(epoch, header.SerializeToString(), chunks) is LOGGONE
    assert await redis.exists(*log.names.all_keys) == 0
    with pytest.raises(LogGoneError):
        await log.acquire_epoch("orchestrator", "o2")


async def test_readers_see_a_log_that_is_gone_or_rebuilt(log, redis):
    await log.append_rollouts([b"x"])
    await redis.hset(log.names.meta, "generation", "2")
    with pytest.raises(LogGoneError, match="generation 1"):
        await log.read("rollouts")
    assert await log.append_rollouts([b"y"]) is LOGGONE
    await redis.delete(log.names.meta)
    with pytest.raises(LogGoneError):
        await log.read("rollouts")


async def test_a_blocked_reader_wakes_by_an_append_and_notices_a_wipe(log, redis):
    reading = asyncio.create_task(log.read("rollouts", block_s=5.0))
    await asyncio.sleep(0.1)
    await log.append_rollouts([b"x"])
    async with asyncio.timeout(min(patient(2), 4.5)):
        assert [entry.d for entry in await reading] == [b"x"]
    reading = asyncio.create_task(log.read("events", block_s=0.3))
    await asyncio.sleep(0.1)
    await redis.delete(*log.names.all_keys)
    with pytest.raises(LogGoneError):
        await reading


async def test_damaged_older_and_newer_rollouts_say_so_and_hide_nobody(log, redis):
    key = log.names.stream(Stream.ROLLOUTS)
    good = hashlib.sha256(b"data").hexdigest()
    await redis.xadd(key, {"v": str(FORMAT_MAJOR), "h": good, "d": b"dAta", "tp": ""}, id="1-1")
    newer = f"{FORMAT_MAJOR + 1}.0"
    await redis.xadd(key, {"v": newer, "h": good, "d": b"data", "tp": ""}, id="2-1")
    await redis.xadd(key, {"v": f"{FORMAT_MAJOR}.7", "h": good, "d": b"data", "tp": ""}, id="3-1")
    await redis.xadd(key, {"v": str(FORMAT_MAJOR), "d": b"data"}, id="4-1")
    await redis.xadd(key, {"v": "1", "h": good, "d": b"data", "tp": ""}, id="5-1")
    wrong, new, fine, short, old = await log.read("rollouts")
    assert "sha256" in wrong.damage and f"format {newer}" in new.damage and "lacks the field" in short.damage
    assert f"reads only {FORMAT_MAJOR}" in old.damage
    assert (fine.d, fine.damage) == (b"data", "") and not any(entry.d for entry in (wrong, new, short, old))


async def test_policies_are_numbered_by_version(log):
    epoch = await log.acquire_epoch("trainer", "t")
    entries = [policy_pb2.PolicyEntry(version=v, digest=f"{v}").SerializeToString() for v in range(3)]
    for version in (0, 1):
        assert await log.append_policy(epoch, entries[version], version) is OK
    assert await log.append_policy(epoch, entries[0], 0) is ALREADY
    answer = await log.append_policy(epoch, entries[2], 1)
    assert answer is CONFLICT
    with pytest.raises(ConflictError):
        answer.require("version 1")
    assert [entry.id for entry in await log.read("policies")] == ["0-1", "1-1"]


async def test_events_are_gapless_and_a_repeated_one_is_already(log):
    assert await log.append_event(b"a", writer="w", sequence=1) is OK
    assert await log.append_event(b"a", writer="w", sequence=1) is ALREADY
    assert await log.append_event(b"b", writer="w", sequence=1) is CONFLICT
    assert await log.append_event(b"b", writer="w", sequence=3) is CONFLICT
    assert await log.append_event(b"x", writer="other", sequence=1) is OK
    assert await log.append_event(b"b", writer="w", sequence=2) is OK
    entries = await log.read("events")
    assert [entry.id for entry in entries] == ["1-0", "1-1", "1-2"]
    assert [entry.d for entry in entries] == [b"a", b"x", b"b"]
    assert await log.writer_sequence("w") == 2


async def test_trim_rollouts_keeps_the_named_entry(log):
    for data in (b"0", b"1", b"2"):
        await log.append_rollouts([data])
    ids = [entry.id for entry in await log.read("rollouts")]
    assert await log.trim_rollouts(ids[1]) == 1
    assert [entry.d for entry in await log.read("rollouts")] == [b"1", b"2"]


async def test_concurrent_appends_of_one_step_write_it_once(log, make_batch):
    epoch = await log.acquire_epoch("orchestrator", "o1")
    header, chunks = make_batch(0)
    answers = await asyncio.gather(*(log.append_batch(epoch, header.SerializeToString(), chunks) for _ in range(16)))
    assert sorted(answers) == [ALREADY] * 15 + [OK]
    assert len(await log.read("batches")) == 1 + len(chunks)


async def test_a_rebuilt_stream_begins_at_its_base(log, redis, make_batch):
    """After a rebuild, the stream starts at the oldest kept checkpoint instead of 0."""
    epoch = await log.acquire_epoch("orchestrator", "o1")
    await redis.hset(log.names.meta, "base:batches", 5)
    assert await log.next_position(Stream.BATCHES) == 5
    for step, answer in ((0, CONFLICT), (4, CONFLICT), (6, CONFLICT), (5, OK), (6, OK)):
        header, chunks = make_batch(step)
        assert await log.append_batch(epoch, header.SerializeToString(), chunks) is answer


async def test_published_policies_that_redis_lost_are_repeated(log, redis, local_store):
    epoch = await log.acquire_epoch("trainer", "t")
    for lineage, version in ((0, 0), (0, 1), (0, 2), (1, 2), (1, 3)):
        manifest = json.dumps({"digest": f"d{lineage}-{version}"}).encode()
        local_store.create(log.names.policy_manifest(lineage, version), manifest)
    local_store.create(f"{log.names.policy(1, 4)}e00000001-ab/model.safetensors", b"uploaded, but without a manifest")
    assert await reappend_policies(log, epoch) == 4
    entries = [policy_pb2.PolicyEntry.FromString(entry.d) for entry in await log.read("policies")]
    assert [(e.lineage, e.version, e.digest) for e in entries] == [
        (0, 0, "d0-0"),
        (0, 1, "d0-1"),
        (1, 2, "d1-2"),
        (1, 3, "d1-3"),
    ]
    for entry in entries:
        manifest = local_store.get(entry.manifest_key)
        assert entry.manifest_sha256 == hashlib.sha256(manifest).digest()
    assert await reappend_policies(log, epoch) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_the_script_agrees_with_a_model(log, redis, seed):
    """Random appends, repetitions, takeovers, trims and lost epochs against twenty lines of Python."""
    rng = random.Random(seed)
    epochs = [await log.acquire_epoch("trainer", "t0")]
    stream: dict[int, bytes] = {}
    last, base = -1, 0
    for _ in range(150):
        match rng.choice(["append", "append", "append", "append", "take over", "trim", "forget"]):
            case "append":
                epoch = rng.choice(epochs[-2:])
                version = max(0, last + rng.choice([-2, -1, 0, 1, 1, 1, 2]))
                data = policy_pb2.PolicyEntry(version=version, lineage=rng.choice([0, 0, 0, 1])).SerializeToString()
                if epoch is not epochs[-1]:
                    expected = FENCED
                elif version == last + 1:
                    expected = OK
                    stream[version], last = data, version
                elif base <= version <= last and stream[version] == data:
                    expected = ALREADY
                else:
                    expected = CONFLICT
                assert await log.append_policy(epoch, data, version) is expected
            case "take over":
                epochs.append(await log.acquire_epoch("trainer", "t"))
            case "trim":
                base = rng.randint(base, last + 1) if last >= base else base
                await redis.execute_command("XTRIM", log.names.stream(Stream.POLICIES), "MINID", f"{base}-0")
            case "forget":
                await redis.hdel(log.names.meta, "epoch:trainer")
    found = await log.read("policies", count=1000)
    assert [(entry.id, entry.d) for entry in found] == [(f"{v}-1", stream[v]) for v in range(base, last + 1)]
