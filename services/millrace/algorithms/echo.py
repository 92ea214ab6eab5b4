"""ECHO: GRPO on what the policy sampled, and cross-entropy on what the environment says behind a reply.

Source: PRIME-RL's `echo` (2026-08 and later).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np

from millrace.algorithms.base import Credit
from millrace.algorithms.grpo import Grpo
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Rollout, Sample


class Echo(Grpo):
    """A_i as of `Grpo`; a token of a message of role k behind the first reply has the cross-entropy weight alpha_k.

    These are tokens that the policy did not sample, so each token is in one term of the loss at most. The trainer takes
    the mean of each term over its own tokens (`trainer.losses.total_loss`).
    """

    def __init__(self, *, weights: Mapping[str, float], **of_grpo: Any) -> None:
        """`weights` are by role; the rest is `Grpo`'s."""
        super().__init__(**of_grpo)
        self._weights = dict(weights)

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """As `[orchestrator.algo]` says."""
        return cls(weights=config.role_weights, **cls.options(config))

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; where rewards are equal, it is of what the environment said alone."""
        return [
            [
                replace(credit, ce_weights=self._observed(sample))
                for credit, sample in zip(credits, rollout.samples, strict=True)
            ]
            for rollout, credits in zip(group, super().credit(group), strict=True)
        ]

    def _observed(self, sample: Sample) -> np.ndarray | None:
        """Return the cross-entropy weights of a sample, float32 [T]; None where all are 0."""
        weights = np.zeros(sample.num_tokens, np.float32)
        for span in sample.roles:
            weights[span.start : span.end] = self._weights.get(span.role, 0.0)
        return weights if weights.any() else None
