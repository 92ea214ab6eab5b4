"""Rewards that are equal but for rounding are equal, everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from millrace.algorithms import ADVANTAGES, Custom, HierarchicalGrpo, MaxRl, RewardRanges, ScalarAdvantage
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Purpose, Rollout, RolloutStatus, Sample, add_up, are_equal, reaches


def rollout(reward: float) -> Rollout:
    mask = np.ones(3, np.uint8)
    sample = Sample(token_ids=np.arange(3, dtype=np.int32), loss_mask=mask, inference_logprobs=np.zeros(3, np.float32))
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
        samples=(sample,),
        reward=reward,
    )


def advantages(algorithm: ScalarAdvantage | HierarchicalGrpo, rewards: list[float]) -> list[float]:
    credits = algorithm.credit([rollout(reward) for reward in rewards])
    return [float(credit.advantages[0]) for [credit] in credits]


@pytest.mark.parametrize("name", [*ADVANTAGES, "hierarchical_grpo"])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e12])
def test_equal_but_for_rounding_gives_no_advantage_at_any_scale(name: str, scale: float) -> None:
    kind = {**ADVANTAGES, "hierarchical_grpo": HierarchicalGrpo}[name]
    algorithm = kind.from_config(AdvantageConfig(type="grpo"))
    if name == "max_rl":
        algorithm = MaxRl(ranges=RewardRanges(by_env={"e": (0.0, scale)}))
    rewards = [0.3 * scale, (0.1 + 0.2) * scale, 0.3 * scale]
    assert rewards[0] != rewards[1] and advantages(algorithm, rewards) == [0.0] * 3
    assert any(advantages(algorithm, [0.3 * scale, 0.3 * scale, 0.6 * scale]))


def test_a_function_of_the_users_is_told_that_they_are_equal() -> None:
    seen: list[np.ndarray] = []

    def keep(rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        seen.append(rewards)
        return rewards

    custom = Custom(keep, import_path="a:b", kwargs={})
    advantages(custom, [0.3, 0.1 + 0.2])
    advantages(custom, [0.3, 0.4])
    assert [each.tolist() for each in seen] == [[0.3, 0.3], [0.3, 0.4]]


@pytest.mark.parametrize(
    ("rewards", "is_equal"),
    [
        ([], True),
        ([1.0], True),
        ([0.0, 0.0], True),
        ([0.3, 0.1 + 0.2], True),
        ([1e8, 1e8 + 0.01], False),
        ([0.0, 1e-300], False),
        ([1e-30, 2e-30], False),
        ([-1.0, 1.0], False),
        ([1.0, 1.0 - 1e-9], False),
    ],
)
def test_the_tolerance_is_relative_to_the_groups_own_scale(rewards: list[float], is_equal: bool) -> None:
    assert are_equal(rewards) is is_equal
    assert are_equal([-reward for reward in rewards]) is is_equal


def test_parts_and_thresholds() -> None:
    assert add_up([], 0.0) and add_up([0.7, 0.2, 0.1], 1.0) and not add_up([1.0, 1.0], 1.0) and not add_up([], 1e-9)
    assert reaches(0.7 + 0.2 + 0.1, 1.0) and not reaches(0.99, 1.0)
    assert replace(rollout(0.0)).earned_turns is not None
