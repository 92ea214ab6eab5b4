"""The audit of policies, checkpoints, epochs, of what Redis holds, and of the events."""

import hashlib
import json
import os
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.errors import CorruptObjectError
from millrace.readers.audit import audit as audit_module
from millrace.readers.audit import audit_run, named
from millrace.readers.audit.events import EventClaims
from millrace.runlog import EventWriter, RunLog, Stream
from millrace.runlog.event_archive import load_archived_events
from millrace.runlog.rebuild import load_restored, open_or_rebuild
from millrace.runlog.records.numbered import latest_epoch
from millrace.runlog.records.revisions import Reopening
from millrace.runlog.redis.entry import FORMAT_MAJOR
from millrace.trainer.log.batches import StoreLog
from millrace.v1 import event_pb2, run_pb2
from millrace_testing.runlog.recorded_log import (
    ENDED_AT,
    NUM_EVENTS,
    NUM_REPORTS,
    STEPS,
    audit,
    flip,
    publish,
    publish_anew,
    rearchive,
    record,
    rewrite,
    seal_anew,
    violations,
)


@pytest.fixture
async def run(log, redis, local_store):
    return await record(log, redis, local_store)


# Policies, checkpoints, epochs.


async def test_a_version_that_was_never_published(run):
    run.store.delete(run.names.policy_manifest(0, 1))
    report = await audit(run, offline=True)
    assert {finding.check for finding in report.violations} == {"POLICY_MISSING", "POLICY_BASE_MISSING"}
    assert "POLICIES_TORN" in {note.check for note in report.notes}
    assert "MIRROR_AHEAD" in await violations(run)


async def test_the_final_version_is_published(run):
    run.store.delete(run.names.policy_manifest(0, STEPS))
    assert await violations(run, offline=True) == {"POLICY_MISSING"}


async def test_a_version_without_its_batch(run):
    publish(run, STEPS + 1)
    assert await violations(run) == {"POLICY_WITHOUT_BATCH", "POLICY_UNNAMED"}
    seal_anew(run)
    assert await violations(run) == {"POLICY_WITHOUT_BATCH"}


async def test_lineages(run):
    publish(run, 2, lineage=1)
    seal_anew(run)
    assert await violations(run) == {"LINEAGE_BACK"}, "version 3 is of lineage 0"
    publish(run, 3, lineage=1)
    seal_anew(run)
    report = await audit(run)
    assert list(report.violations) == [] and report.num_lineages == 2
    assert "POLICY_SUPERSEDED" in {note.check for note in report.notes}


async def test_policy_objects_and_manifests(run):
    key = run.names.policy_manifest(0, 2)
    manifest = json.loads(run.store.get(key))
    (item,) = manifest["encodings"][0]["objects"]
    whole = run.store.get(item["key"])
    run.store.delete(item["key"])
    assert await violations(run) == {"POLICY_OBJECT_MISSING"}
    run.store.put(item["key"], b"short")
    assert await violations(run) == {"POLICY_OBJECT_MISSING"}
    run.store.put(item["key"], whole)
    run.store.put(key, json.dumps({**manifest, "version": 9}).encode())
    assert await violations(run, offline=True) == {"POLICY_MISNAMED", "POLICY_CHANGED"}
    run.store.put(key, b"{")
    found = await violations(run, offline=True)
    assert found == {"POLICY_CORRUPT", "POLICY_CHANGED", "POLICY_BASE_MISSING"}, "the next one is a delta against it"


@pytest.mark.parametrize("how", ["whole", "damaged", "gone", "of no manifest"])
async def test_a_whole_successor_stands_in_for_a_manifest(run, how):
    key = run.names.policy_manifest(0, 2)
    (item,) = json.loads(run.store.get(key))["encodings"][0]["objects"]
    publish_anew(run, 2)
    run.store.delete(item["key"])
    if how == "damaged":
        run.store.put(key, run.store.get(key).replace(b'"digest"', b'"digesT"'))
    elif how == "of no manifest":
        run.store.put(key, b"\xff")
    elif how == "gone":
        run.store.delete(key)
    report = await audit(run)
    assert list(report.violations) == []
    (note,) = [note for note in report.notes if note.check == "POLICY_REPAIRED"]
    assert "manifest.r1.json" in note.message


