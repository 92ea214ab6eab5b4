"""Maximum-likelihood RL: the deviation from the mean reward, divided by that mean (arXiv 2602.02710; PRIME-RL)."""

from collections.abc import Sequence
from typing import Self

import numpy as np

from millrace.algorithms.base import ScalarAdvantage
from millrace.algorithms.ranges import RewardRanges
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Rollout


class MaxRl(ScalarAdvantage):
    """A_i = (p_i - mean(p)) / mean(p), 0 for a group whose mean is not positive; p are shares of the reward's range.

    With the lowest and the highest reward alone it weights a task by the inverse of its pass rate, as the gradient of
    its log-likelihood. Rewards outside of their range have no such meaning: InvalidSpecError.
    """

    is_shift_invariant = False

    def __init__(self, *, ranges: RewardRanges | None = None) -> None:
        """`ranges`: of each environment; without them rewards are taken for shares."""
        super().__init__()
        self._ranges = ranges

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """For rewards that are shares."""
        return cls()

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros(len(rewards))

    def shaped_rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rewards as shares of their range, float64 [N]."""
        return super().shaped_rewards(rollouts) if self._ranges is None else self._ranges.shares(rollouts)
