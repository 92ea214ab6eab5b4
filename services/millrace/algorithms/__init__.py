"""Algorithms: from rewards to per-token credit, one small class each; the trainer never knows which ran."""

from collections.abc import Mapping
from typing import Any

from millrace.algorithms.advantages import (
    Baselines,
    Custom,
    Echo,
    Grpo,
    HierarchicalGrpo,
    MaxRl,
    Opd,
    Opo,
    Rae,
    ReinforcePlusPlus,
    Rloo,
)
from millrace.algorithms.base import (
    Algorithm,
    Credit,
    Credited,
    Filtered,
    RewardRanges,
    ScalarAdvantage,
    Thresholded,
    count_found,
)
from millrace.config.sections.algo import AdvantageConfig
from millrace.config.sections.orchestrator import OrchestratorConfig
from millrace.custom_code import CustomCode

ADVANTAGES: dict[str, type[ScalarAdvantage]] = {
    "grpo": Grpo,
    "rloo": Rloo,
    "opo": Opo,
    "reinforce_pp": ReinforcePlusPlus,
    "max_rl": MaxRl,
    "echo": Echo,
}
"""Algorithms with a formula over rewards; an environment may have its own one of them (`[[orchestrator.env]] algo`)."""
PER_AGENT: dict[str, type[Rae | HierarchicalGrpo]] = {"rae": Rae, "hierarchical_grpo": HierarchicalGrpo}
"""Algorithms that give each trained agent of a rollout its own advantage; an environment may have one of them, too."""
ALGORITHMS: dict[str, type[Algorithm]] = {**ADVANTAGES, **PER_AGENT, "opd": Opd, "opsd": Opd}
"""From `[orchestrator.algo] type` to the class. A new algorithm is one class, one line here, one test."""


def make_algorithms(settings: OrchestratorConfig, code: CustomCode) -> dict[str, Algorithm]:
    """Make and return the algorithm of each environment, by the environment's name.

    Environments without an algorithm of their own share the run's. An algorithm is wrapped in the run's filters and in
    the environment's `min_abs_advantage`, where the config has them. Imports the user's functions as far as `code`
    allows, and tries them; raises InvalidSpecError if one is unusable.
    """

    ranges = RewardRanges.of(settings.env)

    def made(config: AdvantageConfig, classes: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm of `config`, wrapped in the run's filters.

        `classes` are those that its type may name.
        """
        if config.type == "custom":
            algorithm: Algorithm = Custom.load(config, code)
        elif config.type == "max_rl":
            algorithm = MaxRl(ranges=ranges)
        else:
            algorithm = classes[config.type].from_config(config)
        return Filtered(algorithm, settings.filters) if settings.filters else algorithm

    shared = made(settings.algo, ALGORITHMS)
    own = {**ADVANTAGES, **PER_AGENT}
    algorithms = {env.name: made(env.algo, own) if env.algo else shared for env in settings.env}
    cut: dict[tuple[int, float], Algorithm] = {}  # environments that share one and its bound are finished together
    for env in settings.env:
        if least := env.min_abs_advantage:
            algorithm = algorithms[env.name]
            algorithms[env.name] = cut.setdefault((id(algorithm), least), Thresholded(algorithm, least))
    return algorithms


__all__ = [
    "ADVANTAGES",
    "ALGORITHMS",
    "PER_AGENT",
    "Algorithm",
    "Baselines",
    "Credit",
    "Credited",
    "Custom",
    "Echo",
    "Filtered",
    "Grpo",
    "HierarchicalGrpo",
    "MaxRl",
    "Opd",
    "Opo",
    "Rae",
    "ReinforcePlusPlus",
    "RewardRanges",
    "Rloo",
    "ScalarAdvantage",
    "Thresholded",
    "count_found",
    "make_algorithms",
]
