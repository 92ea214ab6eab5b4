"""`run resume` of a run that has FAILED: the cause is removed, and the run ends as if it had never failed."""

import asyncio

import pytest

from millrace.errors import InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.catalog import RunCatalog, RunView
from millrace.rpc.channel import call
from millrace.runlog import Names, Stream
from millrace.runlog.rebuild import open_or_rebuild
from millrace.runlog.records.numbered import read_intents
from millrace.runlog.records.revisions import has_ended, load_reopenings, load_step
from millrace.runlog.run_status import BatchAge
from millrace.trainer.log.client import read_batch
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import (
    bodies,
    create,
    get,
    has_state,
    headers_of,
    log_of,
    pause,
    require_clean,
    resolutions,
    states,
    watch,
    wipe,
)
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers

FAILED, CLOSE = run_pb2.RUN_STATE_FAILED, batch_pb2.BATCH_KIND_CLOSE


async def resume(stack, run, *, request_id: str = "") -> run_pb2.Run:
    request = run_service_pb2.ResumeRunRequest(name=run.name, request_id=request_id)
    return (await call(stack.runs.ResumeRun, request)).run


async def start(stack, *, max_steps: int = 4):
    """A run that stands still after two batches: nobody finishes what is dispatched next. With its workers."""
    env, _, trainer = await stack.env_server(silent=set(range(5, 1000))), await stack.inference(), await stack.trainer()
    run = await create(stack, max_steps=max_steps)
    await until(lambda: stands_still(env, trainer), what="two batches, and open groups")
    return run, env, trainer


def stands_still(env, trainer) -> bool:
    return len(trainer.steps) >= 2 and any(env.plays_of(ordinal) for ordinal in env.silent)


async def fail(stack, run, env, trainer) -> None:
    """Have the trainer give the run up; what held it up is gone then."""
    trainer.error = "MODEL_MISSING", "the model is not there"  # also if it is assigned the run anew meanwhile
    trainer.status.error_reason, trainer.status.error_message = trainer.error
    await until(lambda: has_state(stack, run, FAILED), what="FAILED")
    trainer.error = None
    env.silent.clear()


def names_of(stack, run) -> Names:
    return Names(stack.prefix, run.uid)


async def require_all_steps(stack, run, *, max_steps: int) -> list[batch_pb2.BatchHeader]:
    """Return the run trained each of its steps once and resolved each ordinal once; returns its headers."""
    headers = await headers_of(stack, run)
    assert [header.step for header in headers if header.kind != CLOSE] == list(range(max_steps))
    resolutions(headers)
    await require_clean(stack, run)
    return headers


