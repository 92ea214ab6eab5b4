"""GRPO without the division by the standard deviation (Dr. GRPO, arXiv 2503.20783; PRIME-RL's `grpo`)."""

from collections.abc import Sequence

import numpy as np

from millrace.algorithms.base import Credit, broadcast
from millrace.config.sections.algo import AlgoConfig
from millrace.rollouts.types import Rollout


class Grpo:
    """A_i = r_i - mean(r), the same for every sampled token of rollout i."""

    @classmethod
    def from_config(cls, config: AlgoConfig) -> "Grpo":
        """There is nothing to set."""
        return cls()

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; a group of one gets advantage 0."""
        rewards = np.asarray([rollout.reward for rollout in group], dtype=np.float64)
        # Relative to the first one, equal rewards give zeros; the mean of their values may round to another value.
        rewards -= rewards[:1]
        advantages = rewards - rewards.mean() if len(rewards) else rewards
        return [
            [Credit(advantages=broadcast(float(advantage), sample)) for sample in rollout.samples]
            for rollout, advantage in zip(group, advantages, strict=True)
        ]
