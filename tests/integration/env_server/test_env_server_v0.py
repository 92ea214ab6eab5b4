"""v0 environments: our own two, and one test per row of the failure table."""

import json
import re
import time
from typing import Any

import numpy as np
import pytest

from millrace.errors import InvalidSpecError
from millrace.internal.v1 import env_service_pb2, play_pb2, rollout_pb2
from millrace.orchestrator.play.env_servers import PLAY_TIMEOUT_S
from millrace.rollouts.types import OWN_SAMPLING, PolicySpan, Purpose, Rollout, RolloutStatus
from millrace.rpc.channel import call
from millrace_testing.patience import patient
from millrace_testing.polling import until

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

MODES = [
    "ok",
    "reward_raises",
    "reward_nan",
    "setup_vferror",
    "setup_raises",
    "resp_raises",
    "block_short",
    "block_forever",
    "exit",
    "sleep",
    "ignore_cancel",
    "long_sleep",
    "exit_once",
    "tool_error",
]
OK = MODES.index("ok")


async def faulty(server: Any, task: str, /, **changes: Any) -> Rollout:
    """Play the task of faulty_v0 with that mode."""
    await server.open("faulty-v0", changes.get("args"))
    return await server.play_one("faulty-v0", MODES.index(task), **changes)


def assert_failed(rollout: Rollout, status: RolloutStatus, error_type: str, text: str = "") -> None:
    assert (rollout.status, rollout.error.type) == (status, error_type), rollout.error
    assert text in rollout.error.message
    assert rollout.samples == ()
    assert rollout.reward == 0.0


async def test_reverse_text_plays_a_group_with_exact_tokens(server: Any) -> None:
    opened = await server.open("reverse-text", {"num_train": 20, "num_eval": 5})
    assert (opened.api, opened.train.num_tasks, opened.eval.num_tasks) == ("v0", 20, 5)
    assert opened.train.digest != opened.eval.digest and not opened.requires_group
    request = server.request("reverse-text", 3, args={"num_train": 20, "num_eval": 5}, size=4)
    rollouts = await server.play(request)
    assert [rollout.member for rollout in rollouts] == [0, 1, 2, 3]
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0 and rollout.num_turns == 1
        assert rollout.env_server == "env-server-test" and rollout.planned_step == 7 and rollout.group_size == 4
        [prompt, reply] = json.loads(rollout.messages_json)
        assert reply["content"] == prompt["content"][::-1] == json.loads(rollout.task_json)["answer"]
        [sample] = rollout.samples
        prompt_ids = server.encode_chat([prompt])
        completion_ids = [*reply["content"].encode(), 257]
        assert sample.token_ids.tolist() == prompt_ids + completion_ids
        assert sample.loss_mask.tolist() == [0] * len(prompt_ids) + [1] * len(completion_ids)
        assert np.allclose(sample.inference_logprobs[len(prompt_ids) :], -0.5)
        assert sample.policy_spans == (
            PolicySpan(lineage=0, version=3, start=len(prompt_ids), end=len(prompt_ids) + 1),
            PolicySpan(lineage=0, version=4, start=len(prompt_ids) + 1, end=sample.num_tokens),
        )
    assert len({rollout.task_id for rollout in rollouts}) == 1


async def test_eval_plays_held_out_tasks(server: Any) -> None:
    args = {"num_train": 20, "num_eval": 5}
    await server.open("reverse-text", args)
    purpose = rollout_pb2.PURPOSE_EVAL
    held_out, train = await server.play(
        server.request("reverse-text", 1, args=args, purpose=purpose, eval_id="e1"),
        server.request("reverse-text", 1, args=args, purpose=purpose, eval_id="e1", use_train_tasks=True),
    )
    assert held_out.purpose is Purpose.EVAL and held_out.eval_id == "e1"
    assert held_out.task_id != train.task_id


async def test_two_turns_and_a_tool_are_one_exact_sample(server: Any) -> None:
    await server.open("code-lookup")
    rollout = await server.play_one("code-lookup", 0, mode="lookup")
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0 and rollout.num_turns == 2
    [sample] = rollout.samples
    messages = json.loads(rollout.messages_json)
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    whole = [*server.encode_chat(messages[:3]), *messages[3]["content"].encode(), 257]
    assert sample.token_ids.tolist() == whole
    # Sampled: one letter and its end, then two letters and their end.
    assert int(sample.loss_mask.sum()) == 2 + 3
    sampled = sample.token_ids[sample.loss_mask == 1].tolist()
    assert sampled == [*messages[1]["content"].encode(), 257, *messages[3]["content"].encode(), 257]
    assert [span.version for span in sample.policy_spans] == [3, 4, 3, 4]
    [said] = sample.roles
    first, second = np.flatnonzero(np.diff(sample.loss_mask.astype(int), append=0) == -1)[0] + 1, said.end
    assert (said.role, said.start) == ("user", first) and sample.loss_mask[second] == 1
    assert messages[2]["content"].encode() in bytes(each % 256 for each in sample.token_ids[first:second])


