"""A fork copies what it needs, is complete or invisible, audits clean, and leaves its parent alone."""

import json

import pytest

from millrace.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptObjectError,
    InvalidStateError,
    NotFoundError,
    UnavailableError,
)
from millrace.internal.v1 import batch_pb2
from millrace.readers.audit import audit_run
from millrace.runlog import RunLog, Stream, chain_hash, commit_batch, new_uid, reappend_committed
from millrace.runlog.fork import copy_fork, plan_fork
from millrace.runlog.index import create_run, find_request, read_index
from millrace.runlog.rebuild import open_reopened
from millrace.runlog.records.frontier import genesis_hash
from millrace.runlog.records.revisions import find_closing, load_reopenings, reopen
from millrace.storage.base import with_checksum
from millrace.trainer.log.client import read_batch
from millrace_testing.runlog.committed import load_headers
from millrace_testing.runlog.recorded_log import STEPS, checkpoint, record

FORK_HASH = "cd" * 32


@pytest.fixture
async def parent(log, redis, local_store):
    return await record(log, redis, local_store)


def contents(store, prefix: str) -> dict[str, bytes]:
    return {info.key: store.get(info.key) for info in store.list(prefix)}


async def fork(parent, step: int, *, store=None, request_id: str = "", name: str = "child", copy=copy_fork) -> RunLog:
    """Fork as the service does; `store` is what the copy goes through."""
    names, store = parent.names, store or parent.store
    plan = plan_fork(store, names, name="demo", step=step)
    document = {"name": name, "run_hash": FORK_HASH, "parent": plan.to_json()}
    uid = await create_run(
        parent.redis,
        parent.store,
        names.prefix,
        uid=new_uid(),
        name=name,
        request_id=request_id,
        run_json=json.dumps(document, sort_keys=True).encode(),
        prepare=lambda uid, run_json: copy(store, names.prefix, uid, run_json),
    )
    return await RunLog.open(parent.redis, parent.store, prefix=names.prefix, uid=uid)


def genesis(log: RunLog, parent, *, base: int = 1) -> bytes:
    """Return what the chain of a fork at checkpoint `base` begins with."""
    return genesis_hash(parent.chains[base - 1], log.store.get(log.names.run_json))


async def violations(log: RunLog) -> list[str]:
    report = await audit_run(log.redis, log.store, prefix=log.names.prefix, uid=log.uid)
    return [f"{found.check}: {found.message}" for found in report.violations]


async def test_a_fork_at_a_checkpoint_begins_there(parent):
    log = await fork(parent, 1)
    assert log.run_hash == FORK_HASH
    assert contents(log.store, log.names.batches) == {}
    manifest = json.loads(log.store.get(log.names.checkpoint_manifest(1)))
    assert (manifest["run_uid"], manifest["run_hash"], manifest["step"]) == (log.uid, FORK_HASH, 1)
    assert manifest["chain_hash"] == genesis(log, parent).hex()
    assert all(item["key"].startswith(log.names.root) for item in manifest["objects"])
    theirs = json.loads(parent.store.get(parent.names.checkpoint_manifest(1)))
    assert [log.store.get(item["key"]) for item in manifest["objects"]] == [
        parent.store.get(item["key"]) for item in theirs["objects"]
    ]
    headers, chain = await load_headers(log)
    assert headers == [] and chain == genesis(log, parent)
    assert await log.next_position(Stream.BATCHES) == 1 and await log.next_position(Stream.POLICIES) == 1
    assert await violations(log) == []


async def test_a_fork_behind_a_checkpoint_takes_the_batches_along(parent):
    log = await fork(parent, 2)
    headers, chain = await load_headers(log)
    assert [header.step for header in headers] == [1]
    [header], original = headers, parent.header(1)
    assert header.run_uid == log.uid and header.run_hash == FORK_HASH and header.writer_epoch == 0
    assert header.previous_chain_hash == genesis(log, parent) and chain != parent.chains[1]
    assert header.resolutions == original.resolutions and header.samples == original.samples
    assert [log.store.get(chunk.key) for chunk in header.chunks] == [
        log.store.get(chunk.key) for chunk in original.chunks
    ]
    assert all(chunk.key.startswith(log.names.root) for chunk in header.chunks)
    assert header.rollouts_key.startswith(log.names.root)
    assert await violations(log) == []
    epoch = await log.acquire_epoch("orchestrator", "o")
    assert await reappend_committed(log, epoch) == 1
    _, _, chunks = await read_batch(log, 1, timeout_s=60)
    assert len(chunks) == len(header.chunks)
    assert await violations(log) == []


