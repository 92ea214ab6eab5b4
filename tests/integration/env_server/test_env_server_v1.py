"""v1 environments, and one test per row of the failure table; v0 with a renderer."""

import json
from typing import Any

import pytest

from millrace.config.sections.environments import SelectConfig, selection_json
from millrace.internal.v1 import env_service_pb2, play_pb2, rollout_pb2
from millrace.rollouts.types import OWN_SAMPLING, PolicySpan, Rollout, RolloutStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("tokenizer_manifest_key"),
]

MODES = [
    "ok",
    "setup_raises",
    "stop_raises",
    "reward_raises",
    "reward_slow",
    "setup_slow",
    "block_forever",
    "sleep",
    "exit",
    "reward_nan",
    "reward_inf",
    "metric_nan",
    "image",
    "parts",
    "reward_text",
    "reward_none",
    "reward_exits",
    "reward_cancels",
    "stop_exits",
]


async def faulty(server: Any, task: str, /, **changes: Any) -> Rollout:
    opened = await server.open("faulty-v1", changes.get("args"))
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    return await server.play_one("faulty-v1", MODES.index(task), **changes)


def assert_failed(rollout: Rollout, status: RolloutStatus, error_type: str, text: str = "") -> None:
    assert rollout.error is not None
    assert (rollout.status, rollout.error.type) == (status, error_type), rollout.error
    assert text in rollout.error.message
    assert rollout.samples == ()
    assert rollout.reward == 0.0


async def test_a_selection_is_a_set_of_its_own_and_one_that_overlaps_is_refused(server: Any) -> None:
    def spec(**selected: Any) -> Any:
        made = server.spec("rev-text-v1", {"num_examples": 8})
        made.select_json = selection_json(
            **{name: SelectConfig.model_validate(each) for name, each in selected.items()}
        )
        return made

    some = await server.open_spec(spec(train={"include": {"idx": "2:"}}, evaluated={"limit": 2}))
    assert (some.train.num_tasks, some.eval.num_tasks) == (6, 2), some
    request = server.request("rev-text-v1", 1)
    request.env.CopyFrom(spec(train={"include": {"idx": "2:"}}, evaluated={"limit": 2}))
    [third] = await server.play(request)
    await server.open("rev-text-v1", {"num_examples": 8})
    whole = await server.play_one("rev-text-v1", 3, args={"num_examples": 8})
    assert third.task_id == whole.task_id and third.task_index == 1, "positions count in what is selected"
    wrong = await server.open_spec(spec(train={"include": {"idx": "2:", "names": ["x"]}}))
    assert wrong.state == env_service_pb2.ENV_STATE_FAILED and "have no names" in wrong.error_message
    assert "correct `select`" in wrong.error_remedy and "selection.py" not in wrong.error_message


async def test_v1_taskset_plays_with_exact_tokens_and_spans(server: Any, tokenizer: Any) -> None:
    opened = await server.open("rev-text-v1", {"num_examples": 8, "eval_args": {"seed": 1, "num_examples": 3}})
    assert (opened.api, opened.train.num_tasks, opened.eval.num_tasks) == ("v1", 8, 3), opened
    assert opened.train.digest != opened.eval.digest
    args = {"num_examples": 8, "eval_args": {"seed": 1, "num_examples": 3}}
    rollouts = await server.play(server.request("rev-text-v1", 2, args=args, size=3))
    for rollout in rollouts:
        assert rollout.status is RolloutStatus.OK, rollout.error
        assert 0 < rollout.reward < 1 and rollout.metrics["reward/similarity"] == rollout.reward
        [sample] = rollout.samples
        completion_ids = server.engine.generated_ids
        start = sample.num_tokens - len(completion_ids)
        assert sample.token_ids[start:].tolist() == completion_ids
        assert sample.loss_mask.tolist() == [0] * start + [1] * len(completion_ids)
        assert sample.inference_logprobs[start:].tolist() == [-0.25] * len(completion_ids)
        prompt = tokenizer.decode(sample.token_ids[:start].tolist())
        assert json.loads(rollout.task_json)["answer"][::-1] in prompt
        assert prompt.startswith("<|im_start|>user\n") and prompt.endswith("<|im_start|>assistant\n")
        assert sample.policy_spans == (
            PolicySpan(lineage=0, version=3, start=start, end=start + 1),
            PolicySpan(lineage=0, version=4, start=start + 1, end=sample.num_tokens),
        )