async def test_a_successor_is_looked_at_like_any_manifest(run):
    key = run.names.policy_manifest(0, 2)
    successor = publish_anew(run, 2)
    right = run.store.get(successor)
    (item,) = json.loads(right)["encodings"][0]["objects"]
    data = run.store.get(item["key"])
    run.store.delete(item["key"])
    assert await violations(run) == {"POLICY_OBJECT_MISSING"}
    run.store.put(item["key"], data)
    other = run.store.get(run.names.policy_manifest(0, 3))
    run.store.put(successor, json.dumps({**json.loads(other), "key": successor, "version": 2}).encode())
    assert "POLICY_DIGEST_MISMATCH" in await violations(run), "it is of the weights of another version"
    run.store.put(successor, b"{")
    run.store.delete(key)
    assert {"POLICY_CORRUPT", "POLICY_MISSING"} <= await violations(run)


async def test_checkpoints(run):
    key = f"{run.names.checkpoint(3)}manifest.json"
    stored = run.store.get(key)
    manifest = json.loads(stored)
    changes = {
        "CHECKPOINT_CHAIN_MISMATCH": {"chain_hash": "00" * 32},
        "CHECKPOINT_MISNAMED": {"run_uid": "another"},
        "CHECKPOINT_OBJECT_MISSING": {"objects": [{"key": "nowhere", "size_bytes": 1, "sha256": ""}]},
        "CHECKPOINT_CORRUPT": {"objects": 7},
    }
    for check, change in changes.items():
        run.store.put(key, json.dumps({**manifest, **change}).encode())
        assert await violations(run) == {check, "CHECKPOINT_CHANGED"}
    run.store.put(key, stored)
    ahead = {**manifest, "step": STEPS + 5}
    run.store.put(f"{run.names.checkpoint(STEPS + 5)}manifest.json", json.dumps(ahead).encode())
    assert await violations(run) == {"CHECKPOINT_AHEAD", "CHECKPOINT_UNNAMED"}


async def test_epochs(run):
    await run.log.acquire_epoch("trainer", "t2")
    seal_anew(run)
    assert (await audit(run)).epochs["trainer"] == 2
    run.store.delete(run.names.epoch("trainer", 1))
    assert await violations(run) == {"EPOCH_MISSING"}


# Redis.


async def test_redis_is_compared_with_the_store(run):
    meta = run.names.meta
    await run.redis.hset(meta, "epoch:trainer", 7)
    assert await violations(run) == {"EPOCH_AHEAD"}
    await run.redis.hset(meta, "epoch:trainer", 1)
    await run.redis.hset(meta, "generation", 3)
    assert await violations(run) == {"GENERATION_MISMATCH"}


@pytest.mark.parametrize(
    ("stream", "data", "check"),
    [
        (Stream.POLICIES, None, "ENTRY_CORRUPT"),
        (Stream.POLICIES, b"", "MIRROR_DIFFERS"),
        (Stream.BATCHES, None, "ENTRY_CORRUPT"),
        (Stream.BATCHES, b"another header", "MIRROR_DIFFERS"),
        (Stream.EVENTS, None, "ENTRY_CORRUPT"),
        (Stream.ROLLOUTS, b"\xff", "ENTRY_CORRUPT"),
    ],
)
async def test_a_replaced_entry(run, stream, data, check):
    """The newest entry is taken out and put back under its id with other bytes; None: with the hash of the old ones."""
    key = run.names.stream(stream)
    [(id_, fields)] = await run.redis.xrevrange(key, count=1)
    if data is None:
        fields[b"d"] = fields[b"d"] + b"x"
    else:
        fields |= {b"d": data, b"h": hashlib.sha256(data).hexdigest()}
    entries = await run.redis.xrange(key)
    await run.redis.delete(key)
    for old_id, old_fields in [*entries[:-1], (id_, fields)]:
        await run.redis.xadd(key, old_fields, id=old_id)
    assert await violations(run) == {check}


# Events.


async def reopened(run) -> RunLog:
    return await RunLog.open(run.redis, run.store, prefix=run.names.prefix, uid=run.names.uid)


async def test_a_gap_in_the_events(run):
    run.store.delete(next(run.store.list(run.names.event_archive)).key)
    entries = await run.redis.xrange(run.names.stream(Stream.EVENTS))
    of_trainer = [id_ for id_, fields in entries if event_pb2.Event.FromString(fields[b"d"]).writer == "trainer-1"]
    await run.redis.xdel(run.names.stream(Stream.EVENTS), of_trainer[1])
    found = await violations(run)
    assert found - {"POLICY_MISSING"} == {"EVENT_GAP", "EVENT_ARCHIVE_MISSING"}, "the seal names the archive"


async def test_the_archive_fills_what_redis_lacks(run):
    await run.redis.delete(run.names.stream(Stream.EVENTS))
    report = await audit(run)
    assert list(report.violations) == [] and report.num_events == NUM_EVENTS


