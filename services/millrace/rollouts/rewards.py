"""Comparing rewards, which are sums of weighted terms: 0.7 + 0.2 + 0.1 is not 1.0 in binary floating point."""

_TOLERANCE = 1e-6
"""Relative to the threshold, and at least so much: beyond float32's rounding, below every difference that is meant."""


def reaches(reward: float, threshold: float) -> bool:
    """Return whether a reward is a threshold or more, but for rounding."""
    return reward >= threshold - _TOLERANCE * max(1.0, abs(threshold))
