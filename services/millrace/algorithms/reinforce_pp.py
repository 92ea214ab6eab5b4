"""REINFORCE++ with a baseline (arXiv 2501.03262, as verl's `reinforce_plus_plus_baseline`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.algorithms.base import Credit, Credited, ScalarAdvantage

EPSILON = 1e-8
"""Added to the variance, as verl's `masked_whiten` does."""


class ReinforcePlusPlus(ScalarAdvantage):
    """A_i = r_i - mean(r) of the group, then whitened over all sampled tokens of the batch: mean 0, variance 1.

    Whitening over tokens means that a long rollout counts more in mean and variance (unbiased) than a short one.
    """

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group before whitening, float64 [G]."""
        return rewards - rewards.mean()

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Whiten the advantages of all sampled tokens of the batch."""
        masks = [item.sampled for item in batch]
        rows = [item.credit.advantages[: item.num_tokens].astype(np.float64) for item in batch]
        tokens = np.concatenate([row[mask] for row, mask in zip(rows, masks, strict=True)]) if rows else np.zeros(0)
        if len(tokens) < 2:
            return super().finish(batch)
        mean, scale = tokens.mean(), 1.0 / np.sqrt(tokens.var(ddof=1) + EPSILON)
        return [
            replace(item.credit, advantages=np.where(mask, (row - mean) * scale, 0.0).astype(np.float32))
            for item, row, mask in zip(batch, rows, masks, strict=True)
        ]
