"""Agents with a loop of their own, in a process of their own: what of theirs is trained on, and how they fail."""

import pytest

from millrace.rollouts.types import RolloutStatus

pytestmark = pytest.mark.asyncio(loop_scope="session")

PROGRAMS = ["turns", "aside", "helper", "fails", "refused", "many", "sleeps", "apis"]
END = 257


async def played(server, program, *, mode="ok", **args):
    """A rollout of the v0 environment."""
    await server.open("own_loop", args)
    return await server.play_one("own_loop", PROGRAMS.index(program), args=args, mode=mode)


async def played_v1(server, program, **args):
    """A rollout of the v1 taskset."""
    args |= {"env": {"agent": {"harness": {"id": "own_loop_v1"}}}}
    reply = await server.open("own_loop_v1", args)
    assert not reply.error_message
    return await server.play_one("own_loop_v1", PROGRAMS.index(program), args=args)


def num_ends(rollout):
    return sum(int((sample.token_ids[sample.loss_mask == 1] == END).sum()) for sample in rollout.samples)


async def test_every_call_of_an_agent_is_recorded_like_any_other(server):
    rollout = await played(server, "turns")
    assert (rollout.status, rollout.error, rollout.stop_condition) == (RolloutStatus.OK, None, "agent_ended")
    [sample] = rollout.samples
    prompt = server.encode_chat([{"role": "user", "content": "abc"}])
    said = [*b"cba", END]
    assert sample.token_ids.tolist()[: len(prompt) + len(said)] == [*prompt, *said]
    assert sample.loss_mask.sum() == len(said) + len(b"niaga") + 1
    assert set(sample.inference_logprobs[sample.loss_mask == 1]) == {-0.5}
    assert {span.version for span in sample.policy_spans} == {3, 4}
    assert (rollout.reward, rollout.num_turns) == (5.0, 2)


async def test_what_an_agent_threw_away_is_not_rewarded(server):
    for program, num_trained, num_left_out in (("aside", 2, 1), ("helper", 2, 0)):
        rollout = await played(server, program)
        assert (num_ends(rollout), rollout.metrics.get("agent_calls_left_out", 0)) == (num_trained, num_left_out)
    rollout = await played(server, "aside", agent={"branches": "all"})
    assert (num_ends(rollout), len(rollout.samples)) == (3, 2)


async def test_a_failing_agent_is_told_by_its_cause_and_by_what_was_refused(server):
    failed = await played(server, "fails")
    assert (failed.status, failed.error.type) == (RolloutStatus.ENV_ERROR, "AgentError")
    assert "ended with exit code 1: ValueError: the tool xxx" in failed.error.message
    refused = await played(server, "refused")
    assert "HTTP Error 400" in refused.error.message
    assert "the last refused request: 400: response_format: is not supported" in refused.error.message
    many = await played(server, "many")
    assert "403: the rollout may make 4 model calls" in many.error.message


@pytest.mark.long
async def test_a_deadline_ends_an_agent(server):
    late = await played(server, "sleeps", agent={"limits": {"deadline_s": 3.0}})
    assert (late.status, late.error.type) == (RolloutStatus.TIMEOUT, "EnvironmentTimeout")


async def test_a_model_call_without_tokens_fails_the_rollout(server):
    assert (await played(server, "turns", mode="noids")).status is RolloutStatus.MISSING_TOKENS


async def test_rules_are_said_of_agents_alone(server):
    reply = await server.open("own_loop", {"agent": {"branches": "first"}})
    assert "agent.branches" in reply.error_message and "used, last, longest, all" in reply.error_message
    reply = await server.open("sorted_env", {"agent": {"branches": "last"}})
    assert "agent: is of environments whose rollouts an agent plays" in reply.error_message


@pytest.mark.long
async def test_limits_of_agents_are_refused_where_no_role_of_v1_has_one(server):
    reply = await server.open("rev_text_v1", {"agent": {"limits": {"max_requests": 1}}})
    assert "agent: has limits of agents with a loop of their own" in reply.error_message


@pytest.mark.long
async def test_limits_of_the_run_count_in_the_place_of_the_environments(server):
    few = {"limits": {"max_requests": 1}}
    assert "403: the rollout may make 1 model calls" in (await played(server, "turns", agent=few)).error.message


async def test_agents_of_v1(server, tokenizer_manifest_key):
    size = len(server.engine.generated_ids)
    for program, num_trained, num_left_out in (("turns", 2, 0), ("aside", 2, 1), ("apis", 1, 2)):
        rollout = await played_v1(server, program)
        assert (rollout.status, rollout.error) == (RolloutStatus.OK, None)
        assert sum(int(sample.loss_mask.sum()) for sample in rollout.samples) == num_trained * size
        assert rollout.metrics.get("agent_calls_left_out", 0) == num_left_out
    failed = await played_v1(server, "fails")
    assert (failed.status, failed.error.type) == (RolloutStatus.ENV_ERROR, "HarnessError")
    assert " exited 1: ValueError: the tool xxx" in failed.error.message.partition("\n")[0], failed.error.message


@pytest.mark.long
async def test_failures_of_agents_of_v1(server, tokenizer_manifest_key):
    failed = await played_v1(server, "fails")
    assert (failed.status, failed.error.type) == (RolloutStatus.ENV_ERROR, "HarnessError")
    assert "exited 1: ValueError: the tool xxx" in failed.error.message[:300]
    assert "HTTP Error 400" in (await played_v1(server, "refused")).error.message
    assert "HTTP Error 403" in (await played_v1(server, "many")).error.message
    few = {"limits": {"max_requests": 1}}
    assert "HTTP Error 403" in (await played_v1(server, "turns", agent=few)).error.message
