"""The figures of an evaluation: reward with its standard error, pass@k, pass^k, the environment's own metrics."""

import math
from collections.abc import Sequence

import numpy as np

from millrace.orchestrator.play.play import Play
from millrace.rollouts.types import Rollout


def figures(plays: Sequence[Play], *, pass_threshold: float) -> dict[str, float]:
    """Everything but the mean reward, by name.

    `reward/sem` is the standard error over tasks, because rollouts of one task are not independent. pass@k and pass^k
    (k = 1, 2, 4, ... up to the rollouts of a task) are the unbiased estimates of "at least one of k passes" and "all
    of k pass"; tasks with fewer than k finished rollouts are left out of them.
    """
    found: dict[str, float] = {}
    played = [[rollout.reward for rollout in play.members.values()] for play in plays if play.members]
    means = [float(np.mean(rewards)) for rewards in played]
    if len(means) > 1:
        found["reward/sem"] = float(np.std(means, ddof=1) / math.sqrt(len(means)))
    counts = [(len(rewards), sum(reward >= pass_threshold for reward in rewards)) for rewards in played]
    k = 1
    while k <= max((size for size, _ in counts), default=0):
        usable = [(size, passed) for size, passed in counts if size >= k]
        found[f"pass@{k}"] = float(np.mean([pass_at_k(size, passed, k) for size, passed in usable]))
        found[f"pass^{k}"] = float(np.mean([math.comb(passed, k) / math.comb(size, k) for size, passed in usable]))
        k *= 2
    good = [rollout for play in plays for rollout in play.members.values()]
    if good:
        found["truncated"] = float(np.mean([rollout.is_truncated for rollout in good]))
        found["turns"] = float(np.mean([rollout.num_turns for rollout in good]))
        found["seconds"] = float(np.mean([rollout.seconds for rollout in good]))
    return {**env_metrics(good), **found}


def pass_at_k(size: int, passed: int, k: int) -> float:
    """Chance that k of `size` rollouts, `passed` of which pass, hold one that passes (drawn without replacement)."""
    return 1.0 - math.comb(size - passed, k) / math.comb(size, k)


def env_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each environment metric over the rollouts that have it."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {name: float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics])) for name in names}
