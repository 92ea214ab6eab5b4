"""`run repair` on a recorded run: each kind of object is damaged, restored from what proves it, and kept aside."""

import asyncio
import hashlib
import json
import os
import shutil
from dataclasses import replace

import pytest

from millrace.errors import CorruptObjectError
from millrace.readers.repair import RepairState, repair_run
from millrace.runlog import Entry, Stream, chain_hash
from millrace.runlog import event_archive as event_archive
from millrace.runlog.event_archive import EventArchive, decode_archive, encode_archive
from millrace.runlog.names import Deployment
from millrace.runlog.redis.entry import FORMAT_MAJOR
from millrace.storage.local import LocalStore
from millrace.v1 import event_pb2
from millrace_testing.lanes import pairs_by_default
from millrace_testing.runlog.recorded_log import STEPS, audit, flip, publish_anew, record


@pytest.fixture
async def run(log, redis, local_store):
    run = await record(log, redis, local_store)
    local_store.create(Deployment(log.names.prefix).name_object("demo"), log.uid.encode())
    return run


@pytest.fixture
def backup(run, tmp_path) -> LocalStore:
    """Return a replica of the bucket, made before anything is damaged."""
    source = run.store.uri("x").removesuffix("/x").removeprefix("file://")
    shutil.copytree(source, tmp_path / "replica", copy_function=os.link)
    return LocalStore(tmp_path / "replica")


def key_of(run, kind: str) -> str:
    names = run.names
    listed = {
        "epoch": names.epochs("orchestrator"),
        "archived events": names.event_archive,
        "policy manifest": names.policy(0, 1),
        "checkpoint manifest": names.checkpoint(1),
    }
    if kind in listed:
        keys = [info.key for info in run.store.list(listed[kind]) if "/e0" not in info.key and "/e1-" not in info.key]
        return keys[0]
    return {
        "first header": names.batch_header(0),
        "header": names.batch_header(1),
        "closing header": names.batch_header(STEPS),
        "run.json": names.run_json,
        "name": Deployment(names.prefix).name_object("demo"),
        "chunk": run.header(2).chunks[0].key,
        "rollouts": run.header(1).rollouts_key,
        "checkpoint file": f"{names.checkpoint(3)}e00000001-abcd/rank-00000.bin",
        "policy object": policy_object(run),
    }[kind]


def policy_object(run) -> str:
    """Return an object that no other version shares."""
    prefix = run.names.policy(0, 2)
    return next(info.key for info in run.store.list(prefix) if not info.key.endswith("manifest.json"))


FROM_REDIS = ["first header", "header", "closing header", "chunk"]
FROM_ITSELF = ["name"]
FROM_BACKUP = ["run.json", "rollouts", "epoch", "policy object", "checkpoint file"]
HOW = {"damaged": flip, "deleted": lambda run, key: run.store.delete(key)}


async def repair(run, *, backup=None, with_redis: bool = False, is_applied: bool = False):
    log = run.log if with_redis else None
    return await repair_run(log, run.store, run.names, backup=backup, is_applied=is_applied)


async def test_a_whole_run_needs_no_repair(run, backup) -> None:
    assert await repair(run, backup=backup, with_redis=True, is_applied=True) == []


@pytest.mark.parametrize(("kind", "how"), pairs_by_default([*FROM_REDIS, *FROM_ITSELF, *FROM_BACKUP], HOW))
async def test_what_is_damaged_is_restored_and_kept(run, backup, kind: str, how: str) -> None:
    before = [finding.check for finding in (await audit(run)).violations]
    key = key_of(run, kind)
    right = run.store.get(key)
    HOW[how](run, key)
    wrong = run.store.get(key) if how == "damaged" else None
    source = {"backup": backup} if kind in FROM_BACKUP else {"with_redis": kind in FROM_REDIS}
    (said,) = await repair(run, **source)
    assert (said.key, said.state) == (key, RepairState.RESTORABLE) and said.detail.startswith("proved by ")
    assert (run.store.get(key) if wrong is not None else run.store.head(key)) == wrong, "a dry run changes nothing"
    (done,) = await repair(run, **source, is_applied=True)
    assert done.state is RepairState.RESTORED and run.store.get(key) == right
    if wrong is not None:
        assert run.store.get(done.quarantine) == wrong and hashlib.sha256(wrong).hexdigest()[:16] in done.quarantine
    assert await repair(run, **source) == []
    assert [finding.check for finding in (await audit(run)).violations] == before


