"""DeleteRun: an ended run goes whole, from the store, from Redis and from the list; an open one stays."""

import asyncio

import pytest

from millrace.errors import InvalidStateError, NotFoundError
from millrace.orchestrator.catalog import RunCatalog
from millrace.orchestrator.intents import IntentCalls
from millrace.rpc.channel import call
from millrace.runlog import Lease, Names
from millrace.runlog.deletion import begin_deletion, mark_deleted, plan_deletion
from millrace.runlog.records.revisions import load_reopenings
from millrace.storage.local import LocalStore
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import create, get, has_state, log_of, watch
from millrace_testing.polling import until


async def delete(stack, run, **options) -> run_service_pb2.DeleteRunResponse:
    return await call(stack.runs.DeleteRun, run_service_pb2.DeleteRunRequest(name=run.name, **options))


async def deleted(stack, run) -> bool:
    """Delete the run; return False while its exports are still being written, or its trainer has its lease."""
    try:
        await delete(stack, run)
    except InvalidStateError as error:
        assert error.reason == "RUN_HELD"
        return False
    return True


async def test_an_ended_run_is_deleted_and_nothing_else_is(stack) -> None:
    _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    run, other = await create(stack, run_id="gone"), await create(stack, run_id="stays")
    await watch(stack, run)
    await watch(stack, other)
    names, store, redis = Names(stack.prefix, run.uid), stack.deps["store"], stack.deps["redis"]
    planned = await delete(stack, run, validate_only=True)
    found = sum(1 for _ in store.list(names.root))
    assert planned.uid == run.uid and {each.kind for each in planned.objects} >= {"batch header", "run.json"}
    assert sum(each.count for each in planned.objects) <= found <= sum(1 for _ in store.list(names.root))
    await until(lambda: deleted(stack, run))
    assert list(store.list(names.root)) == []
    assert [key async for key in redis.scan_iter(match=f"*{run.uid}*")] == []
    with pytest.raises(NotFoundError):
        await get(stack, run)
    listed = (await call(stack.runs.ListRuns, run_service_pb2.ListRunsRequest())).runs
    assert [each.name for each in listed] == ["runs/stays"]
    assert await has_state(stack, other, run_pb2.RUN_STATE_SUCCEEDED)
    again = await create(stack, run_id="gone")
    assert again.uid != run.uid, "the name is free"


async def test_an_open_run_is_refused_and_a_deletion_that_died_goes_on(stack) -> None:
    run = await create(stack, run_id="open")
    with pytest.raises(InvalidStateError, match="has not ended") as caught:
        await delete(stack, run)
    assert caught.value.reason == "RUN_OPEN"
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    await watch(stack, run)
    names, store = Names(stack.prefix, run.uid), stack.deps["store"]
    plan = plan_deletion(store, names)
    mark_deleted(store, plan, by="a process that died")
    store.delete(f"{stack.prefix}/names/open")
    await until(lambda: deleted(stack, run))
    assert list(store.list(names.root)) == []
    with pytest.raises(NotFoundError):
        await delete(stack, run)


# A run that is resumed or forked while its deletion is planned.


async def failed_run(stack):
    """A run that has failed, because its environment could not be loaded; it can be now."""
    env, _, _ = await stack.env_server(fail_open="broken"), await stack.inference(), await stack.trainer()
    run = await create(stack)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_FAILED), what="FAILED")
    env.fail_open = ""
    return run, Names(stack.prefix, run.uid), stack.deps["store"]


async def resume(stack, run) -> None:
    await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name=run.name))


async def fork(stack, run) -> run_pb2.Run:
    return (await call(stack.runs.ForkRun, run_service_pb2.ForkRunRequest(name=run.name, step=0))).run


async def test_a_run_that_is_resumed_while_its_deletion_is_planned_goes_on(stack) -> None:
    run, names, store = await failed_run(stack)
    plan = await asyncio.to_thread(plan_deletion, store, names)
    await resume(stack, run)
    with pytest.raises(InvalidStateError, match="was reopened") as caught:
        await asyncio.to_thread(mark_deleted, store, plan, by="late")
    assert caught.value.reason == "RUN_OPEN" and store.head(names.tombstone) is None
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_SUCCEEDED), what="SUCCEEDED")


async def test_a_run_that_is_forked_while_its_deletion_is_planned_stays(stack) -> None:
    run, names, store = await failed_run(stack)
    plan = await asyncio.to_thread(plan_deletion, store, names)
    forked = await fork(stack, run)
    with pytest.raises(InvalidStateError, match=forked.name.removeprefix("runs/")) as caught:
        await asyncio.to_thread(mark_deleted, store, plan, by="late")
    assert caught.value.reason == "RUN_NEEDED" and store.head(names.tombstone) is None


async def test_a_run_whose_lease_is_taken_while_its_deletion_is_planned_stays(stack, monkeypatch) -> None:
    run, names, store = await failed_run(stack)
    redis, log = stack.deps["redis"], await log_of(stack, run)
    plan = await asyncio.to_thread(plan_deletion, store, names)
    create_object = type(store).create
    leases = []

    def create_late(self, key: str, data: bytes) -> bool:
        """Have another process take the trainer's lease just before the tombstone is written."""
        if key == names.tombstone:
            taking = asyncio.run_coroutine_threadsafe(Lease.acquire(log, "trainer", "another", 30.0), loop)
            leases.append(taking.result(10))
        return create_object(self, key, data)

    loop = asyncio.get_running_loop()
    await until(lambda: is_unheld(redis, names), what="leases that are given back")
    monkeypatch.setattr(type(store), "create", create_late)
    with pytest.raises(InvalidStateError, match="another") as caught:
        await begin_deletion(redis, store, plan, by="late")
    assert leases[0] is not None and caught.value.reason == "RUN_HELD"
    assert store.head(names.tombstone) is None and await redis.exists(names.meta)


async def is_unheld(redis, names: Names) -> bool:
    return not await redis.exists(names.lease("trainer"), names.lease("orchestrator"))


async def test_a_run_that_is_being_deleted_is_neither_resumed_nor_forked(stack) -> None:
    run, names, store = await failed_run(stack)
    mark_deleted(store, plan_deletion(store, names), by="a process that died")
    with pytest.raises(InvalidStateError, match="is being deleted") as caught:
        await resume(stack, run)
    assert caught.value.reason == "RUN_DELETED" and load_reopenings(store, names) == []
    with pytest.raises(NotFoundError, match="is being deleted"):
        await fork(stack, run)
    await until(lambda: deleted(stack, run))


class MarkedLate(LocalStore):
    """A store in which a tombstone is written just before the record that reopens the run."""

    tombstone = ""

    def create(self, key: str, data: bytes) -> bool:
        if "/reopened/" in key:
            super().create(self.tombstone, b"{}")
        return super().create(key, data)


async def test_a_resume_that_a_tombstone_overtakes_is_not_acknowledged(stack, tmp_path) -> None:
    run, names, store = await failed_run(stack)
    marked = MarkedLate(tmp_path / "store")
    marked.tombstone = names.tombstone
    catalog = RunCatalog(redis=stack.deps["redis"], store=store, prefix=stack.prefix, owner="test")
    heard: list[str] = []

    async def hear(uid: str) -> None:
        heard.append(uid)

    calls = IntentCalls(store=marked, prefix=stack.prefix, owner="test", on_intent=hear)
    with pytest.raises(InvalidStateError, match="is being deleted"):
        await calls.resume(await catalog.find(run.name), request_id="")
    assert heard == []
