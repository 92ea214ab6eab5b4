"""MCP tool servers, over pipes (v0) and over HTTP (v1), and runtimes; what cannot run is refused at load."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from pydantic import create_model

from millrace.env_server.adapters import runtimes_v1
from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.rollouts.types import RolloutStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("tokenizer_manifest_key"),
]
IMAGE = os.environ.get("MILLRACE_TEST_TASK_IMAGE", "")
"""Of containers for tasks, where there is an engine: set by tests/compose/test_containers.py."""
TURNS = ["user", "assistant", "tool", "assistant"]


def roles(rollout: Any) -> list[str]:
    return [message["role"] for message in json.loads(rollout.messages_json)]


async def test_a_server_over_pipes_answers_the_policy(server: Any) -> None:
    opened = await server.open("tooled-v0")
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    for mode in ("tools", "objects"):  # the arguments as a text of JSON, and as the object itself
        rollout = await server.play_one("tooled-v0", 2, mode=mode)
        assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error
        assert roles(rollout) == TURNS and rollout.num_turns == 2
        assert json.loads(rollout.messages_json)[2]["content"] == "code-2"
        assert sum(int(sample.loss_mask.sum()) for sample in rollout.samples) > 0


async def test_a_server_that_cannot_be_started_is_said_at_load(server: Any) -> None:
    opened = await server.open("tooled-v0", {"command": "/no/such/program"})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    assert "/no/such/program" in opened.error_message and "orchestrator.env.args" in opened.error_remedy


@pytest.mark.parametrize("mode", ["tools", "objects"])
async def test_a_v1_tool_server_answers_the_policy(server: Any, mode: str) -> None:
    """At an endpoint that parses tool calls; with our engines the renderer of the model's family parses them."""
    opened = await server.open("tooled-v1")
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "tools", "is_external": True, "use_train_tasks": True}
    rollout = await server.play_one("tooled-v1", 2, mode=mode, **changes)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error
    assert roles(rollout) == TURNS and rollout.num_turns == 2
    assert server.engine.requests[-1]["tools"][0]["function"]["name"] == "code_of"


async def test_tools_need_a_renderer_that_knows_how_the_model_calls_them(server: Any) -> None:
    await server.open("tooled-v1")
    rollout = await server.play_one("tooled-v1", 1)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "NoToolParser")
    assert "`orchestrator.env.args.renderer`" in rollout.error.message and rollout.is_environment_failure


def no_engine() -> bool:
    return bool(runtimes_v1.problem_of("docker"))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        pytest.param("docker", "needs ", marks=pytest.mark.skipif(not no_engine(), reason="a Docker engine is here")),
        ("prime", "must be 'subprocess' or 'docker'"),
    ],
)
async def test_a_runtime_that_is_not_here_is_refused_at_load(server: Any, kind: str, says: str) -> None:
    opened = await server.open("rev-text-v1", {"env": {"agent": {"runtime": {"type": kind}}}})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    assert f"args.env.agent.runtime.type: {says}" in opened.error_message, opened.error_message


async def test_tasks_that_need_a_container_are_refused_without_one(server: Any) -> None:
    opened = await server.open("contained-v1")
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    wanted = "args.env.agent.runtime.type: must be 'docker': tasks of ContainedTask need a container"
    assert wanted in opened.error_message, opened.error_message


@pytest.mark.skipif(not IMAGE, reason="needs a Docker engine and an image: run by tests/compose/test_containers.py")
async def test_a_task_is_played_in_a_container(server: Any) -> None:
    runtime = {"type": "docker", "image": IMAGE, "workdir": "/"}
    args = {"env": {"agent": {"runtime": runtime}}}
    opened = await server.open("contained-v1", args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    rollouts = [await server.play_one("contained-v1", index, args=args) for index in (1, 2)]
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error
        assert rollout.samples[0].loss_mask.any() and rollout.samples[0].policy_spans, "it could be trained on"
    commands = ["docker", "ps", "--all", "--no-trunc", "--format", "{{.Command}}"]
    left = subprocess.check_output(commands, text=True, timeout=60)
    assert "sleep infinity" not in left, "a rollout's container ends with it"

    args = {"env": {"agent": {"runtime": {**runtime, "image": "millrace/no-such-image:0"}}}}
    opened = await server.open("contained-v1", args)
    assert opened.state == env_service_pb2.ENV_STATE_FAILED, "before any rollout is played"
    assert "args.env.agent.runtime.image: no container of it start" in opened.error_message


async def test_a_tool_server_that_needs_a_container_is_named(server: Any) -> None:
    opened = await server.open("tooled-v1", {"codes": {"runtime": {"type": "prime"}}})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    assert "args (the runtime of tool server ''): must be 'subprocess' or 'docker'" in opened.error_message


async def test_what_is_missing_for_containers_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "needs the command `docker`" in runtimes_v1.problem_of("docker")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(runtimes_v1, "ENGINE_SOCKET", str(tmp_path / "docker.sock"))
    assert f"none answers at {tmp_path}" in runtimes_v1.problem_of("docker")
    assert runtimes_v1.problem_of(runtimes_v1.LOCAL) == ""


@pytest.mark.parametrize("kind", ["podman", "apptainer"])
async def test_a_program_for_containers_is_asked_whether_it_works(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = create_model("Machine", type=(str, kind))  # as 0.4 has it
    monkeypatch.setattr(runtimes_v1, "AgentConfig", create_model("Role", runtime=(machine, ...)))
    monkeypatch.setattr(runtimes_v1, "runtime_is_local", lambda config: True)
    assert f"needs the command `{kind}` where the env-server runs" in runtimes_v1.problem_of(kind)
    program = tmp_path / kind
    program.write_text("#!/bin/sh\necho first >&2\necho 'no user namespaces' >&2\nexit 125\n")
    program.chmod(0o755)
    assert f"`{kind} version` fails there: no user namespaces" in runtimes_v1.problem_of(kind)
    program.write_text("#!/bin/sh\nexit 0\n")
    assert runtimes_v1.problem_of(kind) == ""