async def test_a_header_comes_from_a_backup_that_the_chain_proves(run, backup) -> None:
    for step in (0, 1, 2):
        flip(run, run.names.batch_header(step))
    assert {each.state for each in await repair(run, backup=backup, is_applied=True)} == {RepairState.RESTORED}
    assert await repair(run) == []


async def test_a_backup_with_other_bytes_is_refused(run, backup) -> None:
    header = run.header(1)
    header.reward_mean = 7.0
    backup.put(run.names.batch_header(1), header.SerializeToString(deterministic=True))
    key = run.header(2).chunks[0].key
    backup.put(key, b"forged")
    run.store.delete(run.names.batch_header(1))
    flip(run, key)
    wrong = run.store.get(key)
    found = await repair(run, backup=backup, is_applied=True)
    assert {each.state for each in found} == {RepairState.REFUSED}
    assert any("does not give the chain hash" in each.detail for each in found)
    assert run.store.get(key) == wrong and run.store.head(run.names.batch_header(1)) is None


class TornStore(LocalStore):
    """A replica that finds out itself that its objects are damaged."""

    def get_file(self, key, path) -> None:
        raise CorruptObjectError(f"object {self.uri(key)} is torn", reason="OBJECT_TOO_SHORT")

    def get(self, key, *, max_bytes=0) -> bytes:
        raise CorruptObjectError(f"object {self.uri(key)} is torn", reason="OBJECT_TOO_SHORT")


@pytest.mark.parametrize("kind", ["policy object", "rollouts"])
async def test_a_damaged_backup_is_a_source_that_is_refused(run, backup, tmp_path, kind: str) -> None:
    key = key_of(run, kind)
    flip(run, key)
    (found,) = await repair(run, backup=TornStore(tmp_path / "replica"), is_applied=True)
    assert (found.key, found.state) == (key, RepairState.REFUSED)
    assert f"replica: object {backup.uri(key)} is torn" in found.detail


async def test_what_nobody_has_is_refused_and_says_where_to_look(run) -> None:
    flip(run, key_of(run, "rollouts"))
    (found,) = await repair(run)
    assert found.state is RepairState.REFUSED and "a backup (--from)" in found.detail


async def test_a_checkpoint_behind_a_whole_one_is_not_needed(run) -> None:
    flip(run, key_of(run, "checkpoint file"))
    (found,) = await repair(run)
    assert found.state is RepairState.NOT_NEEDED and "computes the steps since again" in found.detail


async def test_a_repair_that_was_killed_is_finished(run, backup) -> None:
    key = key_of(run, "rollouts")
    right = run.store.get(key)
    flip(run, key)
    wrong = run.store.get(key)
    aside = run.names.quarantined(key, hashlib.sha256(wrong).hexdigest())
    run.store.create(aside, wrong)
    run.store.delete(key)  # it died between the two
    (done,) = await repair(run, backup=backup, is_applied=True)
    assert done.state is RepairState.RESTORED and run.store.get(key) == right and run.store.get(aside) == wrong


def test_the_command(run, backup, run_command) -> None:
    replica = backup.uri("x").removesuffix("/x")
    assert run_command("repair", run)[:2] == (0, f"run {run.names.uid}: nothing is damaged or missing\n")
    key = key_of(run, "rollouts")
    flip(run, key)
    code, out, _ = run_command("repair", run, "--from", replica)
    assert code == 1 and "restorable" in out and "nothing was changed" in out
    code, out, _ = run_command("repair", run, "--from", replica, "--apply", "--json")
    document = json.loads(out)
    assert code == 0 and [each["state"] for each in document["repairs"]] == ["restored"]
    assert run_command("repair", run)[0] == 0


