"""Credit by turn: the reward to go, compared with the rollouts of the task that came to the same turn."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from millrace.algorithms import Algorithm, Grpo, ReinforcePlusPlus, Rloo
from millrace.algorithms.base import Credited, Filtered, OverlongPenalty
from millrace.config.sections.buffer import FilterConfig
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample, TurnReward


def sample(rewards: Sequence[float]) -> Sample:
    """Return turns of a prompt token and two sampled ones each."""
    length = 3 * max(1, len(rewards))
    mask = np.tile(np.asarray([0, 1, 1], dtype=np.uint8), length // 3)
    return Sample(
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=mask,
        inference_logprobs=np.where(mask == 1, -1.0, 0.0).astype(np.float32),
        policy_spans=(PolicySpan(lineage=0, version=0, start=0, end=length),),
        turns=tuple(TurnReward(end=3 * (at + 1), reward=reward) for at, reward in enumerate(rewards)),
    )


def rollout(total: float, *samples: Sequence[float]) -> Rollout:
    return Rollout(
        run_uid="r",
        purpose=Purpose.TRAIN,
        ordinal=0,
        member=0,
        attempt=0,
        group_size=3,
        env="e",
        task_index=0,
        task_id="0",
        status=RolloutStatus.OK,
        samples=tuple(sample(rewards) for rewards in samples),
        reward=total,
    )


def of_turns(algorithm: Algorithm, *group: Rollout) -> list[list[float]]:
    """Of each rollout the advantages of its turns, after checking that a turn's sampled tokens share one."""
    found = []
    for played, credits in zip(group, algorithm.credit(group), strict=True):
        own = []
        for part, credit in zip(played.samples, credits, strict=True):
            rows = credit.advantages.reshape(-1, 3)
            assert credit.advantages.shape == part.token_ids.shape
            assert not rows[:, 0].any() and (rows[:, 1] == rows[:, 2]).all()
            own += [float(row[1]) for row in rows]
        found.append(own)
    return found


def test_a_turn_gets_what_was_earned_from_it_on_against_those_who_came_so_far() -> None:
    # Rewards to go: (3, 2, 1), (1, 1), (2, 0). Means: 2, 1, and nobody else came to the third turn.
    group = [rollout(3.0, [1.0, 1.0, 1.0]), rollout(1.0, [0.0, 1.0]), rollout(2.0, [2.0, 0.0])]
    expected = [[1.0, 1.0, 0.0], [-1.0, 0.0], [0.0, -1.0]]
    assert of_turns(Grpo(by_turn=True), *group) == [pytest.approx(each) for each in expected]


def test_leave_one_out_compares_with_the_others_at_the_turn() -> None:
    group = [rollout(3.0, [1.0, 1.0, 1.0]), rollout(1.0, [0.0, 1.0]), rollout(2.0, [2.0, 0.0])]
    expected = [[1.5, 1.5, 0.0], [-1.5, 0.0], [0.0, -1.5]]
    assert of_turns(Rloo(by_turn=True), *group) == [pytest.approx(each) for each in expected]
    assert of_turns(Grpo(leave_one_out=True, by_turn=True), *group) == [pytest.approx(each) for each in expected]


def silent(num_turns: int, total: float = 0.0) -> Rollout:
    """Return a rollout none of whose turns was given a reward."""
    played = rollout(total, [1.0] * num_turns)
    return replace(played, samples=(replace(played.samples[0], turns=()),))


def test_a_rollout_whose_turns_earned_nothing_is_compared_at_every_turn() -> None:
    group = [rollout(2.0, [2.0, 0.0]), rollout(1.0, [0.0, 1.0]), rollout(0.0, [0.0, 0.0])]
    expected = [[1.0, -1 / 3], [0.0, 2 / 3], [-1.0, -1 / 3]]
    assert of_turns(Grpo(by_turn=True), *group) == [pytest.approx(each) for each in expected]
    assert of_turns(Grpo(by_turn=True), *group[:2], silent(2)) == [pytest.approx(each) for each in expected]


@pytest.mark.parametrize("last", [rollout(3.0, [1.0, 1.0, 0.5]), rollout(1.5, [1.5, 1.5]), silent(2, total=1.0)])
def test_turns_that_do_not_add_up_leave_the_credit_to_the_rollout(last: Rollout) -> None:
    """What `verifiers` writes into the turns of a group is a multiple of the reward."""
    group = [rollout(1.0, [0.0, 1.0]), rollout(2.0, [2.0, 0.0]), last]
    assert last.earned_turns is None
    assert of_turns(Rloo(by_turn=True), *group) == of_turns(Rloo(), *group)


@pytest.mark.parametrize(
    "rewards", [[0.1, 0.2, 0.3], [0.1 + 0.2, -0.3], [1e9, 1e-9], list(np.asarray([0.1, 0.7], np.float32).astype(float))]
)
def test_rounding_does_not_keep_turns_from_adding_up(rewards: list[float]) -> None:
    total = float(np.float32(sum(rewards[::-1])))
    assert rollout(total, rewards).earned_turns is not None


