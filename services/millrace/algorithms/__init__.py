"""Algorithms: from a group's rewards to per-token credit. One small file each; the trainer never knows which one ran."""

from millrace.algorithms.base import Algorithm, Credit
from millrace.algorithms.grpo import Grpo

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": Grpo}
"""Registry: the name in `[orchestrator.algo] type` to the class. Adding an algorithm is one file, one line here, one test."""

__all__ = ["ALGORITHMS", "Algorithm", "Credit", "Grpo"]