async def test_a_fork_before_the_first_checkpoint_begins_with_the_start_model(parent):
    log = await fork(parent, 0)
    assert contents(log.store, log.names.checkpoints) == {} and await violations(log) == []
    parent.store.delete(parent.header(0).chunks[0].key)
    with pytest.raises(InvalidStateError, match="cannot be forked at step 0: it keeps steps 1 to 3"):
        await fork(parent, 0, name="second")


async def test_a_fork_at_the_end_of_an_ended_run_goes_on_behind_it(parent):
    log = await fork(parent, STEPS)
    headers, chain = await load_headers(log)
    assert headers == [] and chain == genesis(log, parent, base=STEPS)
    origin = json.loads(await log.run_json())["parent"]
    assert (origin["base_step"], origin["resolved_below"], origin["resolved_above"]) == (STEPS, 3 * STEPS, [])
    assert await violations(log) == [], "the closing header is not taken along"


async def test_a_run_that_goes_on_is_forked_without_a_trace(log, redis, local_store):
    parent = await record(log, redis, local_store, closes=False)
    before = contents(local_store, parent.names.root)
    entries = {stream: await redis.xrange(parent.names.stream(stream)) for stream in Stream}
    meta = await redis.hgetall(parent.names.meta)
    await fork(parent, 2)
    assert contents(local_store, parent.names.root) == before
    assert {stream: await redis.xrange(parent.names.stream(stream)) for stream in Stream} == entries
    assert await redis.hgetall(parent.names.meta) == meta
    assert await violations(parent.log) == []


@pytest.mark.parametrize("step", [STEPS + 1, 10**6])
async def test_steps_that_are_not_there(parent, step):
    with pytest.raises(InvalidStateError, match=f"at step {step}: it keeps steps 0 to {STEPS}") as raised:
        await fork(parent, step)
    assert raised.value.reason == "STEP_NOT_KEPT"
    assert raised.value.metadata == {"oldest": "0", "newest": str(STEPS)}


async def test_a_run_that_keeps_nothing(log, redis, local_store):
    parent = await record(log, redis, local_store)
    for step in (1, 3):
        parent.store.delete(parent.names.checkpoint_manifest(step))
    parent.store.delete(parent.header(0).chunks[0].key)
    with pytest.raises(InvalidStateError, match="it keeps no step"):
        await fork(parent, 2)


async def test_a_fork_of_a_fork(parent):
    child = await fork(parent, 2)
    grandchild = await fork(_Parent(child, parent), 2, name="grandchild")
    headers, _ = await load_headers(grandchild)
    assert [header.step for header in headers] == [1]
    assert await violations(grandchild) == []
    with pytest.raises(InvalidStateError, match="it keeps steps 1 to 2"):
        await fork(_Parent(child, parent), 0, name="third")


class _Parent:
    """A fork in the place of a recorded run."""

    def __init__(self, log: RunLog, recorded) -> None:
        self.names, self.store, self.redis = log.names, recorded.store, recorded.redis


# Requests that are repeated, killed, raced.


class _Killed(Exception):
    """The process dies here."""


