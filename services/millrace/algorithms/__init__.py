"""Algorithms: from a group's rewards to per-token credit, one small file each; the trainer never knows which ran."""

from millrace.algorithms.base import Algorithm, Credit
from millrace.algorithms.grpo import Grpo
from millrace.algorithms.opd import Opd

ALGORITHMS: dict[str, type[Algorithm]] = {"grpo": Grpo, "opd": Opd}
"""From `[orchestrator.algo] type` to the class. A new algorithm is one file, one line here, one test."""

__all__ = ["ALGORITHMS", "Algorithm", "Credit", "Grpo", "Opd"]
