"""Environments that name an image are played by the env-servers that announce it, and by no other."""

import re

import pytest

from millrace.errors import InvalidSpecError
from millrace.rpc.channel import call
from millrace.v1 import run_pb2, run_service_pb2
from millrace_testing.orchestrator.runs import create, watch
from millrace_testing.polling import until

IMAGE = "registry.example.com/team/own-env:1.2"
ENVS = [{"id": "reverse-text"}, {"id": "own-env", "image": IMAGE}]


async def test_each_environment_is_played_where_its_image_runs(stack) -> None:
    plain = await stack.env_server()
    own = await stack.env_server(worker_id="env-server-own", image=IMAGE)
    await stack.inference(), await stack.trainer()
    events = await watch(stack, await create(stack, env=ENVS))
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
    assert {request.env.id for request in plain.requests} == {"reverse-text"}
    assert {(request.env.id, request.env.image) for request in own.requests} == {("own-env", IMAGE)}


async def test_a_run_whose_image_nobody_runs_is_refused_with_what_to_start(stack) -> None:
    await stack.env_server(image="registry.example.com/team/own-env:1.1")
    with pytest.raises(InvalidSpecError, match=rf"MILLRACE_ENV_IMAGE={re.escape(IMAGE)}") as raised:
        await create(stack, env=ENVS)
    assert raised.value.reason == "ENV_IMAGE_MISSING"
    assert [violation.field for violation in raised.value.violations] == ["orchestrator.env[1].image"]
    assert "registered: 1 with registry.example.com/team/own-env:1.1" in str(raised.value)


async def test_a_run_that_waits_for_its_image_says_so_and_begins_once_it_is_there(stack) -> None:
    """Submitted before any env-server was there: nothing was known that it could be refused for."""
    await stack.inference(), await stack.trainer()
    run = await create(stack, env=ENVS)
    await stack.env_server()

    async def says_so() -> bool:
        answer = await call(stack.runs.ExplainRun, run_service_pb2.ExplainRunRequest(name=run.name))
        return any(f"announces image {IMAGE}; registered: 1 with none" in wait.reason for wait in answer.waits)

    await until(says_so, what="millrace run why names the image")
    await stack.env_server(worker_id="env-server-own", image=IMAGE)
    events = await watch(stack, run)
    assert events[-1].state_changed.new_state == run_pb2.RUN_STATE_SUCCEEDED