async def test_an_environment_that_did_not_load_is_mended(stack) -> None:
    env, _, _ = await stack.env_server(fail_open="no such data set"), await stack.inference(), await stack.trainer()
    run = await create(stack)
    events = await watch(stack, run)
    assert states(events)[-1] == "FAILED"
    error = (await get(stack, run)).error
    assert error.remedy and error.remedy not in error.message, "each is said once"
    env.fail_open = ""
    assert (await resume(stack, run)).state == run_pb2.RUN_STATE_QUEUED
    events = await watch(stack, run)
    assert states(events) == ["STARTING", "FAILED", "QUEUED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    reopened = bodies(events, "state_changed")[2]
    assert reopened.old_state == FAILED and reopened.reason.startswith("reopened: it goes on with step 1")
    found = await get(stack, run)
    assert not found.HasField("error") and found.progress.max_steps == 3
    headers = await require_all_steps(stack, run, max_steps=3)
    assert [(h.step, h.revision, h.kind == CLOSE) for h in headers[:2]] == [(0, 0, True), (0, 1, False)]


@pytest.mark.parametrize("is_wiped", [True, pytest.param(False, marks=pytest.mark.long)])
async def test_a_run_that_failed_in_the_middle_goes_on_at_its_step(stack, is_wiped: bool) -> None:
    run, env, trainer = await start(stack, max_steps=5)
    await fail(stack, run, env, trainer)
    before, failed = await headers_of(stack, run), await get(stack, run)
    assert before[-1].kind == CLOSE and "MODEL_MISSING" in failed.error.reason
    dropped = {item.ordinal for item in before[-1].resolutions if item.reason == "run_failed"}
    if is_wiped:
        await wipe(stack)
    await resume(stack, run)
    events = await watch(stack, run)
    assert states(events)[-1] == "SUCCEEDED" and "FAILED" in states(events)
    headers = await require_all_steps(stack, run, max_steps=5)
    closing, successor = headers[len(before) - 1 : len(before) + 1]
    assert (successor.step, successor.revision) == (closing.step, 1)
    assert dropped and not dropped & {i.ordinal for h in headers[len(before) :] for i in h.resolutions}
    assert all(header.writer_epoch > closing.writer_epoch for header in headers[len(before) :])
    log = await log_of(stack, run)
    rebuilt = [w.message for w in bodies(events, "warning") if w.reason == "LOG_REBUILT"]
    # Who reads the run between wipe and reopening (as it waits for its seal) puts back a copy that ends before the end.
    put_back = is_wiped and log.generation == 1
    assert log.generation == 2 or put_back, "the copy in Redis that held the closing header was replaced"
    assert len(rebuilt) == (not put_back)
    assert all(("Redis had lost the log" if is_wiped else "the run was reopened") in each for each in rebuilt)
    held, stored, _ = await read_batch(log, closing.step, timeout_s=60)
    assert held.revision == 1 and stored == log.store.get(log.names.batch_header(closing.step, 1))


async def test_a_run_is_reopened_again_and_again_also_at_one_step(stack) -> None:
    run, env, trainer = await start(stack, max_steps=6)
    await fail(stack, run, env, trainer)
    env.fail_open = "the data set is gone, too"
    for _ in range(2):
        await resume(stack, run)
        await until(lambda: has_state(stack, run, FAILED), what="FAILED again")
    step = (await headers_of(stack, run))[-1].step
    env.fail_open = ""
    trainer.headers.clear()
    resolved = sum(len(header.resolutions) for header in await headers_of(stack, run))
    env.silent.update(range(resolved + 3, 1000))
    await resume(stack, run)

    def is_a_batch_further() -> bool:
        has_batch = any(header.step == step and header.kind != CLOSE for header in trainer.headers)
        return has_batch and stands_still(env, trainer)

    await until(is_a_batch_further, what="one more batch, and open groups")
    await fail(stack, run, env, trainer)
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    headers = await require_all_steps(stack, run, max_steps=6)
    assert [h.revision for h in headers if h.step == step] == [0, 1, 2, 3]
    assert len(load_reopenings(stack.deps["store"], names_of(stack, run))) == 4


@pytest.mark.long
async def test_a_failed_run_that_was_read_after_a_wipe_goes_on(stack) -> None:
    """What is put back into Redis for who reads has no batch, so that the reopened run goes on with it."""
    run, env, trainer = await start(stack, max_steps=4)
    await fail(stack, run, env, trainer)
    await wipe(stack)
    names = names_of(stack, run)
    redis, store = stack.deps["redis"], stack.deps["store"]
    read = await open_or_rebuild(redis, store, prefix=stack.prefix, uid=names.uid, owner="who reads it")
    assert read.generation == 1 and await redis.ttl(names.meta) > 0
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert (await log_of(stack, run)).generation == 1 and await redis.ttl(names.meta) == -1
    await require_all_steps(stack, run, max_steps=4)


async def test_a_run_that_is_reopened_while_it_is_retired_does_not_expire(stack) -> None:
    run, env, trainer = await start(stack, max_steps=4)
    await fail(stack, run, env, trainer)
    names, store = names_of(stack, run), stack.deps["store"]
    await until(lambda: asyncio.to_thread(lambda: store.head(names.seal(0)) is not None), what="the seal")
    catalog = RunCatalog(redis=stack.deps["redis"], store=store, prefix=stack.prefix, owner="retires")
    log = await catalog.open_log(run.uid)
    expire = log.expire

    async def expire_late(seconds: float) -> None:
        """Have the run reopened just before its log is to expire."""
        await resume(stack, run)
        await until(lambda: asyncio.to_thread(lambda: bool(load_reopenings(store, names))), what="the reopening")
        await expire(seconds)

    log.expire = expire_late  # type: ignore[method-assign]
    assert not await catalog.retire(log)
    assert await stack.deps["redis"].ttl(names.meta) == -1, "the run goes on, and so does its log"
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    await require_all_steps(stack, run, max_steps=4)


async def test_the_log_of_a_run_that_is_driven_does_not_expire(stack) -> None:
    """As one may that was reopened while it was retired: who retired it died before it looked for reopenings again."""
    run = await create(stack)
    await (await log_of(stack, run)).expire(3600.0)
    _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert await stack.deps["redis"].ttl(names_of(stack, run).meta) == -1


async def test_of_two_resumes_at_once_one_reopens_the_run(stack) -> None:
    run, env, trainer = await start(stack, max_steps=4)
    await fail(stack, run, env, trainer)
    await asyncio.gather(*(resume(stack, run, request_id=f"r{number}") for number in range(4)))
    await resume(stack, run, request_id="r0")
    assert states(await watch(stack, run)).count("QUEUED") == 1
    assert len(load_reopenings(stack.deps["store"], names_of(stack, run))) == 1
    await require_all_steps(stack, run, max_steps=4)


async def test_a_repeated_request_does_not_reopen_what_failed_once_more(stack) -> None:
    env = await stack.env_server(fail_open="broken")
    await stack.inference()
    await stack.trainer()
    run = await create(stack)
    await until(lambda: has_state(stack, run, FAILED))
    await resume(stack, run, request_id="first")
    await until(lambda: has_state(stack, run, FAILED), what="FAILED again")
    assert (await resume(stack, run, request_id="first")).state == FAILED
    assert len(load_reopenings(stack.deps["store"], names_of(stack, run))) == 1
    env.fail_open = ""
    await resume(stack, run, request_id="second")
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_only_what_failed_can_be_reopened(stack) -> None:
    env, _, _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    succeeded, cancelled = await create(stack, run_id="good"), await create(stack, run_id="stopped")
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=cancelled.name))
    for run, state in ((succeeded, "SUCCEEDED"), (cancelled, "CANCELLED")):
        assert states(await watch(stack, run))[-1] == state
        with pytest.raises(InvalidStateError, match=f"has already ended as {state}"):
            await resume(stack, run)
    env.fail_open = "broken"
    asked = await create(stack, run_id="asked")
    await until(lambda: has_state(stack, asked, FAILED))
    log = await log_of(stack, asked)
    await log.write_intent("cancel", {"reason": "by another replica, a moment before"})
    with pytest.raises(InvalidStateError, match="a cancellation is for good"):
        await resume(stack, asked)
    assert has_ended(stack.deps["store"], log.names) and not load_reopenings(stack.deps["store"], log.names)


