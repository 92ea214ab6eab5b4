"""What takes the place of something else: successors of headers and manifests, records of reopenings, a fork's parent.

Each is tampered with in each way, and the fast audit finds it.
"""

import json
from collections.abc import Callable

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import audit_run
from millrace.readers.repair import RepairState, repair_run
from millrace.runlog import RunLog, chain_hash, commit_batch, new_uid
from millrace.runlog.fork import copy_fork, plan_fork
from millrace.runlog.index import create_run
from millrace.runlog.rebuild import open_reopened
from millrace.runlog.records.revisions import find_closing, reopen
from millrace.storage.base import newest_revision, revision_key, with_checksum
from millrace.storage.local import LocalStore
from millrace_testing.lanes import by_default, pairs_by_default
from millrace_testing.runlog.recorded_log import STEPS, Recorded, audit, flip, publish_anew, record


@pytest.fixture
async def run(log, redis, local_store) -> Recorded:
    """It has failed, was reopened and went on for two steps; a version and a checkpoint were damaged and made anew."""
    run = await record(log, redis, local_store, closes=False)
    epoch = await log.acquire_epoch("orchestrator", "o")
    ordinal = run.header(STEPS - 1).resolved_below

    async def commit(kind: batch_pb2.BatchKind, step: int, revision: int) -> None:
        nonlocal ordinal
        header = batch_pb2.BatchHeader(run_uid=log.uid, run_hash=log.run_hash, kind=kind, step=step, revision=revision)
        header.writer_epoch, header.previous_chain_hash, header.resolved_below = epoch.number, run.chain, ordinal + 1
        reason = "run_failed" if kind == batch_pb2.BATCH_KIND_CLOSE else "stale"
        header.resolutions.add(ordinal=ordinal, outcome=batch_pb2.ORDINAL_OUTCOME_DROPPED, reason=reason)
        if kind == batch_pb2.BATCH_KIND_CLOSE:
            header.outcome, header.final_version = batch_pb2.RUN_OUTCOME_FAILED, step
        run.chain = chain_hash(run.chain, await commit_batch(run.log, epoch, header, [], b""))
        ordinal += 1

    await commit(batch_pb2.BATCH_KIND_CLOSE, STEPS, 0)
    found = find_closing(local_store, log.names)
    assert found is not None and reopen(local_store, log.names, found, epoch=epoch.number, owner="o")
    run.log = await open_reopened(redis, local_store, prefix=log.names.prefix, uid=log.uid, owner="o")
    await commit(batch_pb2.BATCH_KIND_TRAIN, STEPS, 1)
    await commit(batch_pb2.BATCH_KIND_TRAIN, STEPS + 1, 0)
    publish_anew(run, 1)
    saved = run.names.checkpoint_manifest(1)
    local_store.create(revision_key(saved, 1), local_store.get(saved))
    for key in (run.names.policy_manifest(0, 1), saved):
        flip(run, key)
    return run


KINDS: dict[str, Callable[[Recorded], str]] = {
    "record of a reopening": lambda run: run.names.reopened(1),
    "superseded closing header": lambda run: run.names.batch_header(STEPS),
    "successor of a header": lambda run: run.names.batch_header(STEPS, 1),
    "successor of a policy's manifest": lambda run: newest_revision(run.store, run.names.policy_manifest(0, 1)),
    "successor of a checkpoint's manifest": lambda run: newest_revision(run.store, run.names.checkpoint_manifest(1)),
}


def delete(run: Recorded, key: str) -> None:
    run.store.delete(key)


def change(run: Recorded, key: str) -> None:
    """Other content of the same form."""
    data = run.store.get(key)
    if key.endswith(".json"):
        document = json.loads(data)
        (name,) = {"closing_sha256", "digest", "chain_hash"} & set(document)
        document[name] = "ab" * (len(document[name]) // 2)
        run.store.put(key, with_checksum(document) if "checksum" in document else json.dumps(document).encode())
        return
    header = batch_pb2.BatchHeader.FromString(data)
    header.resolutions[0].reason = "zero_advantage"
    run.store.put(key, header.SerializeToString(deterministic=True))


WAYS = {"deleted": delete, "byte flipped": flip, "changed": change}


async def test_the_untampered_run_is_clean(run) -> None:
    assert [f"{each.check}: {each.message}" for each in (await audit(run, offline=True)).violations] == []


@pytest.mark.parametrize(("kind", "way"), pairs_by_default(KINDS, WAYS))
async def test_a_tampered_successor_is_found(run, kind: str, way: str) -> None:
    key = KINDS[kind](run)
    WAYS[way](run, key)
    report = await audit(run, offline=True)
    print(f"{kind}: {way}:", sorted({each.check for each in report.violations}))
    assert list(report.violations), [f"{note.check}: {note.message}" for note in report.notes]


@pytest.mark.parametrize("held", ["whole", "damaged", "nothing"])
async def test_the_record_of_a_reopening_is_that_of_the_backup_or_made_anew(run, tmp_path, held: str) -> None:
    key, backup = run.names.reopened(1), LocalStore(tmp_path / "replica")
    right = run.store.get(key)
    if held != "nothing":
        backup.create(key, right if held == "whole" else b"{")
    run.store.delete(key)
    found = {each.key: each for each in await repair_run(None, run.store, run.names, backup=backup, is_applied=True)}
    assert found[key].state is RepairState.RESTORED
    assert (run.store.get(key) == right) == (held == "whole") and b"closing_sha256" in run.store.get(key)


PARENTS = {
    "step": lambda parent: {**parent, "base_step": parent["base_step"] + 1},
    "chain": lambda parent: {**parent, "chain_hash": "ab" * 32},
    "ordinals": lambda parent: {**parent, "resolved_below": parent["resolved_below"] + 3},
    "uid": lambda parent: {**parent, "uid": "another"},
    "nothing of it": lambda parent: {},
}


@pytest.mark.parametrize("name", by_default(PARENTS, {"chain", "nothing of it"}))
async def test_a_tampered_parent_of_a_fork_is_found(log, redis, local_store, name: str) -> None:
    parent = await record(log, redis, local_store)
    plan = plan_fork(local_store, parent.names, name="demo", step=2)
    document = {"name": "child", "run_hash": "cd" * 32, "parent": plan.to_json()}
    uid = await create_run(
        redis,
        local_store,
        parent.names.prefix,
        uid=new_uid(),
        name="child",
        run_json=json.dumps(document, sort_keys=True).encode(),
        prepare=lambda uid, run_json: copy_fork(local_store, parent.names.prefix, uid, run_json),
    )
    child = await RunLog.open(redis, local_store, prefix=parent.names.prefix, uid=uid)

    async def found() -> set[str]:
        report = await audit_run(None, local_store, prefix=child.names.prefix, uid=uid)
        return {each.check for each in report.violations}

    assert await found() == set()
    document["parent"] = PARENTS[name](document["parent"])
    local_store.put(child.names.run_json, json.dumps(document, sort_keys=True).encode())
    assert await found()