async def test_v1_eval_tasks_are_their_own_set(server: Any) -> None:
    args = {"num_examples": 8, "eval_args": {"seed": 1, "num_examples": 3}}
    await server.open("rev-text-v1", args)
    rollout = await server.play_one(
        "rev-text-v1", 2, args=args, purpose=rollout_pb2.PURPOSE_EVAL, eval_id="e", mode="nospans"
    )
    assert rollout.status is RolloutStatus.OK and rollout.samples[0].policy_spans == ()


@pytest.mark.parametrize(
    ("mode", "status", "error_type", "text"),
    [
        ("500", RolloutStatus.MODEL_ERROR, "ProviderError", "boom"),
        ("401", RolloutStatus.ENGINE_LOST, "EngineLostError", "who are you"),
        ("badjson", RolloutStatus.MODEL_ERROR, "ProviderError", "unreadable reply"),
        ("toolong", RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", "prompt has 52 tokens"),
        ("tiny", RolloutStatus.PROMPT_TOO_LONG, "PromptTooLong", "exceeds maximum context length (8)"),
        ("nologprobs", RolloutStatus.MISSING_TOKENS, "ProviderError", "logprobs"),
        ("noids", RolloutStatus.MISSING_TOKENS, "MissingTokens", "token ids"),
        ("nospans", RolloutStatus.MISSING_TOKENS, "MissingPolicySpans", "policy_spans"),
        ("502", RolloutStatus.ENGINE_LOST, "EngineLostError", "Error code: 502"),
        ("503", RolloutStatus.ENGINE_LOST, "EngineLostError", "Error code: 503"),
        ("504", RolloutStatus.ENGINE_LOST, "EngineLostError", "Error code: 504"),
        ("reset", RolloutStatus.ENGINE_LOST, "EngineLostError", "engine lost: http://"),
    ],
)
async def test_engine_failures(server: Any, mode: str, status: RolloutStatus, error_type: str, text: str) -> None:
    assert_failed(await faulty(server, "ok", mode=mode), status, error_type, text)


AGENT_REPEATS = {"env": {"player": {"retries": {"max_retries": 1}}}}


async def test_a_conversation_that_outgrows_the_context_is_scored_as_it_stands(server: Any) -> None:
    assert (await server.open("talks-v1", AGENT_REPEATS)).state == env_service_pb2.ENV_STATE_READY
    rollout = await server.play_one("talks-v1", 0, args=AGENT_REPEATS, mode="fills")
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert rollout.num_turns > 1 and rollout.reward == rollout.num_turns
    assert rollout.stop_condition == "context_length" and rollout.is_truncated
    num_sampled = sum(sample.loss_mask.sum() for sample in rollout.samples)
    assert num_sampled == rollout.num_turns * len(server.engine.generated_ids)


@pytest.mark.parametrize(
    ("task", "is_of_agent"), [(1, True), *(pytest.param(task, False, marks=pytest.mark.long) for task in (1, 3))]
)
async def test_a_repetition_that_ends_well_is_no_failure(server: Any, task: int, is_of_agent: bool) -> None:
    args = AGENT_REPEATS if is_of_agent else {"env": {"retries": {"max_retries": 1}}}
    assert (await server.open("talks-v1", args)).state == env_service_pb2.ENV_STATE_READY
    rollout = await server.play_one("talks-v1", task, args=args)
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0, rollout.error


async def test_of_attempts_that_all_fail_the_last_is_told(server: Any) -> None:
    assert (await server.open("talks-v1", AGENT_REPEATS)).state == env_service_pb2.ENV_STATE_READY
    failed = await server.play_one("talks-v1", 2, args=AGENT_REPEATS)
    assert_failed(failed, RolloutStatus.ENV_ERROR, "TaskError", "attempt 2 failed")


async def test_a_reply_that_the_environment_replaces_is_said(server: Any) -> None:
    assert (await server.open("talks-v1", AGENT_REPEATS)).state == env_service_pb2.ENV_STATE_READY
    failed = await server.play_one("talks-v1", 4, args=AGENT_REPEATS)
    assert_failed(failed, RolloutStatus.MISSING_TOKENS, "MissingTokens", "`censor` of the environment (`@intercept`)")


async def test_engine_unreachable(server: Any) -> None:
    rollout = await faulty(server, "ok", base_url="http://127.0.0.1:1/v1")
    assert_failed(rollout, RolloutStatus.ENGINE_LOST, "EngineLostError", "127.0.0.1:1")


async def test_engine_that_never_answers(server: Any) -> None:
    rollout = await faulty(server, "ok", mode="hang", rollout_timeout_seconds=2.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "RolloutTimeout")


async def test_ok_is_ok(server: Any) -> None:
    rollout = await faulty(server, "ok")
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert rollout.reward == 1.0 and rollout.metrics["two"] == 2.0


@pytest.mark.parametrize(
    ("mode", "error_type", "text"),
    [
        ("setup_raises", "TaskError", "plain bug in setup"),
        ("stop_raises", "TaskError", "bug in stop"),
        ("reward_raises", "TaskError", "reward bug"),
        ("reward_text", "TaskError", "reward 'one' is '0.5', which is no number"),
        ("reward_none", "TaskError", "reward 'one' is None, which is no number"),
        ("reward_exits", "TaskError", "the task's rewards raised SystemExit: 3"),
        ("reward_cancels", "TaskError", "the task's rewards raised CancelledError"),
        ("stop_exits", "HarnessError", "SystemExit: bye"),
    ],
)
async def test_task_code_that_raises(server: Any, mode: str, error_type: str, text: str) -> None:
    assert_failed(await faulty(server, mode), RolloutStatus.ENV_ERROR, error_type, text)


@pytest.mark.parametrize("value", ["nan", "inf"])
async def test_rewards_that_are_no_finite_numbers_are_failures(server: Any, value: str) -> None:
    text = f"the reward is {value} (reward/one = {value}), not a finite number"
    assert_failed(await faulty(server, f"reward_{value}"), RolloutStatus.ENV_ERROR, "NonFiniteReward", text)


async def test_metrics_that_are_no_finite_numbers_are_left_out(server: Any) -> None:
    rollout = await faulty(server, "metric_nan")
    assert rollout.status is RolloutStatus.OK and rollout.reward == 1.0
    assert "two" not in rollout.metrics and rollout.metrics["reward/one"] == 1.0


@pytest.mark.parametrize(
    ("mode", "stage"), [("setup_slow", "setup"), pytest.param("reward_slow", "scoring", marks=pytest.mark.long)]
)
async def test_timeouts_of_the_environment(server: Any, mode: str, stage: str) -> None:
    args = {"env": {"agent": {"timeout": {"setup": 1.0, "scoring": 1.0}}}}
    rollout = await faulty(server, mode, args=args)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "EnvironmentTimeout", stage)
    assert f"raise args.env.agent.timeout.{stage} " in rollout.error.message