async def test_events_that_a_wiped_redis_took_along_are_a_note(run):
    event = event_pb2.Event(writer="trainer-1", writer_sequence=NUM_REPORTS + 3)
    event.warning.reason = "X"
    data = event.SerializeToString(deterministic=True)
    fields = {"v": FORMAT_MAJOR, "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": ""}
    await run.redis.xadd(run.names.stream(Stream.EVENTS), fields, id="2-0")
    report = await audit(run)
    assert list(report.violations) == []
    assert "EVENTS_LOST_WITH_REDIS" in {note.check for note in report.notes}


async def test_a_number_that_was_used_for_two_events(run):
    again = event_pb2.Event(writer="trainer-1", writer_sequence=1)
    again.warning.reason = "X"
    data = again.SerializeToString(deterministic=True)
    fields = {"v": FORMAT_MAJOR, "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": ""}
    await run.redis.xadd(run.names.stream(Stream.EVENTS), fields, id="2-0")
    assert await violations(run) == {"EVENT_NUMBER_REUSED"}


async def test_an_event_that_was_repeated_is_counted_once(run):
    entry = load_archived_events(run.store, run.names)[0]
    await run.redis.xadd(
        run.names.stream(Stream.EVENTS), {"v": FORMAT_MAJOR, "h": entry.h, "d": entry.d, "tp": ""}, id="2-0"
    )
    report = await audit(run)
    assert list(report.violations) == [] and report.num_events == NUM_EVENTS


@pytest.mark.parametrize(
    ("writer", "check"), [("orchestrator-1", "PROGRESS_BACK"), ("orchestrator-2", "COMMITTED_TWICE")]
)
async def test_a_batch_that_is_committed_twice(run, writer, check):
    events = EventWriter(await reopened(run), writer)
    again = event_pb2.BatchCommitted(step=1, num_trained=2, dropped={"zero_advantage": 1})
    await events.write(event_pb2.Event(batch_committed=again))
    await events.close()
    assert await violations(run) == {check}


async def test_a_damaged_archive_of_events(run):
    flip(run, next(run.store.list(run.names.event_archive)).key)
    assert await violations(run) == {"EVENT_ARCHIVE_CORRUPT", "EVENT_ARCHIVE_CHANGED"}


async def test_a_step_that_nobody_reported(run):
    await run.redis.delete(run.names.stream(Stream.EVENTS))
    run.store.delete(next(run.store.list(run.names.event_archive)).key)
    silent = {"STEP_NOT_REPORTED", "COMMIT_NOT_REPORTED"}
    gone = {"EVENT_ARCHIVE_MISSING", "END_NOT_REPORTED"}
    assert await violations(run) == silent | gone
    for role in ("trainer", "orchestrator"):
        await run.log.acquire_epoch(role, "t2")
    report = await audit(run)
    assert {found.check for found in report.violations} == gone | {"EPOCH_UNNAMED"}
    assert "STEP_NOT_REPORTED" in {note.check for note in report.notes}, "a killed trainer may have had it in memory"


@pytest.mark.parametrize("stream", [*Stream, "meta"])
async def test_a_key_of_another_type_is_a_violation(run, redis, stream):
    key = run.names.meta if stream == "meta" else run.names.stream(stream)
    await redis.delete(key)
    await redis.set(key, "text")
    report = await audit(run)
    assert "ENTRY_CORRUPT" in {finding.check for finding in report.violations}
    assert report.num_steps == STEPS, "the store was looked at"


@pytest.mark.parametrize("stream", list(Stream))
async def test_an_entry_with_the_last_id_ends_the_reading(run, redis, stream, monkeypatch):
    monkeypatch.setitem(audit_module.PAGE, stream, 1)
    await redis.xadd(run.names.stream(stream), {"x": "y"}, id="18446744073709551615-18446744073709551615")
    assert "ENTRY_CORRUPT" in await violations(run)


async def test_numbers_beyond_any_count(run):
    def exaggerate(header):
        header.orchestrator_state = b'{"num_duplicates": 1' + b"0" * 400 + b"}"

    rewrite(run, STEPS, exaggerate)
    assert (await audit(run, offline=True)).num_duplicates == (1 << 63) - 1


async def test_a_group_of_any_size(run):
    def grow(played):
        return [replace(one, group_size=2**31 - 1) if one.ordinal == 0 else one for one in played]

    rearchive(run, 0, grow)
    tracemalloc.start()
    assert "GROUP_NOT_WHOLE" in await violations(run, offline=True)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


async def test_names_that_are_no_text(run):
    for place in (run.names.policies, run.names.checkpoints, run.names.epochs("log"), run.names.event_archive):
        directory = os.fsencode(run.store.uri(place + "x").removeprefix("file://").removesuffix("x"))
        os.makedirs(directory + b"\xff")
        with open(directory + b"\xff/\xff", "wb") as file:
            file.write(b"x")
    assert await violations(run, offline=True) == set(), "they are nobody's"


