"""What rae compares with follows from the log: after an orchestrator's end, and in a fork, baselines are the same."""

from dataclasses import replace

import pytest

from millrace.internal.v1 import batch_pb2
from millrace.orchestrator.drive.batch_writer import decode_state
from millrace.rollouts.types import Purpose, Rollout, Trace
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import create, log_of, restart_orchestrator, watch
from millrace_testing.polling import until
from millrace_testing.runlog.committed import load_headers


def self_play(rollout: Rollout) -> Rollout:
    """Return a game of two, which white wins by as much as the task and the member say."""
    if rollout.purpose is not Purpose.TRAIN:
        return rollout
    score = (rollout.task_index * 7 + rollout.member * 3) % 11 / 10
    traces = tuple(Trace(agent=name, reward=r, num_samples=1) for name, r in (("white", score), ("black", 1 - score)))
    return replace(rollout, samples=rollout.samples[:1] * 2, reward=0.5, traces=traces)


async def headers_of(stack, run) -> list[batch_pb2.BatchHeader]:
    return (await load_headers(await log_of(stack, run)))[0]


async def baselines(stack, run) -> dict[int, dict]:
    headers = await headers_of(stack, run)
    return {header.step: dict(decode_state(header.orchestrator_state).baselines) for header in headers}


async def _has_step(stack, run, step: int) -> bool:
    return any(header.step >= step for header in await headers_of(stack, run))


async def succeeded(stack, run) -> None:
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED, events[-1]


@pytest.mark.long
async def test_a_successor_and_a_fork_compare_with_what_an_undisturbed_run_compares_with(stack) -> None:
    await stack.env_server(shape=self_play, delay_s=0.02)
    await stack.inference()
    await stack.trainer()
    options = {"max_steps": 6, "async_level": 0, "eval": None, "algo": {"type": "rae", "decay": 0.8}}
    undisturbed = await create(stack, run_id="undisturbed", **options)
    await succeeded(stack, undisturbed)
    expected = await baselines(stack, undisturbed)
    assert expected[0] != expected[5] and set(expected[5]["reverse-text"]) == {"white", "black"}

    killed = await create(stack, run_id="killed", **options)
    for step in (1, 3):
        await until(lambda step=step: _has_step(stack, killed, step))
        await restart_orchestrator(stack)
    await succeeded(stack, killed)
    assert await baselines(stack, killed) == expected

    request = run_service_pb2.ForkRunRequest(name=killed.name, step=3, run_id="forked")
    forked = (await call(stack.runs.ForkRun, request)).run
    await succeeded(stack, forked)
    assert await baselines(stack, forked) == expected