async def test_a_timeout_names_the_key_of_an_environment_that_has_an_option_of_that_name(server: Any) -> None:
    agent = {"runtime": {"type": "subprocess"}, "timeout": {"scoring": 0.5}}
    args = {"env": "slow", "millrace": {"env": {"agent": agent}}}
    opened = await server.open("placed-v1", args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened.error_message
    rollout = await server.play_one("placed-v1", 0, args=args)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "EnvironmentTimeout", "args.millrace.env.agent.timeout.scoring ")
    assert "args.env" not in rollout.error.message


async def test_what_a_role_declares_and_cannot_be_trained_is_refused_when_it_is_opened(server: Any) -> None:
    asked = play_pb2.Sampling(temperature=1.0)
    for sampling, problem in (({"temperature": 0.5, "top_k": 3}, ""), ({"seed": 7}, "`seed` = 7"), ({"n": 2}, "`n`")):
        args = {"num_examples": 4, "env": {"agent": {"sampling": sampling}}}
        opened = await server.open("rev-text-v1", args, sampling=asked)
        wanted = env_service_pb2.ENV_STATE_FAILED if problem else env_service_pb2.ENV_STATE_READY
        assert opened.state == wanted and problem in opened.error_message, opened.error_message
        if problem:
            assert opened.error_type == OWN_SAMPLING and "(`args.env.agent.sampling`)" in opened.error_message


