"""Pause and resume of a run: nothing of it is lost, its workers are free meanwhile."""

import asyncio
import itertools

import pytest

from millrace.errors import InvalidStateError
from millrace.internal.v1 import batch_pb2
from millrace.orchestrator import workers
from millrace.orchestrator.drive import loop
from millrace.orchestrator.intents import DesiredState
from millrace.rpc.channel import call
from millrace.runlog import Names
from millrace.runlog.records.numbered import read_intents
from millrace.runlog.records.run_record import RunRecord
from millrace.runlog.retention import RetentionRule
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import (
    create,
    get,
    has_state,
    log_of,
    pause,
    resolutions,
    resume,
    states,
    watch,
)
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers


async def paused_mid_run(stack):
    """A run that is paused after its first batch, its trainer and its env-server."""
    env, _, trainer = await stack.env_server(), await stack.inference(), await stack.trainer()
    trainer.hold.clear()
    run = await create(stack, max_steps=4)
    await until(lambda: len(trainer.headers) >= 1)
    await pause(stack, run, "the GPUs are needed")
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    trainer.hold.set()
    return run, trainer, env


async def test_a_paused_run_gives_its_workers_back_and_goes_on_from_its_log(stack) -> None:
    run, trainer, _ = await paused_mid_run(stack)
    await until(lambda: trainer.status.run_uid == "", what="the trainer lets go")
    other = await create(stack, run_id="other")
    assert states(await watch(stack, other))[-1] == "SUCCEEDED", "its trainer is free for another run"
    assert (await get(stack, run)).state == run_pb2.RUN_STATE_PAUSED
    trainer.headers.clear()
    await resume(stack, run)
    events = await watch(stack, run)
    told = [state for state in states(events) if state != "QUEUED"]  # until the end of the other run is sealed
    assert told == ["STARTING", "RUNNING", "PAUSED", "STARTING", "RUNNING", "STOPPING", "SUCCEEDED"]
    assert "paused on request: the GPUs are needed" in [event.state_changed.reason for event in events]
    headers, _ = await load_headers(await log_of(stack, run))
    assert [header.step for header in headers] == [0, 1, 2, 3, 4]
    resolutions(headers)


async def test_retention_is_switched_on_as_a_run_is_resumed(stack) -> None:
    """The stored config stays: the intent says what counts from here on, to every later driver."""
    run, _, _ = await paused_mid_run(stack)
    for asked in ({"retain_batches": 1}, {"retain_policies": 3}, {"retain_batches": 1}):
        request = run_service_pb2.ResumeRunRequest(name=run.name, **asked)
        await call(stack.runs.ResumeRun, request, timeout_s=5)
    names = Names(stack.prefix, run.uid)
    asked = [
        each.payload["retention"] for each in await read_intents(stack.deps["store"], names) if each.kind == "resume"
    ]
    assert asked == [{"batches": 1}, {"policies": 3}], "what is asked for again is no other intent"
    desired = DesiredState().after(await read_intents(stack.deps["store"], names))
    assert desired.retention == {"batches": 1, "policies": 3} and not desired.is_paused
    record = RunRecord.decode(stack.deps["store"].get(names.run_json), where="it")
    rule = RetentionRule.of(record.settings, desired.retention)
    assert (rule.batches, rule.policies) == (1, 3) and not RetentionRule.of(record.settings)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_what_does_not_finish_before_the_pause_is_played_again_after_it(stack, monkeypatch) -> None:
    monkeypatch.setattr(loop, "DRAIN_S", 0.5)
    env, _, _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: len(env.tasks) >= 2)
    await pause(stack, run)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    assert not env.tasks, "nothing is played for a paused run"
    env.go_on.set()
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"
    headers, _ = await load_headers(await log_of(stack, run))
    assert resolutions(headers)[0][0] == batch_pb2.ORDINAL_OUTCOME_TRAINED


async def test_groups_that_finish_in_time_are_not_played_again(stack) -> None:
    env, _, _ = await stack.env_server(), await stack.inference(), await stack.trainer()
    env.go_on.clear()
    run = await create(stack)
    await until(lambda: len(env.tasks) >= 2)
    await pause(stack, run)
    env.go_on.set()
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    played = [request.ordinal for request in env.requests if not request.eval_id]
    await resume(stack, run)
    await watch(stack, run)
    assert all(len(env.plays_of(ordinal)) == 1 for ordinal in played), "the log held them across the pause"


async def test_a_pause_lasts_across_a_restart_of_the_orchestrator(stack) -> None:
    run, trainer, _ = await paused_mid_run(stack)
    port = int(stack.address.rpartition(":")[2])
    await stack.kill_orchestrator()
    trainer.headers.clear()
    await stack.start_orchestrator(port)
    second = await create(stack, run_id="second")  # it is claimed, so the paused run was looked at and left alone
    assert states(await watch(stack, second))[-1] == "SUCCEEDED"
    assert (await get(stack, run)).state == run_pb2.RUN_STATE_PAUSED
    await resume(stack, run)
    assert states(await watch(stack, run))[-1] == "SUCCEEDED"


async def test_a_queued_run_can_be_paused_and_queued_again_without_any_worker(stack) -> None:
    run = await create(stack)
    await pause(stack, run)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_PAUSED))
    await resume(stack, run)
    await until(lambda: has_state(stack, run, run_pb2.RUN_STATE_QUEUED))
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    assert states(await watch(stack, run)) == [
        "PAUSED",
        "QUEUED",
        "STARTING",
        "RUNNING",
        "STOPPING",
        "SUCCEEDED",
    ]


async def test_a_paused_run_can_be_cancelled(stack, monkeypatch) -> None:
    monkeypatch.setattr(workers, "LEASE_S", 2.0)
    run, trainer, _ = await paused_mid_run(stack)
    await stack.kill_worker(trainer.worker_id)
    await call(stack.runs.CancelRun, run_service_pb2.CancelRunRequest(name=run.name))
    assert states(await watch(stack, run))[-1] == "CANCELLED", "without a trainer, too"
    headers, _ = await load_headers(await log_of(stack, run))
    assert headers[-1].outcome == batch_pb2.RUN_OUTCOME_CANCELLED
    resolutions(headers)
    with pytest.raises(InvalidStateError, match="has already ended as CANCELLED; nothing is left to resume"):
        await resume(stack, run)


async def test_pausing_twice_is_one_intent_and_pausing_an_ended_run_is_an_error(stack) -> None:
    run = await create(stack)
    await asyncio.gather(pause(stack, run), resume(stack, run))
    await pause(stack, run)
    await pause(stack, run)
    kinds = [intent.kind for intent in await (await log_of(stack, run)).read_intents()]
    assert kinds[-1] == "pause" and not any(a == b for a, b in itertools.pairwise(kinds))
    await resume(stack, run)
    await resume(stack, run)
    await stack.env_server()
    await stack.inference()
    await stack.trainer()
    await watch(stack, run)
    with pytest.raises(InvalidStateError, match="has already ended as SUCCEEDED; nothing is left to pause"):
        await pause(stack, run)
