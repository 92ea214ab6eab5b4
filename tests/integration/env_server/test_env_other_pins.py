"""Other releases of `verifiers` than ours, in virtual environments of their own, through the whole env-server."""

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.rollouts.types import RolloutStatus
from millrace_testing import chosen_tasks
from millrace_testing.repository import REPOSITORY

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("tokenizer_manifest_key"),
]

FIXTURES = Path(__file__).parents[2] / "fixtures" / "environments"

# An environment of the v0 API that asks for nothing else.
OLD_STYLE = "import verifiers as vf\n\ndef load_environment() -> vf.Environment:\n    return vf.SingleTurnEnv()\n"


@pytest.fixture(scope="module")
def pins(pinned_pythons: dict[str, str]) -> dict[str, str]:
    """Return the interpreters by release, which find the environments of our fixtures."""
    for python in pinned_pythons.values():
        [site] = Path(python).parents[1].glob("lib/python*/site-packages")
        paths = sorted(str(each) for each in FIXTURES.iterdir() if each.is_dir())
        (site / "old_style.py").write_text(OLD_STYLE)
        (site / "fixtures.pth").write_text("\n".join([*paths, ""]))
    return pinned_pythons


async def opened(server: Any, env_id: str, python: str, **args: Any) -> tuple[Any, dict[str, Any]]:
    args["python"] = python
    return await server.open(env_id, args), args


@pytest.mark.parametrize("release", ["0.1", "0.3"])
async def test_v0_plays_with_exact_tokens_and_spans(server: Any, pins: dict[str, str], release: str) -> None:
    answer, args = await opened(server, "faulty-v0", pins[release])
    assert answer.state == env_service_pb2.ENV_STATE_READY and answer.api == "v0", answer
    rollout = await server.play_one("faulty-v0", 0, args=args)
    assert rollout.status is RolloutStatus.OK, rollout.error
    [sample] = rollout.samples
    assert rollout.num_turns == 2 and sample.loss_mask.sum() > 0
    versions = [(span.lineage, span.version) for span in sample.policy_spans]
    assert versions == [(0, 3), (0, 4)] * 2
    assert set(sample.inference_logprobs[sample.loss_mask == 1].tolist()) == {-0.5}
    failed = await server.play_one("faulty-v0", 1, args=args)
    assert (failed.status, failed.error.type) == (RolloutStatus.ENV_ERROR, "RewardError"), failed.error


async def test_v0_of_0_1_compares_the_members_of_a_group(server: Any, pins: dict[str, str]) -> None:
    answer, args = await opened(server, "faulty-v0", pins["0.1"], kind="group")
    assert answer.state == env_service_pb2.ENV_STATE_READY and answer.requires_group, answer
    rollouts = await server.play(server.request("faulty-v0", 0, args=args, size=2))
    assert [rollout.status for rollout in rollouts] == [RolloutStatus.OK] * 2, rollouts[0].error
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0]


async def test_v0_of_0_1_is_sampled_as_its_environment_was_made_and_says_what_it_cut(
    server: Any, pins: dict[str, str]
) -> None:
    made = {"modes": ["ok"], "sampling_args": {"temperature": 0.5, "extra_body": {"top_k": 3}}, "max_seq_len": 60}
    answer, args = await opened(server, "faulty-v0", pins["0.1"], **made)
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    rollout = await server.play_one("faulty-v0", 0, args=args)
    assert rollout.status is RolloutStatus.OK, rollout.error
    own = {(each.temperature, each.truncation.top_k) for sample in rollout.samples for each in sample.own_sampling}
    assert own == {(0.5, 3)} and rollout.metrics["max_seq_len_cut_tokens"] > 0


async def test_v0_of_0_1_turns_no_reward_that_goes_wrong_into_0(server: Any, pins: dict[str, str]) -> None:
    kinds = ["raises", "none", "calls", "adds", "swaps", "rank", "turn_last", "fine"]
    answer, args = await opened(server, "odd-rewards", pins["0.1"], kinds=kinds)
    assert answer.state == env_service_pb2.ENV_STATE_READY and answer.requires_group, answer
    played = await server.play(*(server.request("odd-rewards", 4 * at, args=args, size=2) for at in range(len(kinds))))
    found = dict(zip(kinds, zip(played[::2], played[1::2], strict=True), strict=True))
    for kind in kinds[:5]:
        assert {rollout.error.type for rollout in found[kind]} == {"RewardError"}, kind
    assert [rollout.reward for rollout in found["rank"]] == [0.0, 1.0]
    assert not any(rollout.has_turn_rewards for rollout in found["rank"])
    turns = [[turn.reward for sample in rollout.samples for turn in sample.turns] for rollout in found["turn_last"]]
    assert turns == [[0.0, 0.5]] * 2
    assert found["fine"][0].metrics["depth"] == 1.5