FAR = (99_999_999, 10**14, 10**17, 10**30)


@pytest.mark.parametrize("step", FAR)
async def test_a_foreign_header_far_ahead_takes_no_time(run, step: int) -> None:
    run.store.create(f"{run.names.batches}{step:08d}.pb", run.store.get(run.names.batch_header(0)))
    async with asyncio.timeout(20):
        found = {finding.check for finding in (await audit(run)).violations}
        assert await repair(run) == []
    assert found >= {"HEADER_MISSING", "HEADER_STEP_WRONG"} or step == 10**30


async def test_what_only_redis_has_is_never_committed(run, redis) -> None:
    """A writer there would write the run's history."""
    key = run.names.batch_header(STEPS - 1)
    right = run.store.get(key)
    forged = run.header(STEPS - 1)
    forged.reward_mean = 7.0
    ahead = run.header(STEPS - 1)
    ahead.step = STEPS + 5
    for info in [*run.store.list(run.names.event_archive), *run.store.list(run.names.seals)]:
        run.store.delete(info.key)
    run.store.delete(run.names.batch_header(STEPS))
    stream, events = run.names.stream(Stream.BATCHES), run.names.stream(Stream.EVENTS)
    await redis.delete(stream)
    told = event_pb2.Event(writer="nobody", writer_sequence=1)
    told.batch_committed.step = STEPS - 1
    told.batch_committed.chain_hash = chain_hash(forged.previous_chain_hash, _bytes(forged)).hex()
    broken = event_pb2.Event(writer="nobody", writer_sequence=2)
    broken.batch_committed.chain_hash = "no hash"
    for id_, message in ((f"{STEPS - 1}-1", forged), (f"{STEPS + 5}-1", ahead), (f"{2**60}-1", forged)):
        await redis.xadd(stream, _fields(_bytes(message)), id=id_)
    for event in (told, broken):
        await redis.xadd(events, _fields(_bytes(event)), id="1-*")
    found = await repair(run, with_redis=True, is_applied=True)
    assert RepairState.RESTORED not in {each.state for each in found}
    assert run.store.get(key) == right and run.store.head(run.names.batch_header(STEPS + 5)) is None


async def test_foreign_events_stop_no_repair(run) -> None:
    (info,) = list(run.store.list(run.names.event_archive))
    event = event_pb2.Event(writer="nobody", writer_sequence=1)
    event.batch_committed.chain_hash = "no hash"
    data = _bytes(event)
    entry = Entry(id="1-900", v=FORMAT_MAJOR, h=hashlib.sha256(data).hexdigest(), d=data, tp="")
    run.store.create(run.names.archived_events("1-900", "1-900"), event_archive.encode_archive([entry]))
    assert {each.state for each in await repair(run)} <= {RepairState.REFUSED} and info


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("checkpoint manifest", b'{"objects": [{}]}'),
        ("checkpoint manifest", b'{"objects": [{"key": "../x", "sha256": "", "size_bytes": -1}]}'),
        ("checkpoint manifest", b'{"objects": 7}'),
        ("policy manifest", b'{"encodings": [7], "files": [{"key": 1, "sha256": 2, "size_bytes": "x"}]}'),
        ("policy manifest", b'{"encodings": [], "files": [{"key": "../x", "sha256": "", "size_bytes": 1}]}'),
        ("run.json", b"{}"),
        ("run.json", b'{"name": "../..", "run_hash": ""}'),
        ("run.json", b'{"name": 7}'),
    ],
)
async def test_documents_of_another_form_are_named(run, kind: str, data: bytes) -> None:
    key = key_of(run, kind)
    run.store.put(key, data)
    for info in [*run.store.list(run.names.batches)] if kind == "run.json" else []:
        run.store.delete(info.key)  # without a chain nothing proves it
    found = await repair(run, is_applied=True)
    assert key in {each.key for each in found}
    await audit(run)


