"""What the rollouts of a batch were, as metrics of its step: why a reward is what it is.

Where prime-rl has the metric, the name is prime-rl's (docs/metrics.md).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from millrace.orchestrator.play.durations import StaleShare
from millrace.orchestrator.play.play import Play
from millrace.rollouts.rewards import reaches
from millrace.rollouts.types import CUT_METRIC, Rollout

MAX_NAMES = 64
"""Functions of one environment, and reasons to stop, that become metrics; the rest are left out, by name."""


def batch_metrics(
    groups: Sequence[Play], *, seq_len: int, stale: Mapping[str, int], shares: Mapping[str, StaleShare]
) -> dict[str, float]:
    """Return the metrics of the groups that a batch is made of.

    Samples are trained on up to `seq_len` tokens. `stale` are the groups dropped as stale since the batch before, by
    environment; `shares` those of the last groups.
    """
    by_env: dict[str, list[Play]] = defaultdict(list)
    for group in groups:
        by_env[group.task.env].append(group)
    values = _whole(groups)
    lengths = [sample.num_tokens for group in groups for each in group.rollouts() for sample in each.samples]
    values["seq_len/cut_samples"] = float(sum(length > seq_len for length in lengths))
    values["seq_len/cut_tokens"] = float(sum(max(length - seq_len, 0) for length in lengths))
    cut_by_envs = (each.metrics.get(CUT_METRIC, 0.0) for group in groups for each in group.rollouts())
    values["seq_len/env_cut_tokens"] = sum(cut_by_envs)
    for env, members in sorted(by_env.items()):
        values |= _of_environment(env, members)
    for env, count in sorted(stale.items()):
        values[f"batch/dropped/stale/{env}"] = float(count)
    for env, share in shares.items():
        values[f"stale_share/{env}/mean"] = share.share
        values[f"stale_share/{env}/slowest_quarter"] = share.slow_share
    return values


def _whole(groups: Sequence[Play]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts()]
    values = {f"{name}/all": value for name, value in _solved(groups).items()}
    values["is_truncated/all/mean"] = _mean(rollout.is_truncated for rollout in rollouts)
    turns = [float(rollout.num_turns) for rollout in rollouts]
    sampled = [float(rollout.num_loss_tokens) for rollout in rollouts]
    for name, found in (("num_turns", turns), ("decode_len", sampled)):
        values |= {f"{name}/all/mean": _mean(found), f"{name}/all/max": max(found), f"{name}/all/min": min(found)}
    return values


def _of_environment(env: str, groups: Sequence[Play]) -> dict[str, float]:
    rollouts = [rollout for group in groups for rollout in group.rollouts()]
    rewards = np.asarray([rollout.reward for rollout in rollouts], np.float64)
    values = {
        f"reward/{env}/mean": float(rewards.mean()),
        f"reward/{env}/std": float(rewards.std()),
        f"reward/{env}/min": float(rewards.min()),
        f"reward/{env}/max": float(rewards.max()),
        f"reward/{env}/group_std": _mean(float(np.std([each.reward for each in group.rollouts()])) for group in groups),
        f"is_truncated/{env}/mean": _mean(rollout.is_truncated for rollout in rollouts),
        f"num_turns/{env}/mean": _mean(float(rollout.num_turns) for rollout in rollouts),
        f"time/rollout/{env}/mean": _mean(rollout.seconds for rollout in rollouts),
    }
    values |= {f"{name}/{env}": value for name, value in _solved(groups).items()}
    for name, value in _functions(rollouts).items():
        values[f"metrics/{env}/{name}"] = value
    stops = Counter(rollout.stop_condition or "unknown" for rollout in rollouts)
    for name, count in stops.most_common(MAX_NAMES):
        values[f"stop_condition/{env}/{name}"] = count / len(rollouts)
    return values


def _functions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of each reward function and metric over the rollouts that have it."""
    found: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            found[name].append(value)
    return {name: _mean(found[name]) for name in sorted(found)[:MAX_NAMES]}


def _solved(groups: Sequence[Play]) -> dict[str, float]:
    """Return shares of groups, but for rounding: all rollouts have reward 1 or more, 0 or less, or the same."""
    rewards = [[rollout.reward for rollout in group.rollouts()] for group in groups]
    return {
        "solve_all": _mean(all(reaches(reward, 1.0) for reward in each) for each in rewards),
        "solve_none": _mean(all(reaches(-reward, 0.0) for reward in each) for each in rewards),
        "zero_advantage": _mean(reaches(min(each), max(each)) for each in rewards),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(np.fromiter(values, np.float64)))
