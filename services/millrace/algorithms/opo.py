"""On-policy RL with the optimal baseline (OPO, arXiv 2505.23585)."""

import numpy as np

from millrace.algorithms.base import ScalarAdvantage


class Opo(ScalarAdvantage):
    """A_i = r_i - sum(l r) / sum(l), with l the rollouts' lengths in sampled tokens.

    The baseline of least variance, where the norm of a rollout's gradient grows with its length. `leave_one_out`
    belongs to grpo; the reward of rollout i is part of its own baseline here, as in the paper.
    """

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        return rewards - (lengths * rewards).sum() / max(lengths.sum(), 1)