class _DyingStore:
    """A store whose process dies at its n-th write."""

    def __init__(self, store, writes: int) -> None:
        self._store, self._left = store, writes

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def _write(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Killed

    def create(self, key: str, data: bytes) -> bool:
        self._write()
        return self._store.create(key, data)

    def put_file(self, key: str, path) -> None:
        self._write()
        self._store.put_file(key, path)


async def test_a_copy_that_is_killed_anywhere_is_invisible_and_completed_by_the_same_request(parent):
    prefix, deaths = parent.names.prefix, 0
    while True:
        request_id, name = f"request-{deaths}", f"child-{deaths}"
        try:
            await fork(parent, 2, store=_DyingStore(parent.store, deaths), request_id=request_id, name=name)
        except _Killed:
            assert await find_request(parent.store, prefix, request_id) is None
            assert name not in (await read_index(parent.redis, parent.store, prefix)).runs
        else:
            break
        log = await fork(parent, 2, request_id=request_id, name=name)
        assert (await read_index(parent.redis, parent.store, prefix)).runs[name] == log.uid
        assert await violations(log) == []
        deaths += 1
    num_objects = len(json.loads(parent.store.get(parent.names.checkpoint_manifest(1)))["objects"])
    wanted = len(parent.header(1).chunks) + num_objects + 3
    assert deaths == wanted, "a header, its chunks and archive, the checkpoint's objects, a manifest"


async def test_the_same_request_gives_the_same_run(parent):
    first = await fork(parent, 2, request_id="r")
    before = contents(parent.store, first.names.root)
    second = await fork(parent, 2, request_id="r", name="another")
    assert second.uid == first.uid and contents(parent.store, first.names.root) == before
    with pytest.raises(AlreadyExistsError, match="a run called 'child' exists"):
        await fork(parent, 2, request_id="r2")


async def test_a_request_goes_on_with_the_plan_that_it_began_with(parent):
    with pytest.raises(_Killed):
        await fork(parent, 2, store=_DyingStore(parent.store, 1), request_id="r")
    checkpoint(parent, 2)  # a newer one would do now, but half of the copy is of the plan before
    log = await fork(parent, 2, request_id="r")
    assert json.loads(await log.run_json())["parent"]["base_step"] == 1
    assert await violations(log) == []


async def test_a_parent_that_has_dropped_it_meanwhile(parent):
    def dropped(store, prefix, uid, run_json):
        parent.store.delete(parent.names.checkpoint_manifest(1))
        copy_fork(store, prefix, uid, run_json)

    with pytest.raises(InvalidStateError, match="does not keep any more") as raised:
        await fork(parent, 2, copy=dropped)
    assert raised.value.reason == "PARENT_GONE"


async def test_a_parent_whose_deletion_begins_before_or_during_the_copy(parent):
    def deleted(store, prefix, uid, run_json):
        store.create(parent.names.tombstone, b"{}")
        copy_fork(store, prefix, uid, run_json)

    with pytest.raises(InvalidStateError, match="is being deleted") as raised:
        await fork(parent, 2, copy=deleted)
    assert raised.value.reason == "PARENT_GONE"
    with pytest.raises(NotFoundError, match="is being deleted: nothing opens, resumes or forks it"):
        plan_fork(parent.store, parent.names, name="demo", step=2)


@pytest.mark.parametrize("field", ["uid", "name", "step", "base_step"])
@pytest.mark.parametrize("value", [None, []], ids=["missing", "another type"])
async def test_a_parent_that_is_not_named_whole_is_a_damaged_run_json(parent, field: str, value: object):
    whole = plan_fork(parent.store, parent.names, name="demo", step=2).to_json()
    named = {name: known for name, known in whole.items() if name != field}
    document = {"run_hash": FORK_HASH, "parent": named if value is None else {**named, field: value}}
    with pytest.raises(CorruptObjectError, match=f"run.json names no parent to copy: parent.{field} is") as raised:
        copy_fork(parent.store, parent.names.prefix, new_uid(), json.dumps(document).encode())
    assert raised.value.reason == "RUN_JSON_CORRUPT"


async def test_a_store_that_is_away_leaves_nothing_visible(parent):
    def away(store, prefix, uid, run_json):
        raise UnavailableError("the store is away", reason="STORE_DOWN")

    with pytest.raises(UnavailableError):
        await fork(parent, 2, copy=away)
    assert "child" not in (await read_index(parent.redis, parent.store, parent.names.prefix)).runs


async def test_sources_are_verified_while_they_are_copied(parent):
    def damage(key: str) -> None:
        data = bytearray(parent.store.get(key))
        data[0] ^= 1
        parent.store.put(key, bytes(data))

    manifest = json.loads(parent.store.get(parent.names.checkpoint_manifest(1)))
    for number, key in enumerate((manifest["objects"][0]["key"], parent.header(1).chunks[0].key)):
        whole = parent.store.get(key)
        damage(key)
        with pytest.raises(CorruptObjectError, match="has sha256") as raised:
            await fork(parent, 2, name=f"child-{number}")
        assert parent.store.uri(key) in str(raised.value)
        parent.store.put(key, whole)


async def test_a_parent_with_a_broken_chain(parent):
    header = parent.header(1)
    header.reward_mean = 0.9
    parent.store.put(parent.names.batch_header(1), header.SerializeToString(deterministic=True))
    with pytest.raises(CorruptObjectError, match="does not continue the chain of batch 1"):
        await fork(parent, 2)  # the last header that is copied: the one behind it says that it was another


async def test_a_checkpoint_of_another_history(parent):
    key = parent.names.checkpoint_manifest(1)
    manifest = json.loads(parent.store.get(key))
    parent.store.put(key, with_checksum({**manifest, "chain_hash": "00" * 32}))
    with pytest.raises(CorruptObjectError, match="checkpoint 1 of run 'demo' does not follow the committed headers"):
        await fork(parent, 2)


async def test_a_missing_header_of_the_parent(parent):
    parent.store.delete(parent.names.batch_header(1))
    with pytest.raises(CorruptObjectError, match="is missing, but step 2 is committed"):
        await fork(parent, 2)


async def test_what_lies_under_the_forks_names_is_never_replaced(parent):
    def occupied(store, prefix, uid, run_json):
        from millrace.runlog.names import Names

        store.put(Names(prefix, uid).batch_header(1), batch_pb2.BatchHeader(step=1).SerializeToString())
        copy_fork(store, prefix, uid, run_json)

    with pytest.raises(ConflictError, match="exists with other content"):
        await fork(parent, 2, copy=occupied)


async def test_a_fork_behind_a_reopened_end_takes_that_end_along(log, redis, local_store):
    """What the failed closing header dropped stays dropped in the fork, which has a chain of its own over it."""
    parent = await record(log, redis, local_store, closes=False)
    epoch = await log.acquire_epoch("orchestrator", "o")
    last = parent.header(STEPS - 1)

    def header(kind, *, revision: int, ordinal: int) -> batch_pb2.BatchHeader:
        made = batch_pb2.BatchHeader(
            run_uid=log.uid, run_hash=log.run_hash, kind=kind, step=STEPS, revision=revision, writer_epoch=epoch.number
        )
        made.previous_chain_hash, made.resolved_below = parent.chain, ordinal + 1
        made.resolutions.add(
            ordinal=ordinal, outcome=batch_pb2.ORDINAL_OUTCOME_DROPPED, reason="run_failed" if not revision else "stale"
        )
        return made

    closing = header(batch_pb2.BATCH_KIND_CLOSE, revision=0, ordinal=last.resolved_below)
    closing.outcome, closing.final_version = batch_pb2.RUN_OUTCOME_FAILED, STEPS
    parent.chain = chain_hash(parent.chain, await commit_batch(log, epoch, closing, [], b""))
    found = find_closing(local_store, log.names)
    assert found is not None and reopen(local_store, log.names, found, epoch=epoch.number, owner="o")
    log = parent.log = await open_reopened(redis, local_store, prefix=log.names.prefix, uid=log.uid, owner="o")
    successor = header(batch_pb2.BATCH_KIND_TRAIN, revision=1, ordinal=last.resolved_below + 1)
    await commit_batch(log, epoch, successor, [], b"")
    child = await fork(parent, STEPS + 1)
    headers, _ = await load_headers(child)
    assert [(each.step, each.revision) for each in headers] == [(STEPS, 0), (STEPS, 1)]
    assert len(load_reopenings(local_store, child.names)) == 1
    assert await violations(child) == []
    before = await fork(parent, STEPS, name="before")
    assert (await load_headers(before))[0] == [] and await violations(before) == []