def test_what_is_taken_off_a_reward_is_taken_off_its_last_turn() -> None:
    group = [rollout(2.0, [2.0, 0.0]), rollout(1.0, [0.0, 1.0]).penalised(0.5)]
    assert [turn.reward for turn in group[1].samples[0].turns] == [0.0, 0.5] and group[1].reward == 0.5
    assert of_turns(Grpo(by_turn=True), *group) == [[0.75, -0.25], [-0.75, 0.25]]
    overlong = Grpo(by_turn=True, overlong=OverlongPenalty(max_tokens=4, buffer_tokens=2))
    assert of_turns(overlong, rollout(2.0, [2.0, 0.0]), rollout(1.0, [1.0])) == [[0.0, 0.0], [0.0]]


def test_what_is_taken_off_a_rollout_without_rewards_of_turns_leaves_its_group_its_turns() -> None:
    """A rollout that ended early earned nothing at any turn, and the penalty at its last one."""
    punishes = FilterConfig.model_validate({"type": "truncated", "action": "penalise", "penalty": 0.5})
    cut = replace(silent(2), is_truncated=True)
    found = of_turns(Filtered(Grpo(by_turn=True), [punishes]), rollout(2.0, [2.0, 0.0]), cut)
    assert found == [[1.25, 0.25], [-1.25, -0.25]]


def test_turns_are_counted_over_all_samples_of_a_rollout() -> None:
    whole, split = rollout(3.0, [1.0, 0.0, 2.0]), rollout(3.0, [1.0, 0.0], [2.0])
    other = rollout(0.0, [0.0, 0.0, 0.0])
    assert of_turns(Grpo(by_turn=True), whole, other)[0] == of_turns(Grpo(by_turn=True), split, other)[0]


def test_a_reward_that_only_the_end_gives_is_the_same_for_every_turn() -> None:
    """As without turns, but for those who came so far: here all did."""
    group = [rollout(1.0, [0.0, 0.0]), rollout(0.0, [0.0, 0.0])]
    silent = [rollout(1.0, []), rollout(0.0, [])]
    assert of_turns(Grpo(by_turn=True), *group) == [[0.5, 0.5], [-0.5, -0.5]]
    assert of_turns(Grpo(by_turn=True), *silent) == of_turns(Grpo(), *silent) == [[0.5], [-0.5]]


def test_the_rollouts_credit_is_the_default() -> None:
    group = [rollout(3.0, [1.0, 2.0]), rollout(1.0, [1.0, 0.0])]
    assert of_turns(Grpo(), *group) == [[1.0, 1.0], [-1.0, -1.0]]


def test_equal_rewards_and_turns_give_exactly_no_advantage() -> None:
    group = [rollout(0.1 + 0.2, [0.1, 0.2])] * 3
    assert of_turns(Grpo(by_turn=True), *group) == [[0.0, 0.0]] * 3


def test_whitening_keeps_the_differences_between_turns() -> None:
    group = [rollout(2.0, [2.0, 0.0]), rollout(1.0, [0.0, 1.0])]
    algorithm = ReinforcePlusPlus(by_turn=True)
    items = [
        Credited(rollout=played, sample=played.samples[0], credit=credit, num_tokens=6)
        for played, [credit] in zip(group, algorithm.credit(group), strict=True)
    ]
    rows = [final.advantages.reshape(2, 3)[:, 1] for final in algorithm.finish(items)]
    values = np.repeat([0.5, -0.5, -0.5, 0.5], 2)  # to go: (2, 0) and (1, 1)
    expected = (values / np.sqrt(values.var(ddof=1) + 1e-8))[::2]
    np.testing.assert_allclose(np.concatenate(rows), expected, rtol=1e-6)


def test_the_gradient_is_that_of_the_expected_reward_by_enumeration() -> None:
    """Two turns of two actions, float64: the sum over all groups is the gradient of the expected reward."""
    policy = np.array([0.3, 0.7])
    first, second = np.array([1.0, 0.0]), np.array([[0.0, 2.0], [0.5, -1.0]])
    outcomes = [(a, b, policy[a] * policy[b], float(first[a] + second[a, b])) for a in (0, 1) for b in (0, 1)]

    def score(action: int) -> np.ndarray:
        return np.eye(2)[action] - policy

    exact = sum(p * (score(a) + score(b)) * reward for a, b, p, reward in outcomes)
    estimate = np.zeros(2)
    for one in outcomes:
        for two in outcomes:
            pair = [rollout(reward, [first[a], second[a, b]]) for a, b, _, reward in (one, two)]
            advantages = of_turns(Rloo(by_turn=True), *pair)
            for (a, b, _, _), (at_first, at_second) in zip((one, two), advantages, strict=True):
                estimate += one[2] * two[2] / 2 * (score(a) * at_first + score(b) * at_second)
    np.testing.assert_allclose(estimate, exact, atol=1e-7)  # advantages are float32