async def test_turns_that_were_retokenized_are_split(server: Any) -> None:
    await server.open("code-lookup")
    rollout = await server.play_one("code-lookup", 0, mode="retokenized")
    assert rollout.status is RolloutStatus.OK
    assert len(rollout.samples) == 2


async def test_a_template_that_strips_thoughts_begins_a_sample_per_turn(server: Any) -> None:
    """The second turn's prompt has lost the first one's thought, so it is no continuation of what was sampled."""
    await server.open("code-lookup")
    kept = await server.play_one("code-lookup", 0, mode="keeps")
    assert kept.status is RolloutStatus.OK and len(kept.samples) == 1 and kept.rewritten_turn is None
    split = await server.play_one("code-lookup", 0, mode="strips")
    assert split.status is RolloutStatus.OK and split.rewritten_turn == 2
    texts = [bytes(sample.token_ids.tolist()).decode() for sample in split.samples]
    trained = [
        bytes(sample.token_ids[sample.loss_mask == 1].tolist()).decode() for sample in (*split.samples, *kept.samples)
    ]
    first, second = "<think>1</think>", "<think>3</think>"
    assert [text.count("<think>") for text in texts] == [1, 1] and first in texts[0] and second in texts[1]
    assert trained[0].startswith(first) and trained[1].startswith(second), "each turn is trained once"
    assert trained[0].count("</s>") == trained[1].count("</s>") == 1
    assert trained[2] == trained[0] + trained[1] and split.num_loss_tokens == kept.num_loss_tokens


async def test_empty_text_with_tokens_is_trained_on(server: Any) -> None:
    """Ending at once is a choice of the policy: dropping it would hide it from the reward."""
    await server.open("reverse-text")
    rollout = await server.play_one("reverse-text", 0, mode="eos")
    assert rollout.status is RolloutStatus.OK and rollout.reward == 0.0
    assert int(rollout.samples[0].loss_mask.sum()) == 1


async def test_busy_engine_is_asked_again(server: Any) -> None:
    await server.open("reverse-text")
    server.engine.busy_replies = 2
    rollout = await server.play_one("reverse-text", 0, mode="busy")
    assert rollout.status is RolloutStatus.OK and server.engine.busy_replies == 0


async def test_sampling_reaches_the_engine(server: Any) -> None:
    await server.open("reverse-text")
    sampling = play_pb2.Sampling(temperature=0.7, max_tokens=9, top_p=0.5, extra_body_json='{"min_tokens": 2}')
    await server.play_one("reverse-text", 0, sampling=sampling)
    body = server.engine.requests[-1]
    assert body["temperature"] == 0.7 and body["max_completion_tokens"] == 9 and body["top_p"] == 0.5
    assert body["min_tokens"] == 2 and body["logprobs"] is True and body["return_token_ids"] is True


async def test_what_an_environment_was_made_with_is_sampled_and_recorded(server: Any) -> None:
    args = {"modes": ["ok"], "sampling_args": {"temperature": 0.5, "max_tokens": 7, "extra_body": {"top_k": 3}}}
    opened = await server.open("faulty-v0", args, sampling=play_pb2.Sampling(temperature=1.0))
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    rollout = await server.play_one("faulty-v0", 0, args=args, sampling=play_pb2.Sampling(temperature=1.0))
    assert rollout.status is RolloutStatus.OK, rollout.error
    body = server.engine.requests[-1]
    assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (0.5, 3, 7)
    own = {(each.temperature, each.truncation.top_k) for sample in rollout.samples for each in sample.own_sampling}
    assert own == {(0.5, 3)}
    said = play_pb2.Sampling(temperature=0.9, max_tokens=16, top_k=5)
    rollout = await server.play_one("faulty-v0", 0, args=args, sampling=said)
    body = server.engine.requests[-1]
    assert (body["temperature"], body["top_k"], body["max_completion_tokens"]) == (0.9, 5, 16)
    assert not any(sample.own_sampling for sample in rollout.samples)


