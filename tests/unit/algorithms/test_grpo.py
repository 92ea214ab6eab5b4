import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.algorithms import ALGORITHMS, Grpo
from millrace.rollouts.types import PolicySpan, Purpose, Rollout, RolloutStatus, Sample


def rollout(reward: float) -> Rollout:
    sample = Sample(
        token_ids=np.arange(4, dtype=np.int32),
        loss_mask=np.array([0, 1, 0, 1], dtype=np.uint8),
        inference_logprobs=np.array([0, -1, 0, -2], dtype=np.float32),
        policy_spans=(PolicySpan(lineage=0, version=0, start=1, end=4),),
    )
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
        samples=(sample, sample),
        reward=reward,
    )


def test_advantage_is_reward_minus_group_mean_without_deviation() -> None:
    credits = Grpo().credit([rollout(0.0), rollout(0.5), rollout(2.5)])
    assert [float(credit[0].advantages[1]) for credit in credits] == pytest.approx([-1.0, -0.5, 1.5])


def test_every_sample_of_a_rollout_gets_its_advantage_on_sampled_tokens_only() -> None:
    (first, second), _ = Grpo().credit([rollout(1.0), rollout(0.0)])
    np.testing.assert_array_equal(first.advantages, np.float32([0, 0.5, 0, 0.5]))
    np.testing.assert_array_equal(second.advantages, first.advantages)
    assert first.rl_weights is None and first.ce_weights is None


def test_a_group_of_one_has_no_advantage() -> None:
    ((credit, _),) = Grpo().credit([rollout(3.0)])
    assert not credit.advantages.any()


def test_the_registry_names_grpo() -> None:
    assert ALGORITHMS["grpo"] is Grpo


@given(reward=st.floats(-1e6, 1e6), size=st.integers(1, 70))
def test_equal_rewards_give_exactly_no_advantage(reward: float, size: int) -> None:
    for group in Grpo().credit([rollout(reward)] * size):
        assert not any(credit.advantages.any() for credit in group)


@pytest.mark.parametrize("size", [6, 7, 12])
def test_groups_of_equal_rewards_are_those_without_advantages(size: int) -> None:
    for tenths in range(1, 100):
        credits = Grpo().credit([rollout(tenths / 10)] * (size - 1) + [rollout(tenths / 10 + 1e-6)])
        assert all(credit[0].advantages[1] != 0 for credit in credits)
