"""What arrives at an awkward moment: while a batch is being committed, or while nobody reads the run's rollouts."""

import asyncio

import pytest

from millrace.orchestrator import manager
from millrace.orchestrator.drive import batch_writer, loop
from millrace.orchestrator.play.book import RolloutStream
from millrace.orchestrator.play.env_servers import EnvServers
from millrace.readers.audit import audit_run
from millrace.rollouts.types import Purpose, RolloutStatus
from millrace.rollouts.wire import decode_archive, decode_rollout, encode_rollout
from millrace.rpc.channel import call
from millrace.runlog import Lease, RunLog, Stream
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.fakes import make_rollout
from millrace_testing.orchestrator.runs import create, has_state, resolutions, states, watch
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers


async def log_of(stack, run) -> RunLog:
    return await RunLog.open(stack.deps["redis"], stack.deps["store"], prefix=stack.prefix, uid=run.uid)


async def is_explained(stack, run, why: str) -> bool:
    answer = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))
    return any(why in wait.reason for wait in answer.waits)


@pytest.fixture
def streams(monkeypatch) -> list[RolloutStream]:
    """Return every rollout stream that is followed, in order."""
    found: list[RolloutStream] = []
    follow = RolloutStream.follow

    async def noting(self) -> None:
        found.append(self)
        await follow(self)

    monkeypatch.setattr(RolloutStream, "follow", noting)
    return found


async def let_it_read(stack, run, stream: RolloutStream, request, member: int, status: RolloutStatus) -> None:
    """Append a rollout and return when the orchestrator has taken it."""
    log = await log_of(stack, run)
    (await log.append_rollouts([encode_rollout(make_rollout(request, member, status, 0))])).require("rollout")
    newest = await log.last_id(Stream.ROLLOUTS)
    await until(lambda: place_of(stream.newest) >= place_of(newest), what="the orchestrator reads it")


def place_of(entry_id: str) -> tuple[int, ...]:
    """Return a stream id to compare: others may have appended behind it meanwhile."""
    return tuple(int(part) for part in entry_id.split("-"))


async def test_a_late_rollout_of_an_ordinal_that_is_being_committed_does_not_open_it_again(
    stack, streams, monkeypatch
) -> None:
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    commit, late = batch_writer.commit_batch, []

    async def commit_slowly(log, epoch, header, chunks, archive, **fields) -> bytes:
        if header.step == 1:
            late.append(header.resolutions[0].ordinal)
            await let_it_read(stack, run, streams[0], env.plays_of(late[0])[0], 1, RolloutStatus.TIMEOUT)
        return await commit(log, epoch, header, chunks, archive, **fields)

    monkeypatch.setattr(batch_writer, "commit_batch", commit_slowly)
    run = await create(stack)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    resolutions(trainer.steps)
    assert late and len(env.plays_of(late[0])) == 1, "it was not played again"


async def test_what_is_dropped_while_the_lease_is_renewed_before_a_commit_is_not_forgotten(
    stack, streams, monkeypatch
) -> None:
    env, _, trainer = await stack.env_server(silent={3}), await stack.inference(), await stack.trainer()
    renew, commit, stale = Lease.renew, batch_writer.commit_batch, []

    async def commit_then_lose(log, epoch, header, chunks, archive, **options) -> bytes:
        written = await commit(log, epoch, header, chunks, archive, **options)
        if header.step == 0:
            stale.append(True)  # from here on, before anything else can run, the lease needs to be renewed
        return written

    async def renew_slowly(self, *, epoch: int = 0) -> bool:
        if stale:
            stale.clear()
            renewed.append(True)
            await until(lambda: env.plays_of(3))
            await let_it_read(stack, run, streams[0], env.plays_of(3)[0], 0, RolloutStatus.QUARANTINED)
        return await renew(self, epoch=epoch)

    renewed: list[bool] = []
    monkeypatch.setattr(Lease, "may_write", property(lambda self: not stale))
    monkeypatch.setattr(Lease, "renew", renew_slowly)
    monkeypatch.setattr(batch_writer, "commit_batch", commit_then_lose)
    run = await create(stack, max_steps=4)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert renewed
    assert resolutions(trainer.steps)[3][1] == "quarantined"


async def test_a_group_that_fails_while_a_batch_is_committed_is_sent_out_again_meanwhile(
    stack, streams, monkeypatch
) -> None:
    env, _, trainer = await stack.env_server(silent={3}), await stack.inference(), await stack.trainer()
    commit, sent = batch_writer.commit_batch, []

    async def commit_slowly(log, epoch, header, chunks, archive, **fields) -> bytes:
        if header.step == 0:
            await until(lambda: env.plays_of(3))
            env.silent.clear()
            for member in range(4):
                await let_it_read(stack, run, streams[0], env.plays_of(3)[0], member, RolloutStatus.TIMEOUT)
            await until(lambda: len(env.plays_of(3)) == 2, what="the next attempt", timeout_s=10)
            sent.append(True)
        return await commit(log, epoch, header, chunks, archive, **fields)

    monkeypatch.setattr(batch_writer, "commit_batch", commit_slowly)
    run = await create(stack, max_steps=4)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    resolutions(trainer.steps)
    assert sent


