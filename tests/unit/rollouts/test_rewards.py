"""Rewards are compared but for rounding."""

import pytest

from millrace.orchestrator.play.pools import Pool, Thresholds
from millrace.rollouts.types import reaches


@pytest.mark.parametrize(
    ("reward", "threshold", "expected"),
    [
        (0.7 + 0.2 + 0.1, 1.0, True),
        (0.1 + 0.1 + 0.1 - 0.3, 0.0, True),
        (0.999, 1.0, False),
        (99.9999999, 100.0, True),
        (99.99, 100.0, False),
        (-1.0, -1.0, True),
        (-1.01, -1.0, False),
    ],
)
def test_a_reward_reaches_a_threshold_but_for_rounding(reward: float, threshold: float, expected: bool) -> None:
    assert reaches(reward, threshold) is expected


def test_sums_of_weights_move_tasks_to_their_pools() -> None:
    thresholds = Thresholds(easy=1.0, hard=0.0)
    assert thresholds.pool(0.7 + 0.2 + 0.1) is Pool.EASY
    assert thresholds.pool(0.1 + 0.2 - 0.3) is Pool.HARD  # 5.6e-17
    assert thresholds.pool(0.01) is Pool.NORMAL and thresholds.pool(0.99) is Pool.NORMAL