async def test_an_object_of_another_run_is_left_alone(run, backup) -> None:
    other = run.names.root.replace(run.names.uid, "0" * 28) + "run.json"
    run.store.create(other, b"theirs")
    backup.create(other, b"ours")
    key = run.names.policy_manifest(0, 1)
    manifest = json.loads(run.store.get(key))
    item = {"key": other, "sha256": hashlib.sha256(b"ours").hexdigest(), "size_bytes": 4}
    manifest["files"].append(item)
    for info in [*run.store.list(run.names.batches), *run.store.list(run.names.seals)]:
        run.store.delete(info.key)
        backup.delete(info.key)
    run.store.put(key, json.dumps(manifest).encode())
    found = await repair(run, backup=backup, is_applied=True)
    assert run.store.get(other) == b"theirs"
    assert {each.state for each in found if each.key == other} == {RepairState.REFUSED}, found


async def test_a_seal_that_names_anything_stops_no_repair(run) -> None:
    seal = json.loads(run.store.get(run.names.seal(0)))
    seal["objects"] |= {"policies/../../x": "00", "": "00", "checkpoints//y/z": "00", "\u0000": "00"}
    run.store.put(run.names.seal(0), json.dumps(seal).encode())
    assert {each.state for each in await repair(run, is_applied=True)} == {RepairState.REFUSED}
    await audit(run)


def _bytes(message) -> bytes:
    return message.SerializeToString(deterministic=True)


def _fields(data: bytes) -> dict:
    return {"v": str(FORMAT_MAJOR), "h": hashlib.sha256(data).hexdigest(), "d": data, "tp": ""}


@pytest.mark.parametrize(("kind", "how"), pairs_by_default(["policy manifest", "policy object"], HOW))
async def test_what_a_successor_stands_in_for_is_not_needed(run, kind: str, how: str) -> None:
    key = {"policy manifest": run.names.policy_manifest(0, 2), "policy object": policy_object(run)}[kind]
    publish_anew(run, 2)
    HOW[how](run, key)
    found = {each.key: each for each in await repair(run, is_applied=True)}
    if kind == "policy object" or key in found:  # a manifest that nobody names is nobody's concern
        assert found[key].state is RepairState.NOT_NEEDED and "manifest.r1.json" in found[key].detail
    assert list((await audit(run)).violations) == []


@pytest.mark.parametrize(("what", "how"), pairs_by_default(["manifest", "object"], HOW))
async def test_a_successor_is_restored_from_a_backup(run, tmp_path, what: str, how: str) -> None:
    successor = publish_anew(run, 2)
    source = run.store.uri("x").removesuffix("/x").removeprefix("file://")
    shutil.copytree(source, tmp_path / "later")
    run.store.delete(policy_object(run))
    (item,) = json.loads(run.store.get(successor))["encodings"][0]["objects"]
    key = {"manifest": successor, "object": item["key"]}[what]
    right = run.store.get(key)
    HOW[how](run, key)
    if what == "manifest" and how == "damaged":
        run.store.put(key, right.replace(b'"digest"', b'"digesT"'))
    done = {each.key: each for each in await repair(run, backup=LocalStore(tmp_path / "later"), is_applied=True)}
    assert done[key].state is RepairState.RESTORED and run.store.get(key) == right, done


async def test_an_archive_with_an_event_that_is_none_is_told_and_made_anew_from_redis(run) -> None:
    await EventArchive(run.log).archive()
    for info in list(run.store.list(run.names.seals)):
        run.store.delete(info.key)  # which names it
    key = [info.key for info in run.store.list(run.names.event_archive)][-1]
    right = run.store.get(key)
    entries = decode_archive(right, key)
    run.store.put(key, encode_archive([replace(entries[0], d=b"\xff\xff"), *entries[1:]]))
    (found,) = await repair(run)
    assert (found.key, found.state) == (key, RepairState.REFUSED) and "event" in found.problem
    (done,) = await repair(run, with_redis=True, is_applied=True)
    assert done.state is RepairState.RESTORED and decode_archive(run.store.get(key), key) == entries
