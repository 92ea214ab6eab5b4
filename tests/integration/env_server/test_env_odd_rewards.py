"""Rewards that the library would turn into 0, or into something else, through the whole env-server."""

from typing import Any

import pytest

from millrace.internal.v1 import env_service_pb2, rollout_pb2
from millrace.rollouts.types import RolloutStatus

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("tokenizer_manifest_key"),
]

ENV = "odd-rewards"
NUM_TASKS = 4
RAISED = "reward function 'raises' raised KeyError: 'no such field in the reply'"
FAILING = {
    "raises": ("RewardError", RAISED),
    "none": ("RewardError", "reward function 'none' raised TypeError: it returned None, which is no number"),
    "text": ("RewardError", "it returned '0.5', which is no number"),
    "huge": ("RewardTooLarge", "the reward is 1e+39 (huge = 1e+39), beyond ±1e+15; fix the environment's reward"),
    "parts": ("RewardError", "it returned {'length': 3, 'depth': 1.5}, which is no number"),
    "calls": ("RewardError", RAISED),
    "swallows": ("RewardError", RAISED),
    "adds": ("RewardError", RAISED),
    "swaps": ("RewardError", "reward function 'none' raised TypeError: it returned None"),
    "exits": ("RewardError", "reward function 'exits' raised SystemExit: 3"),
    "cancels": ("RewardError", "reward function 'cancels' raised CancelledError"),
    "leaves": ("EnvironmentExitError", "the environment's code raised SystemExit: nothing to do (at "),
    "turn_text": ("RewardError", "the reward of turn 1 is '0.5', which is no number"),
}
TURNS = {
    "turn_float32": [0.25, 0.25],
    "turn_int64": [1.0, 2.0],
    "turn_zero": [0.0, 0.0],
    "turn_last": [0.0, 0.5],
    "fine": [],
}


async def play_each(server: Any, kinds: list[str], *, size: int = 1, **args: Any) -> dict[str, list[Any]]:
    """Return the first task of every child of the group."""
    args = {"kinds": kinds, **args}
    answer = await server.open(ENV, args)
    assert answer.state == env_service_pb2.ENV_STATE_READY, answer
    asked = [server.request(ENV, at * NUM_TASKS, args=args, size=size) for at in range(len(kinds))]
    played = await server.play(*asked)
    return {kind: played[at * size : (at + 1) * size] for at, kind in enumerate(kinds)}


async def test_what_a_rubric_cannot_score_fails_its_rollout_wherever_the_rubric_is(server: Any) -> None:
    played = await play_each(server, ["fine", *FAILING])
    for kind, (error_type, said) in FAILING.items():
        [rollout] = played[kind]
        assert (rollout.status, rollout.error and rollout.error.type) == (RolloutStatus.ENV_ERROR, error_type), kind
        assert said in rollout.error.message, kind
    [fine] = played["fine"]
    assert (fine.status, fine.reward) == (RolloutStatus.OK, 0.5), fine.error
    assert fine.metrics == {"fine": 0.5, "length": 3.0, "depth": 1.5, "num_turns": 2.0}, "a mapping is metrics"


async def test_turns_have_the_rewards_that_the_environment_gave_them(server: Any) -> None:
    for args in ({}, {"nested": True}):
        played = await play_each(server, list(TURNS), **args)
        for kind, expected in TURNS.items():
            [rollout] = played[kind]
            assert rollout.status is RolloutStatus.OK, (kind, rollout.error)
            assert [turn.reward for sample in rollout.samples for turn in sample.turns] == expected, kind


async def test_a_group_with_a_child_that_compares_is_played_in_groups(server: Any) -> None:
    """The library writes a group's rewards into every turn that has none; here no turn has one but `turn_last`'s."""
    played = await play_each(server, ["rank", "turn_last", "none"], size=2)
    assert [rollout.status for rollout in played["rank"]] == [RolloutStatus.OK] * 2, played["rank"][0].error
    assert [rollout.reward for rollout in played["rank"]] == [0.0, 1.0]
    assert not any(rollout.has_turn_rewards for rollout in played["rank"])
    turns = [[turn.reward for sample in rollout.samples for turn in sample.turns] for rollout in played["turn_last"]]
    assert turns == [[0.0, 0.5]] * 2
    assert {rollout.error.type for rollout in played["none"]} == {"RewardError"}


@pytest.mark.parametrize("has_eval", [True, False])
async def test_the_first_tasks_of_an_evaluation_are_of_every_child(server: Any, has_eval: bool) -> None:
    """Also where the training tasks are played, for want of others."""
    changes = {"purpose": rollout_pb2.PURPOSE_EVAL, "eval_id": "first", "use_train_tasks": not has_eval}
    args = {"kinds": ["turn_int64", "rank", "fine"], "has_eval": has_eval}
    await server.open(ENV, args)
    asked = [server.request(ENV, at, args=args, **changes) for at in range(4)]
    played = await server.play(*asked)
    assert [rollout.status for rollout in played] == [RolloutStatus.OK] * 4, [rollout.error for rollout in played]
    said = [name for rollout in played for name in args["kinds"] if f"{name} " in rollout.messages_json]
    assert said == ["turn_int64", "rank", "fine", "turn_int64"]