async def test_rollout_deadline(server: Any) -> None:
    rollout = await faulty(server, "sleep", rollout_timeout_seconds=1.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "RolloutTimeout", "within 1 s")


async def test_request_without_a_tokenizer(server: Any) -> None:
    rollout = await faulty(server, "ok", tokenizer_manifest_key="")
    assert_failed(rollout, RolloutStatus.ENV_ERROR, "ValueError", "tokenizer_manifest_key")


async def test_manifest_that_does_not_exist(server: Any) -> None:
    rollout = await faulty(server, "ok", tokenizer_manifest_key="test/nowhere/manifest.json")
    assert rollout.status is RolloutStatus.ENV_ERROR and rollout.error is not None
    assert "nowhere" in rollout.error.message


async def test_task_that_kills_its_worker_is_quarantined(server: Any) -> None:
    await server.open("faulty-v1")
    neighbour, poison = await server.play(
        server.request("faulty-v1", MODES.index("ok")), server.request("faulty-v1", MODES.index("exit"))
    )
    assert neighbour.status is RolloutStatus.OK
    assert_failed(poison, RolloutStatus.WORKER_DIED, "WorkerDied", "exit code 17")
    assert_failed(await faulty(server, "exit"), RolloutStatus.QUARANTINED, "TaskQuarantined")


async def test_task_that_blocks_its_worker_is_killed(server: Any) -> None:
    rollout = await faulty(server, "block_forever", rollout_timeout_seconds=1.0)
    assert_failed(rollout, RolloutStatus.TIMEOUT, "WorkerBlocked")


async def test_v1_plays_an_external_endpoint_without_tokens(server: Any) -> None:
    args = {"num_examples": 8, "eval_args": {"seed": 1, "num_examples": 3}}
    await server.open("rev-text-v1", args)
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "x", "is_external": True, "tokenizer_manifest_key": ""}
    rollout = await server.play_one("rev-text-v1", 0, args=args, mode="noids", **changes)
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert rollout.reward > 0 and rollout.samples == ()


@pytest.mark.parametrize(
    ("env_id", "env", "text"),
    [
        ("rev-text-v1", {"id": "best-of-n", "n": 3}, "args.env.n: must be 1: an episode of 3 attempts has 3 trainable"),
        (
            "duel-v1",
            {},
            "args.env: DuelEnv trains 2 of its roles (white, black), and the algorithm of",
        ),
        pytest.param(
            "duel-v1", {"trained": []}, "args.env: DuelEnv trains 0 of its roles (none), and", marks=pytest.mark.long
        ),
    ],
)
async def test_not_one_trainable_trace_is_refused_when_loaded(server: Any, env_id: str, env: Any, text: str) -> None:
    opened = await server.open(env_id, {"env": env})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED and text in opened.error_message, opened


