"""Evaluation runs that end in the middle, and go on: each rollout is archived, and once."""

import json
from collections import Counter
from dataclasses import replace

from millrace.readers.exports.samples import read_samples
from millrace.rollouts.types import Rollout, RolloutError, RolloutStatus
from millrace.rpc.channel import call
from millrace.runlog import Names
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import get, has_state, restart_orchestrator, resume, wipe
from millrace_testing.polling import until

FAILED, SUCCEEDED = run_pb2.RUN_STATE_FAILED, run_pb2.RUN_STATE_SUCCEEDED
CONFIG = {
    "model": {"name": "m"},
    "client": {"base_url": ["http://127.0.0.1:9/v1"]},
    "env": [{"id": "reverse-text", "name": "a"}, {"id": "reverse-text", "name": "b"}],
    "rollout_timeout_s": 5.0,
}


class Broken:
    """What becomes of the rollouts of environment b while it is broken."""

    def __init__(self, status: RolloutStatus) -> None:
        self.status = status

    def __call__(self, rollout: Rollout) -> Rollout:
        if rollout.env != "b" or self.status is RolloutStatus.OK:
            return rollout
        error = RolloutError(type="ValueError", message="broken on purpose")
        return replace(rollout, status=self.status, error=error, samples=(), reward=0.0)


async def create_eval(stack) -> run_pb2.Run:
    request = run_service_pb2.CreateRunRequest(kind=run_pb2.RUN_KIND_EVAL, config_json=json.dumps(CONFIG))
    return (await call(stack.runs.CreateRun, request)).run


def archived(stack, run: run_pb2.Run) -> Counter[tuple[str, int]]:
    """Return how often a good rollout of each task is in what is exported of the run."""
    found = [sample.rollout for sample in read_samples(stack.deps["store"], Names(stack.prefix, run.uid))]
    return Counter((rollout.env, rollout.ordinal) for rollout in found if rollout.status is RolloutStatus.OK)


async def test_what_was_archived_when_the_run_failed_is_neither_played_nor_archived_again(stack) -> None:
    broken = Broken(RolloutStatus.ENV_ERROR)
    env = await stack.env_server(shape=broken)
    run = await create_eval(stack)
    await until(lambda: has_state(stack, run, FAILED))
    assert archived(stack, run) == {("a", ordinal): 1 for ordinal in range(3)}
    broken.status = RolloutStatus.OK
    env.spool.clear()  # the run was over
    await wipe(stack)
    await resume(stack, run)
    await until(lambda: has_state(stack, run, SUCCEEDED))
    assert archived(stack, run) == {(name, ordinal): 1 for name in "ab" for ordinal in range(3)}
    assert Counter(request.env.name for request in env.requests)["a"] == 3


async def test_what_a_predecessor_has_finished_is_archived_when_the_run_fails_before_it_is_read(stack) -> None:
    env = await stack.env_server(shape=Broken(RolloutStatus.ENGINE_LOST))
    run = await create_eval(stack)
    await until(lambda: any(request.env.name == "b" for request in env.requests), what="a is played")
    env.fail_open = "its data set is gone"
    await restart_orchestrator(stack)
    await until(lambda: has_state(stack, run, FAILED))
    assert "its data set is gone" in (await get(stack, run)).error.message
    assert archived(stack, run) == {("a", ordinal): 1 for ordinal in range(3)}