async def test_what_an_environment_was_made_with_and_cannot_be_trained_is_refused_at_load(
    server: Any,
) -> None:
    args = {"modes": ["ok"], "sampling_args": {"seed": 7}}
    opened = await server.open("faulty-v0", args, sampling=play_pb2.Sampling(temperature=1.0))
    assert (opened.state, opened.error_type) == (env_service_pb2.ENV_STATE_FAILED, OWN_SAMPLING)
    where = "(`sampling_args` of its constructor)"
    assert f"environment 'faulty-v0' declares `seed` = 7 for its model calls {where}" in opened.error_message
    opened = await server.open("faulty-v0", args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, "evaluations may have it"
    penalised = {"modes": ["ok"], "sampling_args": {"presence_penalty": 0.5}}
    for allows, state in ((False, env_service_pb2.ENV_STATE_FAILED), (True, env_service_pb2.ENV_STATE_READY)):
        sampling = play_pb2.Sampling(temperature=1.0, allows_bias=allows)
        assert (await server.open("faulty-v0", penalised, sampling=sampling)).state == state


async def test_what_an_environment_cuts_off_is_counted_and_not_blamed_on_the_engine(server: Any) -> None:
    played: dict[int, Rollout] = {}
    for limit in (10_000, 60, 4):
        args = {"modes": ["ok"], "max_turns": 2, "max_seq_len": limit}
        await server.open("faulty-v0", args)
        played[limit] = await server.play_one("faulty-v0", 0, args=args)
    whole, cut, nothing = (played[limit] for limit in (10_000, 60, 4))
    assert whole.status is cut.status is RolloutStatus.OK and "max_seq_len_cut_tokens" not in whole.metrics
    lost = sum(int(sample.loss_mask.sum()) for sample in whole.samples)
    lost -= sum(int(sample.loss_mask.sum()) for sample in cut.samples)
    assert cut.metrics["max_seq_len_cut_tokens"] == lost > 0
    assert max(sample.num_tokens for sample in cut.samples) <= 60
    assert (nothing.status, nothing.error.type) == (RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong"), nothing.error
    assert "`max_seq_len` is 4" in nothing.error.message and "engine" not in nothing.error.message


# The engine's failures.


@pytest.mark.parametrize(
    ("mode", "status", "error_type", "text"),
    [
        ("500", RolloutStatus.MODEL_ERROR, "ModelError", "answered 500"),
        ("badjson", RolloutStatus.MODEL_ERROR, "InvalidModelResponseError", "not JSON"),
        ("twochoices", RolloutStatus.MODEL_ERROR, "InvalidModelResponseError", "2 choices"),
        ("empty", RolloutStatus.MODEL_ERROR, "EmptyModelResponseError", "no tokens"),
        ("toolong", RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", "prompt has 52 tokens"),
        ("nologprobs", RolloutStatus.MISSING_TOKENS, "MissingTokens", "no token ids or log-probs"),
        ("noids", RolloutStatus.MISSING_TOKENS, "MissingTokens", "no token ids or log-probs"),
        ("noprompt", RolloutStatus.MISSING_TOKENS, "MissingTokens", "no token ids or log-probs"),
        ("fewlogprobs", RolloutStatus.MISSING_TOKENS, "MissingTokens", "log-probs"),
        ("nospans", RolloutStatus.MISSING_TOKENS, "MissingPolicySpans", "policy_spans"),
        ("401", RolloutStatus.ENGINE_LOST, "EngineLostError", "answered 401"),  # tokens are being changed
        ("502", RolloutStatus.ENGINE_LOST, "EngineLostError", "answered 502"),
        ("503", RolloutStatus.ENGINE_LOST, "EngineLostError", "answered 503"),
        ("504", RolloutStatus.ENGINE_LOST, "EngineLostError", "answered 504"),
        ("reset", RolloutStatus.ENGINE_LOST, "EngineLostError", "broke off: "),
    ],
)
async def test_engine_failures(server: Any, mode: str, status: RolloutStatus, error_type: str, text: str) -> None:
    await server.open("reverse-text")
    assert_failed(await server.play_one("reverse-text", 0, mode=mode), status, error_type, text)


async def test_an_answer_and_an_info_that_are_no_json_cost_no_rollout(server: Any) -> None:
    await server.open("faulty-v0", {"modes": ["odd_info"]})
    rollout = await server.play_one("faulty-v0", 0, args={"modes": ["odd_info"]})
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0
    given = json.loads(rollout.task_json)
    assert given["answer"] == [1, 2] and (given["raw"], given["score"]) == ("b'\\xff'", "nan")
    assert "own" in given


@pytest.mark.parametrize("answer", [0, ["a", "b"], False, ""])
async def test_an_answer_is_kept_whatever_its_type(server: Any, answer: Any) -> None:
    args = {"modes": ["ok"], "answer": answer}
    await server.open("faulty-v0", args)
    rollout = await server.play_one("faulty-v0", 0, args=args)
    given = json.loads(rollout.task_json)
    assert given == ({"mode": "ok"} if answer == "" else {"answer": answer, "mode": "ok"})


async def test_engine_unreachable(server: Any) -> None:
    await server.open("reverse-text")
    rollout = await server.play_one("reverse-text", 0, base_url="http://127.0.0.1:1/v1")
    assert_failed(rollout, RolloutStatus.ENGINE_LOST, "EngineLostError", "cannot connect to http://127.0.0.1:1/v1")


async def test_engine_that_never_answers_ends_at_the_deadline_and_is_let_go(server: Any) -> None:
    await server.open("reverse-text")
    rollout = await server.play_one("reverse-text", 0, mode="hang", rollout_timeout_seconds=1.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "RolloutTimeout", "within 1 s")
    await until(lambda: not server.engine.num_open, timeout_s=patient(5))


async def test_missing_spans_are_no_matter_for_an_evaluation(server: Any) -> None:
    await server.open("reverse-text")
    rollout = await server.play_one(
        "reverse-text", 0, mode="nospans", purpose=rollout_pb2.PURPOSE_EVAL, eval_id="e2", use_train_tasks=True
    )
    assert rollout.status is RolloutStatus.OK and rollout.samples[0].policy_spans == ()


# Endpoints that are not ours.


EXTERNAL = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "x", "use_train_tasks": True, "is_external": True}


async def test_an_external_endpoint_needs_no_tokens_and_is_asked_for_none(server: Any) -> None:
    await server.open("reverse-text")
    rollout = await server.play_one("reverse-text", 0, mode="noids", **EXTERNAL)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0 and rollout.samples == ()
    assert rollout.metrics["endpoint_retries"] == 0
    assert not {"logprobs", "return_token_ids"} & server.engine.requests[-1].keys()


async def test_an_external_endpoint_that_refuses_the_key_says_so(server: Any) -> None:
    await server.open("reverse-text")
    rollout = await server.play_one("reverse-text", 0, mode="401", **EXTERNAL)
    assert_failed(rollout, RolloutStatus.MODEL_ERROR, "EngineAuthError", "who are you")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (EXTERNAL | {"api_key_var": "NO_SUCH_KEY"}, "NO_SUCH_KEY=<the endpoint's API key>"),
        (EXTERNAL | {"api_key_var": "AWS_SECRET_ACCESS_KEY"}, "names a variable that environments do not get"),
        ({"is_external": True}, "only evaluations may be played"),
    ],
)
async def test_a_play_that_an_endpoint_is_not_for_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], text: str
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-store")
    await server.open("reverse-text")
    with pytest.raises(InvalidSpecError, match=re.escape(text)) as caught:
        await call(
            server.stub.PlayGroup, server.request("reverse-text", 0, **changes), timeout_s=patient(PLAY_TIMEOUT_S)
        )
    assert "of-the-store" not in str(caught.value)


