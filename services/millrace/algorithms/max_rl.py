"""Maximum-likelihood RL: the deviation from the mean reward, divided by that mean (arXiv 2602.02710; PRIME-RL)."""

import numpy as np

from millrace.algorithms.base import ScalarAdvantage


class MaxRl(ScalarAdvantage):
    """A_i = (r_i - mean(r)) / mean(r), 0 for a group whose mean is not positive.

    With rewards of 0 and 1 it weights a task by the inverse of its pass rate, as the gradient of its log-likelihood.
    """

    is_shift_invariant = False

    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group, float64 [G]."""
        mean = rewards.mean()
        return (rewards - mean) / mean if mean > 0 else np.zeros(len(rewards))
