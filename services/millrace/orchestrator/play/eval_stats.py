"""The figures of an evaluation: reward with its standard error, pass@k, pass^k, the environment's own metrics."""

import math
from collections.abc import Sequence

import numpy as np

from millrace.orchestrator.play.play import Play
from millrace.rollouts.rewards import reaches
from millrace.rollouts.types import Rollout

_FIGURES = frozenset({"reward/sem", "truncated", "turns", "seconds"})
_Z95 = 1.959964
"""The normal distribution has 95 % of its mass within so many standard deviations."""


def figures(plays: Sequence[Play], *, pass_threshold: float) -> dict[str, float]:
    """Everything but the mean reward, by name.

    All of them are over the same rollouts, those that were asked for: one that failed has reward 0 and does not pass.
    `reward/sem` is the standard error over tasks, because rollouts of one task are not independent. pass@k and pass^k
    (k = 1, 2, 4, ... up to the rollouts of a task) are the unbiased estimates of "at least one of k passes" and "all
    of k pass" (Chen et al., 2021, https://arxiv.org/abs/2107.03374, equation 1). `pass@k/low` and `pass@k/high` are
    the bounds of its 95 % confidence interval. What only a finished rollout has (turns, seconds, whether it was
    truncated, the environment's own metrics) is a mean over those. An environment's metric with a name of ours is
    `env/<name>`.
    """
    found: dict[str, float] = {}
    played = [[rollout.reward for rollout in play.rollouts()] for play in plays]
    means = [sum(rewards) / play.group_size for rewards, play in zip(played, plays, strict=True)]
    if len(means) > 1:
        found["reward/sem"] = float(np.std(means, ddof=1) / math.sqrt(len(means)))
    counts = [
        (play.group_size, sum(reaches(reward, pass_threshold) for reward in rewards))
        for rewards, play in zip(played, plays, strict=True)
    ]
    k = 1
    while k <= max((size for size, _ in counts), default=0):
        usable = [(size, passed) for size, passed in counts if size >= k]
        chances = [pass_at_k(size, passed, k) for size, passed in usable]
        found[f"pass@{k}"] = float(np.mean(chances))
        low, high = confidence(chances, num_draws=sum(size // k for size, _ in usable))
        found[f"pass@{k}/low"], found[f"pass@{k}/high"] = low, high
        found[f"pass^{k}"] = float(np.mean([math.comb(passed, k) / math.comb(size, k) for size, passed in usable]))
        k *= 2
    good = [rollout for play in plays for rollout in play.members.values()]
    if good:
        found["truncated"] = float(np.mean([rollout.is_truncated for rollout in good]))
        found["turns"] = float(np.mean([rollout.num_turns for rollout in good]))
        found["seconds"] = float(np.mean([rollout.seconds for rollout in good]))
    own = {f"env/{name}" if _is_ours(name) else name: value for name, value in env_metrics(good).items()}
    return {**own, **found}


def _is_ours(name: str) -> bool:
    """Return whether it is the name of a figure, be it one that this evaluation has or not."""
    return name in _FIGURES or name.startswith(("pass@", "pass^"))


def pass_at_k(size: int, passed: int, k: int) -> float:
    """Chance that k of `size` rollouts, `passed` of which pass, hold one that passes (drawn without replacement)."""
    return 1.0 - math.comb(size - passed, k) / math.comb(size, k)


def confidence(chances: Sequence[float], *, num_draws: int) -> tuple[float, float]:
    """The 95 % confidence interval of the mean over tasks of a chance: Wilson's, which also holds near 0 and 1.

    Its number of trials is what the spread over tasks amounts to: at least one a task, and at most `num_draws`, the
    independent draws behind all of them, because equal tasks have no spread at all.
    """
    mean, trials = float(np.mean(chances)), float(len(chances))
    if len(chances) > 1:
        spread = float(np.var(chances, ddof=1)) / len(chances)
        trials = max(trials, min(float(num_draws), mean * (1 - mean) / spread if spread > 0 else float(num_draws)))
    shrink = 1 + _Z95**2 / trials
    middle = (mean + _Z95**2 / (2 * trials)) / shrink
    half = _Z95 * math.sqrt(mean * (1 - mean) / trials + _Z95**2 / (4 * trials**2)) / shrink
    return max(0.0, middle - half), min(1.0, middle + half)


def env_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Mean of each environment metric over the rollouts that have it."""
    names = sorted({name for rollout in rollouts for name in rollout.metrics})
    return {name: float(np.mean([r.metrics[name] for r in rollouts if name in r.metrics])) for name in names}
