"""What numbers rewards may be, when two of them are the same, and when one reaches a threshold.

Rewards are sums of weighted parts in float64, so equal ones may differ by rounding: 0.7 + 0.2 + 0.1 is not 1. Every
place that asks whether rewards are equal, or reach a bound, asks here.
"""

from collections.abc import Sequence

import numpy as np

MAX_REWARD = 1e15
"""Largest magnitude of a reward that is trained on: its square, and sums of it, are still numbers in float32."""
EQUALITY = 1e-12
"""Rewards are equal if they differ by at most this times the largest magnitude among them: some thousand roundings of a
float64. A difference that means something is larger, also where all rewards have a large part in common."""
_TOLERANCE = 1e-6
"""Relative to the threshold, and at least so much: beyond float32's rounding, below every difference that is meant."""


def are_equal(rewards: Sequence[float] | np.ndarray) -> bool:
    """Whether all rewards of a group are the same but for rounding, relative to their own scale."""
    values = np.asarray(rewards, dtype=np.float64)
    return not values.size or bool(np.ptp(values) <= EQUALITY * np.abs(values).max())


def reaches(reward: float, threshold: float) -> bool:
    """Return whether a reward is a threshold or more, but for rounding."""
    return reward >= threshold - _TOLERANCE * max(1.0, abs(threshold))


def add_up(parts: Sequence[float], total: float) -> bool:
    """Whether parts are those of a whole but for rounding, that of float32 too, relative to the largest of them all."""
    scale = max([abs(total), *(abs(part) for part in parts)])
    return abs(sum(parts) - total) <= _TOLERANCE * scale