@pytest.mark.parametrize("release", ["0.3", "0.4"])
async def test_v1_plays_with_exact_tokens_and_spans(server: Any, pins: dict[str, str], release: str) -> None:
    """0.3 is 0.3.1 with the newest of everything else that pip takes for it and for what the refusal names."""
    answer, args = await opened(server, "rev-text-v1", pins[release], num_examples=8)
    assert answer.state == env_service_pb2.ENV_STATE_READY and answer.api == "v1", answer
    rollout = await server.play_one("rev-text-v1", 2, args=args)
    assert rollout.status is RolloutStatus.OK, rollout.error
    [sample] = rollout.samples
    completion = server.engine.generated_ids
    assert sample.token_ids[-len(completion) :].tolist() == completion
    assert [(span.version, span.end - span.start) for span in sample.policy_spans] == [(3, 1), (4, len(completion) - 1)]


@pytest.mark.parametrize("mode", ["toolong", "tiny"])
async def test_v1_of_0_4_says_that_a_prompt_does_not_fit(server: Any, pins: dict[str, str], mode: str) -> None:
    answer, args = await opened(server, "rev-text-v1", pins["0.4"], num_examples=8)
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    rollout = await server.play_one("rev-text-v1", 2, args=args, mode=mode)
    assert (rollout.status, rollout.error.type) == (RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong"), rollout.error


async def test_v1_of_0_4_scores_a_conversation_that_outgrows_the_context_as_it_stands(
    server: Any, pins: dict[str, str]
) -> None:
    """0.4 by itself fails it, and scores nothing."""
    answer, args = await opened(server, "talks-v1", pins["0.4"])
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    rollout = await server.play_one("talks-v1", 0, args=args, mode="fills")
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert rollout.num_turns > 1 and rollout.reward == rollout.num_turns and rollout.samples
    assert rollout.stop_condition == "context_length" and rollout.is_truncated


@pytest.mark.parametrize("rule", [{"type": "TaskError"}, {"message": "attempt 1"}])
async def test_v1_of_0_4_repeats_by_rules(server: Any, pins: dict[str, str], rule: dict[str, Any]) -> None:
    """An attempt that ended well after others has their errors, which fail nothing."""
    retries = {"rules": [{**rule, "max_retries": 1}]}
    answer, args = await opened(server, "talks-v1", pins["0.4"], env={"player": {"retries": retries}})
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    rollout = await server.play_one("talks-v1", 1, args=args)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error
    failed = await server.play_one("talks-v1", 2, args=args)
    assert failed.error is not None and failed.error.message.endswith("attempt 2 failed"), failed.error


async def test_select_chooses_what_0_4_chooses(pins: dict[str, str]) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "services")}
    compared = await asyncio.create_subprocess_exec(
        pins["0.4"],
        str(chosen_tasks.__file__),
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await compared.communicate()
    assert compared.returncode == 0 and int(said) > 200, said.decode()


@pytest.mark.parametrize("mode", ["tools", "objects"])
async def test_v1_of_0_4_calls_the_tools_of_mcp_servers(server: Any, pins: dict[str, str], mode: str) -> None:
    answer, args = await opened(server, "tooled-v1", pins["0.4"])
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "tools", "is_external": True, "use_train_tasks": True}
    rollout = await server.play_one("tooled-v1", 2, args=args, mode=mode, **changes)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0 and rollout.num_turns == 2, rollout.error


async def test_v1_of_0_4_may_deny_a_call_before_it_is_made(server: Any, pins: dict[str, str]) -> None:
    answer, args = await opened(server, "tooled-v1", pins["0.4"], denies=True)
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "denied", "is_external": True, "use_train_tasks": True}
    rollout = await server.play_one("tooled-v1", 2, args=args, mode="tools", **changes)
    assert rollout.status is RolloutStatus.OK and rollout.num_turns == 2, (rollout.error, rollout.stop_condition)
    said = [message["content"] for message in json.loads(rollout.messages_json) if message["role"] == "tool"]
    assert said == ["it is not allowed"] and rollout.reward == 0.0


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("podman", "needs the command `podman` where the env-server runs"),
        ("apptainer", "needs the command `apptainer` where the env-server runs"),
        ("e2b", "must be 'subprocess', 'docker', 'podman' or 'apptainer': 'e2b' is a sandbox of a provider"),
    ],
)
async def test_a_runtime_of_0_4_that_is_not_here_is_refused_with_its_reason(
    server: Any, pins: dict[str, str], kind: str, said: str
) -> None:
    if shutil.which(kind):
        pytest.skip(f"{kind} is here")
    answer, _ = await opened(server, "rev-text-v1", pins["0.4"], env={"agent": {"runtime": {"type": kind}}})
    assert answer.state == env_service_pb2.ENV_STATE_FAILED
    assert f"args.env.agent.runtime.type: {said}" in answer.error_message, answer.error_message


@pytest.mark.parametrize(
    ("env_id", "release", "said"),
    [
        ("old-style", "0.4", "cannot be imported with verifiers 0.4.0"),
        ("rev-text-v1", "0.1", "cannot be imported with verifiers 0.1.14"),
    ],
)
async def test_the_other_generation_is_refused_by_a_sentence(
    server: Any, pins: dict[str, str], env_id: str, release: str, said: str
) -> None:
    answer, _ = await opened(server, env_id, pins[release])
    assert answer.state == env_service_pb2.ENV_STATE_FAILED
    assert said in answer.error_message and "v0 with 0.1.14 to 0.3.1 and v1 with 0.3.1 and 0.4" in answer.error_message