async def test_a_pause_before_the_failure_does_not_hold_the_run_up(stack) -> None:
    run, env, trainer = await start(stack, max_steps=4)
    await pause(stack, run)  # it cannot drain, and so fails before it is paused
    await fail(stack, run, env, trainer)
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    kinds = [intent.kind for intent in await read_intents(stack.deps["store"], names_of(stack, run))]
    assert kinds == ["pause", "reopen"]


async def test_a_trainer_that_consumed_the_end_comes_back(stack) -> None:
    """It read the closing header ahead and reports only after the reopening that it has finished."""
    run, env, trainer = await start(stack, max_steps=4)
    await fail(stack, run, env, trainer)
    trainer.headers.clear()
    await resume(stack, run)
    await until(lambda: trainer.status.run_uid == run.uid and not trainer.status.error_reason)
    trainer.task.cancel()
    trainer.status.is_finished = True
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    await require_all_steps(stack, run, max_steps=4)


async def test_another_replica_that_saw_the_end_learns_of_the_reopening(stack) -> None:
    run, env, trainer = await start(stack, max_steps=4)
    others = [await create(stack, run_id=f"other-{number}") for number in range(3)]
    catalogs = [RunCatalog(**stack.deps, owner=f"replica-{number}") for number in range(2)]
    await fail(stack, run, env, trainer)
    env.fail_open = "broken"
    for other in others:
        await until(lambda other=other: has_state(stack, other, FAILED), timeout_s=40)
    env.fail_open = ""
    for catalog in catalogs:
        assert [view.is_terminal for view in await catalog.read_listed(await catalog.list_names())] == [True] * 4
    trainer.hold.clear()
    await resume(stack, run)
    assert not (await catalogs[0].find(run.name)).is_terminal

    async def seen() -> list[RunView]:
        return [view for view in await catalogs[1].refresh() if view.record.uid == run.uid and not view.is_terminal]

    (view,) = await until(seen, timeout_s=20)
    assert isinstance(view.status.batches, BatchAge)
    trainer.hold.set()
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_readers_of_a_stale_copy_do_not_take_the_superseded_header(stack) -> None:
    """Redis still holds the closing header, for instance because it came back from an old file."""
    run, env, trainer = await start(stack, max_steps=4)
    await fail(stack, run, env, trainer)
    log, store = await log_of(stack, run), stack.deps["store"]
    step = (await load_headers(log))[0][-1].step
    entry = (await log.read_range(Stream.BATCHES, f"{step}-1", f"{step}-1"))[0]
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    log = await log_of(stack, run)
    key = log.names.stream(Stream.BATCHES)
    await stack.deps["redis"].delete(key)
    fields = ("v", entry.v, "h", entry.h, "d", entry.d, "tp", "")
    await stack.deps["redis"].execute_command("XADD", key, entry.id, *fields)
    header, data, _ = await read_batch(log, step, timeout_s=60)
    found = load_step(store, log.names, step)
    assert found is not None and header.revision == 1 and data == found.in_force
    assert found.revisions[:-1] == (entry.d,)