# The environment's failures.


async def test_ok_is_ok(server: Any) -> None:
    rollout = await faulty(server, "ok")
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0 and rollout.num_turns == 2


async def test_vf_error_is_not_scored(server: Any) -> None:
    assert_failed(await faulty(server, "setup_vferror"), RolloutStatus.ENV_ERROR, "InfraError", "infra down")


async def test_tool_error_ends_the_rollout(server: Any) -> None:
    assert_failed(await faulty(server, "tool_error"), RolloutStatus.ENV_ERROR, "ToolError", "tool broke")


@pytest.mark.parametrize(
    ("mode", "error_type", "text"),
    [
        ("setup_raises", "ValueError", "plain bug in setup_state"),
        ("resp_raises", "RuntimeError", "plain bug in env_response"),
    ],
)
async def test_plain_exception(server: Any, mode: str, error_type: str, text: str) -> None:
    rollout = await faulty(server, mode)
    assert_failed(rollout, RolloutStatus.ENV_ERROR, error_type, text)
    assert "faulty_v0.py:" in rollout.error.message


async def test_reward_that_raises_is_not_a_zero(server: Any) -> None:
    assert_failed(await faulty(server, "reward_raises"), RolloutStatus.ENV_ERROR, "RewardError", "reward bug")


async def test_reward_that_is_not_finite(server: Any) -> None:
    assert_failed(await faulty(server, "reward_nan"), RolloutStatus.ENV_ERROR, "NonFiniteReward", "nan")


