"""Rollouts that are left out, or compared with a lower reward, by what was sampled: `[[orchestrator.filters]]`.

Repetition as in MiniMax-M1 (arXiv:2506.13585, section 3.2), gibberish as in arXiv:2510.02387, section 5.2. What a
filter finds follows from the rollout alone, so a successor, a replay and a fork find the same.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from millrace.algorithms.base import Algorithm, Credit, Credited
from millrace.config.sections.buffer import FilterConfig
from millrace.rollouts.types import Rollout, Sample


class Filtered:
    """An algorithm that gets what the filters leave."""

    def __init__(self, algorithm: Algorithm, filters: Sequence[FilterConfig]) -> None:
        self._algorithm = algorithm
        self._filters = filters

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return the algorithm's credit; masked and dropped rollouts get credit that trains nothing.

        The algorithm does not see dropped rollouts, and sees penalised ones with the lower reward.
        """
        actions = [_actions(rollout, self._filters) for rollout in group]
        has_turns = any(rollout.has_turn_rewards for rollout in group)
        compared = [
            _penalised(rollout, self._filters, has_turns=has_turns)
            for rollout, action in zip(group, actions, strict=True)
            if "drop" not in action
        ]
        # Dropped rollouts have no part in the comparison; masked ones have, but train nothing. So credit comes for
        # fewer rollouts than the group has, and is taken in order.
        credits = iter(self._algorithm.credit(compared))
        credited = []
        for rollout, action in zip(group, actions, strict=True):
            own = [_nothing(sample) for sample in rollout.samples] if "drop" in action else next(credits)
            credited.append([_nothing(sample) for sample in rollout.samples] if "mask" in action else own)
        return credited

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return what the algorithm makes of the samples that train something; the others keep their credit.

        Rollouts have the penalised rewards that `credit` compared.
        """
        compared = [
            replace(item, rollout=_penalised(item.rollout, self._filters))
            for item in batch
            # What trains nothing must not shift means and deviations of the batch.
            if not item.credit.trains_nothing
        ]
        finished = iter(self._algorithm.finish(compared))
        return [item.credit if item.credit.trains_nothing else next(finished) for item in batch]


class Thresholded:
    """An algorithm whose tokens with an advantage of at most `least`, in absolute value, are not trained on.

    prime-rl's `min_abs_advantage` (2026-10). What an algorithm computes over a whole batch is computed of what is left.
    """

    def __init__(self, algorithm: Algorithm, least: float) -> None:
        self._algorithm = algorithm
        self._least = least

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return the algorithm's credit, with weight 0 for tokens with too small an advantage."""
        return [[self._cut(credit) for credit in credits] for credits in self._algorithm.credit(group)]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the algorithm's credit for samples that still train something, cut again; others keep their credit."""
        left = [item for item in batch if not item.credit.trains_nothing]
        finished = iter(self._algorithm.finish(left))
        return [item.credit if item.credit.trains_nothing else self._cut(next(finished)) for item in batch]

    def _cut(self, credit: Credit) -> Credit:
        is_kept = np.abs(credit.advantages) > self._least
        weights = np.ones_like(credit.advantages) if credit.rl_weights is None else credit.rl_weights
        return replace(
            credit,
            advantages=np.where(is_kept, credit.advantages, np.float32(0)),
            rl_weights=np.where(is_kept, weights, np.float32(0)),
        )


def count_found(rollouts: Sequence[Rollout], filters: Sequence[FilterConfig]) -> Counter[str]:
    """Count the rollouts that each filter finds, by type."""
    return Counter(each.type for rollout in rollouts for each in filters if _finds(each, rollout))


def _actions(rollout: Rollout, filters: Sequence[FilterConfig]) -> set[str]:
    return {each.action for each in filters if _finds(each, rollout)}


def _penalised(rollout: Rollout, filters: Sequence[FilterConfig], *, has_turns: bool = False) -> Rollout:
    """Return the rollout with its reward lowered by the penalties of the filters that find it."""
    penalty = sum(each.penalty for each in filters if each.action == "penalise" and _finds(each, rollout))
    return rollout.penalised(penalty, has_turns=has_turns) if penalty else rollout


def _finds(config: FilterConfig, rollout: Rollout) -> bool:
    if config.type == "truncated":
        return rollout.is_truncated
    finds = _repeats if config.type == "repetition" else _is_gibberish
    return any(finds(config, sample) for sample in rollout.samples)


def _repeats(config: FilterConfig, sample: Sample) -> bool:
    """Return whether `window` sampled tokens in a row were each likelier than the threshold."""
    is_sure = sample.inference_logprobs[sample.loss_mask == 1] > np.log(config.prob_threshold)
    if len(is_sure) < config.window:
        return False
    # A window of `window` sure tokens has a running sum that grows by exactly `window`.
    sums = np.concatenate([[0], np.cumsum(is_sure)])
    return bool((sums[config.window :] - sums[: -config.window] == config.window).any())


def _is_gibberish(config: FilterConfig, sample: Sample) -> bool:
    is_rare = sample.token_ids > config.token_id_threshold
    return bool((is_rare & (sample.inference_logprobs < config.logprob_threshold) & (sample.loss_mask == 1)).any())


def _nothing(sample: Sample) -> Credit:
    zeros = np.zeros(sample.num_tokens, dtype=np.float32)
    return Credit(advantages=zeros, rl_weights=zeros)
