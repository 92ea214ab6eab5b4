"""ForkRun and AuditRun over gRPC."""

import pytest

from millrace.errors import AlreadyExistsError, InvalidSpecError, InvalidStateError, NotFoundError
from millrace.rpc.channel import call
from millrace.runlog import Names
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import create, watch


async def fork(stack, run, step: int = 0, **fields) -> run_pb2.Run:
    request = run_service_pb2.ForkRunRequest(name=run.name, step=step, **fields)
    return (await call(stack.runs.ForkRun, request)).run


async def test_a_fork_is_a_run_with_a_parent(stack) -> None:
    parent = await create(stack, run_id="parent")
    forked = await fork(stack, parent, labels={"why": "test"})
    assert forked.name.startswith("runs/parent-at-0-") and dict(forked.labels) == {"why": "test"}
    assert forked.parent == run_pb2.RunParent(name="runs/parent", uid=parent.uid, step=0)
    assert forked.config_json == parent.config_json and forked.state == run_pb2.RUN_STATE_QUEUED
    shown = (await call(stack.runs.GetRun, run_service_pb2.GetRunRequest(name=forked.name))).run
    assert shown.parent == forked.parent and not parent.HasField("parent")


async def test_a_repeated_request_returns_the_first_answer(stack) -> None:
    parent = await create(stack, run_id="parent")
    first = await fork(stack, parent, request_id="r1")
    assert (await fork(stack, parent, request_id="r1")).uid == first.uid
    with pytest.raises(AlreadyExistsError) as raised:
        await fork(stack, await create(stack, run_id="other"), request_id="r1")
    assert raised.value.reason == "REQUEST_ID_REUSED"
    with pytest.raises(AlreadyExistsError) as raised:
        await fork(stack, parent, run_id="parent")
    assert raised.value.reason == "RUN_NAME_TAKEN"


async def test_wrong_requests(stack) -> None:
    parent = await create(stack, run_id="parent")
    with pytest.raises(NotFoundError):
        await fork(stack, run_pb2.Run(name="runs/nobody"))
    with pytest.raises(InvalidStateError, match="'parent' cannot be forked at step 1: it keeps steps 0 to 0") as raised:
        await fork(stack, parent, 1)
    assert raised.value.metadata == {"oldest": "0", "newest": "0"}
    with pytest.raises(InvalidSpecError, match="run_id"):
        await fork(stack, parent, run_id="No")
    with pytest.raises(InvalidSpecError, match="config_json"):
        await fork(stack, parent, config_json="[")


async def test_a_fork_of_an_ended_run_trains_on(stack) -> None:
    await stack.env_server()
    await stack.inference()
    trainer = await stack.trainer()
    parent = await create(stack, run_id="parent")
    await watch(stack, parent)
    num_parent = len(trainer.headers)
    forked = await fork(stack, parent, 2)
    events = await watch(stack, forked)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    own, theirs = trainer.headers[num_parent:], trainer.headers[:num_parent]
    assert [header.step for header in own] == [0, 1, 2, 3]
    assert [list(header.resolutions) for header in own[:2]] == [list(header.resolutions) for header in theirs[:2]]
    assert own[2].writer_epoch == 1 and own[2].previous_chain_hash != theirs[2].previous_chain_hash
    response = await call(stack.runs.AuditRun, run_service_pb2.AuditRunRequest(name=forked.name))
    found = {finding.check for finding in response.report.violations}
    # The fake trainer's manifests name nothing but a digest, and it reports no steps; all else is as it should be.
    assert found == {"POLICY_CORRUPT", "STEP_NOT_REPORTED"}
    assert response.report.is_closed and response.report.num_steps == 3


async def test_an_audit_names_what_is_wrong(stack) -> None:
    run = await create(stack, run_id="parent")
    request = run_service_pb2.AuditRunRequest(name=run.name)
    report = (await call(stack.runs.AuditRun, request)).report
    assert (report.run, report.run_uid, list(report.violations)) == (run.name, run.uid, [])
    stack.deps["store"].put(Names(stack.prefix, run.uid).batch_header(1), b"\xff")
    report = (await call(stack.runs.AuditRun, request)).report
    assert {finding.check for finding in report.violations} == {"HEADER_MISSING", "HEADER_CORRUPT"}
    with pytest.raises(NotFoundError):
        await call(stack.runs.AuditRun, run_service_pb2.AuditRunRequest(name="runs/nobody"))