async def test_reward_that_is_no_number_is_not_a_zero(server: Any) -> None:
    args = {"modes": ["reward_none", "reward_text", "reward_list"]}
    await server.open("faulty-v0", args)
    for task, said in enumerate(("None", "'right'", "[1.0]")):
        rollout = await server.play_one("faulty-v0", task, args=args)
        text = f"reward function 'one' raised TypeError: it returned {said}, which is no number"
        assert_failed(rollout, RolloutStatus.ENV_ERROR, "RewardError", text)


async def test_what_a_step_earned_is_kept_with_its_turn(server: Any) -> None:
    args = {"modes": ["step_reward", "ok", "step_reward_nan"]}
    await server.open("faulty-v0", args)
    [rewarded, silent, broken] = [await server.play_one("faulty-v0", task, args=args) for task in range(3)]
    assert rewarded.status is RolloutStatus.OK and rewarded.num_turns == 2, rewarded.error
    turns = [turn for sample in rewarded.samples for turn in sample.turns]
    assert [turn.reward for turn in turns] == [0.25, 0.0]
    assert all(sample.turns[-1].end == sample.num_tokens for sample in rewarded.samples)
    assert silent.status is RolloutStatus.OK and not silent.has_turn_rewards
    assert_failed(broken, RolloutStatus.ENV_ERROR, "NonFiniteReward", "the reward of turn 1 is nan")


async def test_environments_own_timeout_is_not_scored(server: Any) -> None:
    args = {"timeout_seconds": 0.5}
    rollout = await faulty(server, "sleep", args=args)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "EnvironmentTimeout")


async def test_rollout_deadline(server: Any) -> None:
    rollout = await faulty(server, "sleep", rollout_timeout_seconds=1.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "RolloutTimeout", "within 1 s")


async def test_rollout_that_swallows_its_cancellation_is_left_behind(server: Any) -> None:
    rollout = await faulty(server, "ignore_cancel", rollout_timeout_seconds=1.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "RolloutTimeout")
    assert (await faulty(server, "ok")).status is RolloutStatus.OK


async def test_short_block_harms_nobody(server: Any) -> None:
    await server.open("faulty-v0")
    rollouts = await server.play(
        server.request("faulty-v0", MODES.index("block_short")), server.request("faulty-v0", OK, size=4)
    )
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}


async def test_a_deadline_does_not_count_what_other_rollouts_block(server: Any) -> None:
    """Rollouts of one worker block its loop for a second each, together for longer than the deadline of any."""
    await server.open("faulty-v0")
    block, deadline_s = MODES.index("block_short"), patient(2.0)
    rollouts = await server.play(
        *(
            server.request("faulty-v0", block, rollout_timeout_seconds=deadline_s)
            for _ in range(int(1.5 * deadline_s) + 2)
        )
    )
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}
    assert max(rollout.seconds for rollout in rollouts) > deadline_s, "it counts their own time"


async def test_group_rewards_play_the_group_together(server: Any) -> None:
    args = {"kind": "group"}
    opened = await server.open("faulty-v0", args)
    assert opened.requires_group
    rollouts = await server.play(server.request("faulty-v0", OK, args=args, size=3))
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0]
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}


async def test_group_reward_that_raises_fails_every_member(server: Any) -> None:
    args = {"kind": "group"}
    await server.open("faulty-v0", args)
    rollouts = await server.play(server.request("faulty-v0", MODES.index("reward_raises"), args=args, size=3))
    for rollout in rollouts:
        assert_failed(rollout, RolloutStatus.ENV_ERROR, "RewardError", "group reward bug")


@pytest.mark.parametrize(
    ("mode", "said"),
    [("reward_none", "None, not a list with a number for each member"), ("reward_text", "'r', which is no number")],
)
async def test_group_reward_without_numbers_fails_every_member(server: Any, mode: str, said: str) -> None:
    args = {"kind": "group", "modes": [mode]}
    await server.open("faulty-v0", args)
    for rollout in await server.play(server.request("faulty-v0", 0, args=args, size=3)):
        assert_failed(rollout, RolloutStatus.ENV_ERROR, "RewardError", f"raised TypeError: it returned {said}")