def test_the_end_is_the_last_that_was_told_whatever_the_clocks_said():
    """A run that had failed was reopened, and the clock jumped back by hours meanwhile."""
    told = EventClaims()
    for number, (state, seconds) in enumerate([(run_pb2.RUN_STATE_FAILED, 9000), (run_pb2.RUN_STATE_SUCCEEDED, 10)]):
        event = event_pb2.Event()
        event.state_changed.new_state = state
        event.time.FromSeconds(seconds)
        told.add(event, (1, number))
    assert told.end is not None and told.end[0].new_state == run_pb2.RUN_STATE_SUCCEEDED


async def test_a_named_object_of_any_size_is_not_read(run, monkeypatch):
    key = run.names.epoch("orchestrator", 1)
    monkeypatch.setattr(named, "MAX_NAMED_BYTES", 1 << 20)
    run.store.put(key, b"{" + b" " * (2 << 20))
    assert "EPOCH_CHANGED" in await violations(run, offline=True)


@pytest.mark.parametrize("name", ["\u00b2", "\u0663", "x", "9" * 30])
async def test_names_that_are_no_numbers_are_typed(run, redis, name):
    names, store = run.names, run.store
    for key in (
        f"{names.generations}{name}",
        f"{names.checkpoints}{name}/manifest.json",
        f"{names.policies}{name}-{name}/manifest.json",
        f"{names.batches}{name}.pb",
        f"{names.intents}{name}.json",
        f"{names.reopenings[:-1]}{name}",
    ):
        store.create(key, b"{}")
    await audit(run)
    StoreLog(store, names, base_step=0).kept()
    load_restored(store, names)
    await redis.delete(names.meta)
    await open_or_rebuild(redis, store, prefix=names.prefix, uid=names.uid, owner="o")
    store.create(f"{names.epochs('log')}{name}", b"{}")
    if not name.isdecimal():
        with pytest.raises(CorruptObjectError, match="is no epoch"):
            latest_epoch(store, names, "log")


async def test_a_run_that_was_reopened_before_its_end_was_sealed(run):
    """The process that ended it died in between; what comes after is sealed."""
    seal = run.store.get(run.names.seal(0))
    run.store.delete(run.names.seal(0))
    run.store.create(run.names.seal(1), seal)
    record = Reopening(step=1, revision=0, closing_sha256="00" * 32, epoch=0, owner="o", time="")
    run.store.create(run.names.reopened(1), record.encode())
    report = await audit(run, offline=True)
    assert "SEAL_MISSING" not in {finding.check for finding in report.violations}
    assert "SEAL_MISSING" in {note.check for note in report.notes}


@pytest.mark.parametrize(
    ("clock_s", "is_accused"),
    [(lambda: time.time(), False), (lambda: ENDED_AT + 3000.0, False), (lambda: time.time() + 7200.0, True)],
    ids=["the writer's clock was years behind", "the audit's clock is years behind", "it was long ago"],
)
async def test_no_clock_alone_accuses_a_run_without_a_seal(run, clock_s, is_accused: bool):
    """The recorded run was closed just now on the store's clock, and long ago on that of who tells of it."""
    run.store.delete(run.names.seal(0))
    report = await audit_run(None, run.store, prefix=run.names.prefix, uid=run.names.uid, clock=clock_s)
    accused = {finding.check for finding in report.violations}
    assert accused == ({"SEAL_MISSING"} if is_accused else set())
    assert is_accused or "SEAL_MISSING" in {note.check for note in report.notes}


@pytest.mark.parametrize(
    ("audited_s", "closed_s", "is_accused"), [(-5000.0, -9000.0, False), (5000.0, 9000.0, False), (5000.0, 0.0, True)]
)
async def test_no_clock_alone_accuses_a_closed_run_without_an_end(
    run, monkeypatch, audited_s: float, closed_s: float, is_accused: bool
):
    """Its events are of now: where they, or the header, are newer than the audit, the end may still come."""
    monkeypatch.setattr(EventClaims, "end", None)
    run.store.delete(run.names.seal(0))
    now, header = time.time(), Path(run.store.uri(run.names.batch_header(STEPS)).removeprefix("file://"))
    os.utime(header, (now + closed_s, now + closed_s))
    report = await audit_run(None, run.store, prefix=run.names.prefix, uid=run.names.uid, clock=lambda: now + audited_s)
    assert ("END_NOT_REPORTED" in {finding.check for finding in report.violations}) is is_accused