@pytest.mark.parametrize(
    ("env_id", "env"),
    [
        pytest.param("rev-text-v1", {"id": "best-of-n", "n": 1}, marks=pytest.mark.long),
        ("duel-v1", {"trained": ["black"]}),
    ],
)
async def test_one_trained_role_of_several_is_played(server: Any, env_id: str, env: Any) -> None:
    opened = await server.open(env_id, {"env": env})
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    rollout = await server.play_one(env_id, 2, args={"env": env})
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert len(rollout.samples) == 1 and rollout.reward == rollout.metrics["reward/similarity"]


async def test_traces_that_only_an_episode_shows_fail_their_rollout(server: Any) -> None:
    args = {"env": {"trained": ["white"], "plays": 2}}
    opened = await server.open("duel-v1", args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    rollout = await server.play_one("duel-v1", 0, args=args)
    assert_failed(rollout, RolloutStatus.ENV_ERROR, "MultipleTraces", "2 trainable traces, and the algorithm")


@pytest.mark.parametrize(
    ("env_id", "env", "agents"),
    [
        ("duel-v1", {}, ["white", "black"]),
        pytest.param("duel-v1", {"setup_asks_more": True}, None, marks=pytest.mark.long),
        pytest.param("duel-v1", {"trained": ["white"], "plays": 2}, ["white", "white"], marks=pytest.mark.long),
        pytest.param("duel-v1", {"trained": ["white"]}, [], marks=pytest.mark.long),
        pytest.param("rev-text-v1", {"id": "best-of-n", "n": 3}, ["agent"] * 3, marks=pytest.mark.long),
    ],
)
async def test_each_trained_agent_has_its_own_reward_and_samples(
    server: Any, env_id: str, env: Any, agents: Any
) -> None:
    args = {"env": env, "takes_several_traces": True}
    opened = await server.open(env_id, args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    if agents is None:
        return  # its setup cannot be run without an episode
    rollout = await server.play_one(env_id, 2, args=args)
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert [trace.agent for trace in rollout.traces] == agents
    assert all(trace.num_samples == 1 and trace.num_turns == 1 for trace in rollout.traces)
    assert len(rollout.samples) == max(1, len(agents))
    if agents:
        assert rollout.reward == pytest.approx(sum(trace.reward for trace in rollout.traces) / len(agents))
        assert {f"{agent}/reward" for agent in agents} <= rollout.metrics.keys()


@pytest.mark.long
async def test_an_environment_that_trains_nobody_is_refused_whatever_the_algorithm(server: Any) -> None:
    opened = await server.open("duel-v1", {"env": {"trained": []}, "takes_several_traces": True})
    assert opened.state == env_service_pb2.ENV_STATE_FAILED and "trains 0 of its roles" in opened.error_message


@pytest.mark.long
async def test_roles_that_cannot_be_told_before_an_episode_are_left_to_it(server: Any) -> None:
    opened = await server.open("duel-v1", {"env": {"setup_asks_more": True}})
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened


async def test_v0_with_a_renderer_has_exact_turns(server: Any) -> None:
    args = {"renderer": "default", "num_train": 10, "num_eval": 2}
    opened = await server.open("code-lookup", args)
    assert opened.state == env_service_pb2.ENV_STATE_READY, opened
    rollout = await server.play_one("code-lookup", 0, args=args)
    assert rollout.status is RolloutStatus.OK, rollout.error
    [sample] = rollout.samples
    assert int(sample.loss_mask.sum()) == 2 * len(server.engine.generated_ids)
    assert [span.version for span in sample.policy_spans] == [3, 4, 3, 4]


async def test_a_taskset_with_a_harness_of_its_own_is_trained_with_it(server: Any) -> None:
    answer = await server.open("harnessed-v1", {})
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    rollout = await server.play_one("harnessed-v1", 1)
    assert rollout.status is RolloutStatus.OK, rollout.error
    assert "task, please" in rollout.messages_json
    [sample] = rollout.samples
    assert sample.token_ids[-sample.num_loss_tokens :].tolist() == server.engine.generated_ids
