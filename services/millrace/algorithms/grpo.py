"""GRPO (arXiv 2402.03300), by default without the division by the deviation (Dr. GRPO, arXiv 2503.20783; PRIME-RL)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, Self

import numpy as np

from millrace.algorithms.base import Credit, Credited, ScalarAdvantage
from millrace.algorithms.overlong import OverlongPenalty
from millrace.config.sections.algo import AdvantageConfig

EPSILON = 1e-6
"""Added to every deviation, as verl and SkyRL do."""


class Grpo(ScalarAdvantage):
    """A_i = r_i - mean(r), the same for every sampled token of rollout i.

    `std_norm` divides by the deviation of the group's rewards (unbiased, ddof 1) or of those of the whole batch;
    `leave_one_out` compares with the mean of the others: times G / (G - 1).
    """

    def __init__(
        self,
        *,
        std_norm: Literal["none", "group", "batch"] = "none",
        leave_one_out: bool = False,
        overlong: OverlongPenalty | None = None,
        by_turn: bool = False,
    ) -> None:
        super().__init__(overlong=overlong, by_turn=by_turn)
        self._std_norm, self._leave_one_out = std_norm, leave_one_out

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """As `[orchestrator.algo]` says."""
        return cls(**cls.options(config))

    @staticmethod
    def options(config: AdvantageConfig) -> dict[str, Any]:
        """Return the arguments of the constructor that `[orchestrator.algo]` names."""
        return {
            "std_norm": config.std_norm,
            "leave_one_out": config.leave_one_out,
            "overlong": OverlongPenalty.from_config(config),
            "by_turn": config.credit == "turn",
        }

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        advantages = rewards - rewards.mean()
        if self._leave_one_out:
            advantages = advantages * len(rewards) / (len(rewards) - 1)
        if self._std_norm == "group":
            advantages = advantages / (rewards.std(ddof=1) + EPSILON)
        return advantages

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Divide by the deviation of the rewards of the batch's rollouts, if asked for."""
        rollouts = {(item.rollout.ordinal, item.rollout.member): item.rollout for item in batch}
        if self._std_norm != "batch" or len(rollouts) < 2:
            return super().finish(batch)
        scale = 1.0 / (self.shaped_rewards(list(rollouts.values())).std(ddof=1) + EPSILON)
        return [replace(item.credit, advantages=scaled(item.credit.advantages, scale)) for item in batch]


def scaled(advantages: np.ndarray, scale: float) -> np.ndarray:
    """Multiply in float64, and round once: float32 [T]."""
    return (advantages.astype(np.float64) * scale).astype(np.float32)
