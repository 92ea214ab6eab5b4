"""The ranges of rewards that `[[orchestrator.env]] reward_range` states, and rewards that are outside of theirs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from millrace.config.sections.environments import EnvConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.rollouts.types import Rollout, are_equal, reaches

WHOLE = (0.0, 1.0)
"""Where nothing is said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRanges:
    """Lowest and highest reward, by name of environment."""

    by_env: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @classmethod
    def of(cls, envs: Iterable[EnvConfig]) -> Self:
        """As the config has them."""
        return cls(by_env={env.name: (env.reward_range[0], env.reward_range[1]) for env in envs})

    def shares(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """The rewards as shares of their ranges, float64 [N] of 0 to 1. InvalidSpecError names one outside of it."""
        shares = np.asarray([self._share(rollout) for rollout in rollouts], dtype=np.float64)
        outside = [at for at, share in enumerate(shares) if not (reaches(share, 0.0) and reaches(-share, -1.0))]
        if outside:
            rollout = rollouts[outside[0]]
            low, high = self.by_env.get(rollout.env, WHOLE)
            message = (
                f"is [{low:g}, {high:g}] for environment {rollout.env!r}, and the reward of ordinal {rollout.ordinal}, "
                f"member {rollout.member} is {rollout.reward:g}: `buffer.online_difficulty_filtering` and max_rl have "
                "to know the lowest and the highest reward there is; set it"
            )
            value = f"{[low, high]}"
            wrong = Violation(field="orchestrator.env.reward_range", value=value, message=message, source="a rollout")
            raise InvalidSpecError([wrong], reason="REWARD_OUT_OF_RANGE")
        return np.clip(shares, 0.0, 1.0)

    def extreme(self, rollouts: Sequence[Rollout]) -> str:
        """`easy` for a group whose rewards are all the highest, `hard` if all are the lowest; else ""."""
        share = float(self.shares(rollouts)[0])
        if not are_equal([rollout.reward for rollout in rollouts]):
            return ""
        if reaches(share, 1.0):
            return "easy"
        return "hard" if reaches(-share, 0.0) else ""

    def _share(self, rollout: Rollout) -> float:
        low, high = self.by_env.get(rollout.env, WHOLE)
        return (rollout.reward - low) / (high - low)