async def test_nothing_is_sent_out_for_a_step_that_is_being_committed_where_batches_are_on_policy(
    stack, monkeypatch
) -> None:
    """What is played meanwhile would be trained in the next step, with tokens of the version before it."""
    env, *_ = await stack.env_server(), await stack.inference(), await stack.trainer()
    commit, sent = batch_writer.commit_batch, []

    async def commit_slowly(log, epoch, header, chunks, archive, **fields) -> bytes:
        before = len(env.requests)
        await asyncio.sleep(0.5)
        sent.append(len(env.requests) - before)
        return await commit(log, epoch, header, chunks, archive, **fields)

    monkeypatch.setattr(batch_writer, "commit_batch", commit_slowly)
    run = await create(stack, max_steps=3, async_level=0, oversampling_factor=2.0)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    assert sent and not any(sent[:-1]), "the last header closes the run"


async def paused_within_a_group(stack, monkeypatch):
    """Pause a run of whose first group one member is played, and return its trainer, itself, its log and the member."""
    monkeypatch.setattr(loop, "DRAIN_S", 0.2)
    env, _, trainer = await stack.env_server(silent={0}), await stack.inference(), await stack.trainer()
    run = await create(stack, max_steps=100)
    await until(lambda: len(trainer.headers) >= 3)
    log = await log_of(stack, run)
    played = make_rollout(env.plays_of(0)[0], 2, RolloutStatus.OK, 0)
    (await log.append_rollouts([encode_rollout(played)])).require("one member of the group that nobody finishes")
    await call(stack.runs.PauseRun, run_service_pb2.PauseRunRequest(name=run.name))
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    return trainer, run, log, played


async def test_a_run_that_is_cancelled_before_its_groups_are_taken_over_resolves_them_and_keeps_their_rollouts(
    stack, monkeypatch
) -> None:
    _, run, log, played = await paused_within_a_group(stack, monkeypatch)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    assert states(await watch(stack, run))[-1] == "CANCELLED"
    headers, _ = await load_headers(log)
    assert resolutions(headers)[0][1] == "cancelled"
    kept = decode_archive(log.store.get(headers[-1].rollouts_key))
    assert played.seconds in [rollout.seconds for rollout in kept]
    report = await audit_run(log.redis, log.store, prefix=stack.prefix, uid=run.uid)
    assert [v for v in report.violations if not v.check.startswith(("POLICY", "MIRROR"))] == []


async def test_a_run_that_fails_while_its_groups_are_taken_over_resolves_them_and_keeps_their_rollouts(
    stack, monkeypatch
) -> None:
    trainer, run, log, played = await paused_within_a_group(stack, monkeypatch)

    async def fail_meanwhile(self: EnvServers) -> None:
        while True:  # the status is another one once the trainer is assigned again
            trainer.status.error_reason, trainer.status.error_message = "MODEL_LOST", "lost on purpose"
            await asyncio.sleep(0.05)

    monkeypatch.setattr(EnvServers, "wait_for_return", fail_meanwhile)
    await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name=run.name))
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_FAILED))
    headers, _ = await load_headers(log)
    assert resolutions(headers)[0][1] == "run_failed"
    kept = decode_archive(log.store.get(headers[-1].rollouts_key))
    assert played.seconds in [rollout.seconds for rollout in kept]
    report = await audit_run(log.redis, log.store, prefix=stack.prefix, uid=run.uid)
    assert [v for v in report.violations if not v.check.startswith(("POLICY", "MIRROR"))] == []


async def test_a_run_that_fails_while_a_batch_is_committed_ends_behind_that_batch(stack, monkeypatch) -> None:
    _, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    commit = batch_writer.commit_batch

    async def commit_slowly(log, epoch, header, chunks, archive, **fields) -> bytes:
        if header.step == 1:
            trainer.status.error_reason, trainer.status.error_message = "MODEL_LOST", "lost on purpose"
            await asyncio.sleep(2.0)  # the driver has heard of it
        return await commit(log, epoch, header, chunks, archive, **fields)

    monkeypatch.setattr(batch_writer, "commit_batch", commit_slowly)
    run = await create(stack, max_steps=4)
    assert states(await watch(stack, run))[-1] == "FAILED"
    headers, _ = await load_headers(await log_of(stack, run))
    assert [header.step for header in headers] == [0, 1, 2]
    assert {header.writer_epoch for header in headers} == {1}, "nobody had to claim it once more"
    resolutions(headers)


async def test_a_run_whose_log_cannot_be_read_is_not_closed_over_the_gap(stack, monkeypatch, caplog) -> None:
    monkeypatch.setattr(manager, "DAMAGED_PAUSE_S", 0.2)
    _, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    run = await create(stack, max_steps=4)
    await until(lambda: len(trainer.headers) >= 2)
    await call(stack.runs.PauseRun, run_service_pb2.PauseRunRequest(name=run.name))
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    log = await log_of(stack, run)
    key = log.names.batch_header(0)
    lost = log.store.get(key)
    log.store.delete(key)
    await call(stack.runs.ResumeRun, run_service_pb2.ResumeRunRequest(name=run.name))
    await until(lambda: any("is missing, but step" in getattr(record, "error", "") for record in caplog.records))
    assert log.store.head(key) is None, "nothing else is written in its place"
    await until(lambda: is_explained(stack, run, "is missing, but step"))
    log.store.put(key, lost)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED", "it goes on once the object is restored"


async def test_rollouts_are_trimmed_also_where_every_batch_uses_all_that_is_there(stack) -> None:
    _, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    run = await create(stack, max_steps=5, async_level=0)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    rollouts = [decode_rollout(entry.d) for entry in await (await log_of(stack, run)).read("rollouts", count=1000)]
    left = {rollout.ordinal for rollout in rollouts if rollout.purpose is Purpose.TRAIN}
    assert left <= {item.ordinal for item in trainer.steps[4].resolutions}, "older ones are in the archives"