async def test_group_reward_that_is_no_number_fails_every_member(server: Any) -> None:
    args = {"kind": "group"}
    await server.open("faulty-v0", args)
    first, *others = await server.play(server.request("faulty-v0", MODES.index("reward_nan"), args=args, size=3))
    assert_failed(first, RolloutStatus.ENV_ERROR, "NonFiniteReward", "(compared = nan)")
    for rollout in others:
        assert_failed(rollout, RolloutStatus.ENV_ERROR, "GroupMemberFailed", "NonFiniteReward: the reward is nan")


async def test_member_that_raises_fails_a_group_with_group_rewards(server: Any) -> None:
    args = {"kind": "group"}
    await server.open("faulty-v0", args)
    rollouts = await server.play(server.request("faulty-v0", MODES.index("setup_raises"), args=args, size=2))
    for rollout in rollouts:
        assert_failed(rollout, RolloutStatus.ENV_ERROR, "ValueError")


async def test_task_that_kills_its_worker_is_quarantined_and_its_neighbours_are_not(server: Any) -> None:
    await server.open("faulty-v0")
    neighbours = [server.request("faulty-v0", MODES.index("long_sleep"), size=4), server.request("faulty-v0", OK)]
    poison = server.request("faulty-v0", MODES.index("exit"), size=2)
    rollouts = await server.play(*neighbours, poison)
    innocent, guilty = rollouts[:5], rollouts[5:]
    assert {rollout.status for rollout in innocent} == {RolloutStatus.OK}
    assert sorted(rollout.status for rollout in guilty) == [RolloutStatus.QUARANTINED, RolloutStatus.WORKER_DIED]
    assert all("exit code 17" in rollout.error.message for rollout in guilty)
    began = time.monotonic()
    again = await server.play_one("faulty-v0", MODES.index("exit"))
    assert_failed(again, RolloutStatus.QUARANTINED, "TaskQuarantined", "exit code 17")
    assert time.monotonic() - began < 2.0
    assert (await faulty(server, "ok")).status is RolloutStatus.OK


async def test_task_that_killed_one_worker_by_chance_is_cleared(server: Any) -> None:
    await server.open("faulty-v0")
    rollouts = await server.play(
        server.request("faulty-v0", MODES.index("exit_once"), size=2), server.request("faulty-v0", OK)
    )
    assert {rollout.status for rollout in rollouts} == {RolloutStatus.OK}


async def test_task_that_blocks_its_worker_for_ever_is_killed_and_quarantined(server: Any) -> None:
    await server.open("faulty-v0")
    blocked, neighbour = await server.play(
        server.request("faulty-v0", MODES.index("block_forever"), rollout_timeout_seconds=1.0),
        server.request("faulty-v0", OK, rollout_timeout_seconds=30.0),
        timeout_s=240,
    )
    assert_failed(blocked, RolloutStatus.TIMEOUT, "WorkerBlocked", "blocked")
    assert "faulty_v0.py:" in blocked.error.message and "in setup_state" in blocked.error.message, blocked.error.message
    assert neighbour.status is RolloutStatus.OK


# Loading.


async def test_unknown_environment(server: Any) -> None:
    opened = await server.open("no-such-env")
    assert (opened.state, opened.error_type) == (env_service_pb2.ENV_STATE_FAILED, "EnvironmentNotFound")
    for text in ("'no-such-env'", "'no_such_env'", "and its venv "):
        assert text in opened.error_message
    assert "pip install -e DIRECTORY" in opened.error_remedy, "one of that name may be anybody's package"


async def test_environment_that_raises_while_loading(server: Any) -> None:
    opened = await server.open("faulty-v0", {"load_raises": True})
    assert (opened.state, opened.error_type) == (env_service_pb2.ENV_STATE_FAILED, "KeyError")
    assert "no such thing while loading" in opened.error_message and "load_environment" in opened.error_message


async def test_environment_that_kills_its_process_while_loading(server: Any) -> None:
    opened = await server.open("faulty-v0", {"load_exits": True})
    assert (opened.state, opened.error_type) == (env_service_pb2.ENV_STATE_FAILED, "WorkerDied")
    assert "exit code 19" in opened.error_message


async def test_wrong_args_of_an_environment(server: Any) -> None:
    opened = await server.open("reverse-text", {"nonsense": 1})
    assert (opened.state, opened.error_type) == (env_service_pb2.ENV_STATE_FAILED, "TypeError")
    assert "nonsense" in opened.error_message
