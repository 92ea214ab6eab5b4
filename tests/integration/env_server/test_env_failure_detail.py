"""What a failed rollout says of its cause: the environment's own lines, and whether the environment is to blame."""

from typing import Any

import pytest

from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.rollouts.types import RolloutStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("tokenizer_manifest_key"),
]

# By generation: the environment, and where its modes are among its tasks.
V0 = {"reward_raises": 1, "reward_nan": 2, "setup_vferror": 3, "setup_raises": 4, "resp_raises": 5, "exit": 8}
V1 = {"setup_raises": 1, "stop_raises": 2, "reward_raises": 3, "image": 12, "parts": 13}


@pytest.mark.parametrize(
    ("env", "mode", "text", "frames"),
    [
        ("faulty-v0", "reward_raises", "ValueError: reward bug", 'in one: raise ValueError("reward bug")'),
        ("faulty-v0", "setup_vferror", "infra down", 'in setup_state: raise vf.InfraError("infra down")'),
        ("faulty-v0", "setup_raises", "plain bug", 'in setup_state: raise ValueError("plain bug in setup_state")'),
        ("faulty-v0", "resp_raises", "plain bug", 'in env_response: raise RuntimeError("plain bug in env_response")'),
        ("faulty-v1", "setup_raises", "ValueError: plain bug", 'in setup: raise ValueError("plain bug in setup")'),
        ("faulty-v1", "stop_raises", "ValueError: bug in stop", 'in one_turn: raise ValueError("bug in stop")'),
        ("faulty-v1", "reward_raises", "ValueError: reward bug", 'in one: raise ValueError("reward bug")'),
    ],
)
async def test_it_names_the_environments_own_lines_and_no_others(
    server: Any, env: str, mode: str, text: str, frames: str
) -> None:
    await server.open(env)
    rollout = await server.play_one(env, (V0 if env == "faulty-v0" else V1)[mode])
    assert rollout.status is RolloutStatus.ENV_ERROR and text in rollout.error.message
    lines = rollout.error.frames.splitlines()
    assert lines[-1].endswith(frames), rollout.error.frames
    assert all(line.startswith(f"{env.replace('-', '_')}.py:") for line in lines), (
        "nothing of ours, nothing of verifiers"
    )
    assert rollout.is_environment_failure


async def test_a_reward_that_is_no_number_names_its_function(server: Any) -> None:
    await server.open("faulty-v0")
    rollout = await server.play_one("faulty-v0", V0["reward_nan"])
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "NonFiniteReward")
    assert "the reward is nan (one = nan)" in rollout.error.message and rollout.is_environment_failure


@pytest.mark.parametrize(
    ("mode", "status", "counts"),
    [
        ("500", RolloutStatus.MODEL_ERROR, False),
        ("503", RolloutStatus.ENGINE_LOST, False),
        ("reset", RolloutStatus.ENGINE_LOST, False),
        ("badjson", RolloutStatus.MODEL_ERROR, True),
        ("refused", RolloutStatus.MODEL_ERROR, True),
    ],
)
@pytest.mark.parametrize("env", ["faulty-v0", "faulty-v1"])
async def test_what_an_engine_did_is_not_the_environments_failure(
    server: Any, env: str, mode: str, status: RolloutStatus, counts: bool
) -> None:
    """But an engine that refuses the request (400), or cannot be understood, refuses it every time."""
    await server.open(env)
    rollout = await server.play_one(env, 0, mode=mode)
    assert rollout.status is status, rollout.error
    assert rollout.is_environment_failure is counts, rollout.error


async def test_a_store_that_lacks_the_tokenizer_is_not_the_environments_failure(server: Any) -> None:
    await server.open("faulty-v0")
    rollout = await server.play_one("faulty-v0", 0, tokenizer_manifest_key="test/nowhere/manifest.json")
    assert rollout.status is RolloutStatus.ENV_ERROR and not rollout.is_environment_failure


async def test_an_environment_that_ends_its_worker_is_to_blame(server: Any) -> None:
    await server.open("faulty-v0", {"modes": ["exit", "ok"]})
    rollout = await server.play_one("faulty-v0", 0, args={"modes": ["exit", "ok"]})
    assert rollout.status is RolloutStatus.WORKER_DIED and "exit code 17" in rollout.error.message
    assert rollout.is_environment_failure


@pytest.mark.parametrize(
    ("env", "task", "args"),
    [
        ("faulty-v0", 0, {"kind": "image", "modes": ["ok"]}),
        pytest.param("faulty-v0", 0, {"kind": "image", "modes": ["ok"], "renderer": "default"}, marks=pytest.mark.long),
        pytest.param("faulty-v0", 0, {"modes": ["image_reply"]}, marks=pytest.mark.long),
        ("faulty-v1", V1["image"], {}),
    ],
    ids=["v0", "v0-renderer", "v0-second-turn", "v1"],
)
async def test_an_image_is_refused_before_it_meets_the_template(
    server: Any, env: str, task: int, args: dict[str, Any]
) -> None:
    await server.open(env, args)
    asked = len(server.engine.requests)
    rollout = await server.play_one(env, task, args=args)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.ENV_ERROR, "NotTextError"), rollout.error
    assert "content part 'image_url'" in rollout.error.message and "--client.base-url" in rollout.error.message
    assert rollout.is_environment_failure and rollout.samples == ()
    assert len(server.engine.requests) - asked == (1 if "image_reply" in str(args) else 0)


@pytest.mark.parametrize(
    ("env", "task", "args"),
    [
        pytest.param("faulty-v0", 1, {"kind": "image", "modes": ["ok", "image"]}, marks=pytest.mark.long),
        ("faulty-v1", V1["image"], {}),
    ],
    ids=["v0", "v1"],
)
async def test_a_task_with_an_image_is_refused_when_the_environment_is_loaded(
    server: Any, env: str, task: int, args: dict[str, Any]
) -> None:
    """Where it is played at our engines alone; a run's environment is."""
    spec = server.spec(env, args)
    spec.is_text_only = True
    opened = await server.open_spec(spec)
    assert opened.state == env_service_pb2.ENV_STATE_FAILED
    assert opened.error_type == "InvalidSpecError"
    said = f"orchestrator.env.id: its training task {task}: a message of the environment has a content part 'image_url'"
    assert said in opened.error_message and "--client.base-url" in opened.error_message, opened.error_message


async def test_an_endpoint_of_others_is_sent_the_image(server: Any) -> None:
    args = {"kind": "image", "modes": ["ok"]}
    await server.open("faulty-v0", args)
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "images", "is_external": True}
    rollout = await server.play_one("faulty-v0", 0, args=args, use_train_tasks=True, **changes)
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert server.engine.requests[-1]["messages"][0]["content"][1]["type"] == "image_url"


async def test_text_in_parts_is_played_as_one_text(server: Any, tokenizer: Any) -> None:
    await server.open("faulty-v1")
    rollout = await server.play_one("faulty-v1", V1["parts"])
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert "he\nllo" in tokenizer.decode(rollout.samples[0].token_ids.tolist())
