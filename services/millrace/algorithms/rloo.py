"""REINFORCE leave-one-out (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740)."""

import numpy as np

from millrace.algorithms.base import ScalarAdvantage


class Rloo(ScalarAdvantage):
    """A_i = r_i - mean of the rewards of the other rollouts of the task = G / (G - 1) * (r_i - mean(r))."""

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        return (rewards - rewards.mean()) * len(rewards) / (len(rewards) - 1)
