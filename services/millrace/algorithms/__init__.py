"""Algorithms: from rewards to per-token credit, one small file each; the trainer never knows which ran."""

from millrace.algorithms.base import Algorithm, Credit, Credited, ScalarAdvantage
from millrace.algorithms.grpo import Grpo
from millrace.algorithms.max_rl import MaxRl
from millrace.algorithms.opd import Opd
from millrace.algorithms.opo import Opo
from millrace.algorithms.reinforce_pp import ReinforcePlusPlus
from millrace.algorithms.rloo import Rloo

ADVANTAGES: dict[str, type[ScalarAdvantage]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "opo": Opo,
    "reinforce_pp": ReinforcePlusPlus,
    "max_rl": MaxRl,
}
"""Those that compare rewards, which an environment may have one of its own of (`[[orchestrator.env]] algo`)."""
ALGORITHMS: dict[str, type[Algorithm]] = {**ADVANTAGES, "opd": Opd}
"""From `[orchestrator.algo] type` to the class. A new algorithm is one file, one line here, one test."""

__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "Algorithm",
    "Credit",
    "Credited",
    "Grpo",
    "MaxRl",
    "Opd",
    "Opo",
    "ReinforcePlusPlus",
    "Rloo",
    "ScalarAdvantage",
]
