"""What every algorithm implements: groups in, per-token streams out. Pure numpy, no I/O, nothing kept between batches.

An algorithm has two hooks. `credit` sees one group of rollouts of the same task; `finish` sees every sample of a batch,
for what is computed over a whole batch. Both run where the batch is cut, so the log holds what came of them, and the
trainer, a replay and a fork never compute them again.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self, TypeAlias

import numpy as np

from millrace.config.sections.algo import AdvantageConfig
from millrace.config.sections.buffer import FilterConfig
from millrace.config.sections.environments import EnvConfig
from millrace.errors import InvalidSpecError, Violation
from millrace.rollouts.types import Rollout, Sample, Trace, TurnReward, are_equal, reaches

_Turns: TypeAlias = tuple[tuple[TurnReward, ...], ...]
"""Of each sample of a rollout its turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Per-token streams of one sample of T tokens.

    `advantages` is float32 [T], 0 where the policy did not sample. `rl_weights` and `ce_weights` are float32 [T] or
    None (None: weight 1 where the mask is 1, and 0, respectively), see PRIME-RL's three loss components. `reference_kl`
    is set where the advantages are that times the log-ratio of a reference to the behaviour policy: the trainer then
    puts its own policy in the place of the latter.
    """

    advantages: np.ndarray
    rl_weights: np.ndarray | None = None
    ce_weights: np.ndarray | None = None
    reference_kl: float = 0.0

    @property
    def trains_nothing(self) -> bool:
        """Return whether no token is trained on: every weight of policy gradient and of cross-entropy is 0."""
        has_rl = self.rl_weights is None or bool(self.rl_weights.any())
        return not has_rl and (self.ce_weights is None or not self.ce_weights.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """A sample of a batch, with the credit that its group gave it. Its first `num_tokens` tokens are trained on."""

    rollout: Rollout
    sample: Sample
    credit: Credit
    num_tokens: int
    place: int = 0
    """Index of its trace in the rollout."""
    baseline: float = 0.0
    """What its trace's reward is compared with, where that is known before the batch."""

    @property
    def trace(self) -> Trace:
        """Return the trace that the sample was cut from."""
        return self.rollout.agent_traces[self.place]

    @property
    def trace_key(self) -> tuple[int, int, int]:
        """Return what identifies the sample's trace in the run: ordinal, member, and index in the rollout."""
        return self.rollout.ordinal, self.rollout.member, self.place

    @property
    def sampled(self) -> np.ndarray:
        """Return which of the trained tokens the policy sampled, bool [num_tokens]."""
        return self.sample.loss_mask[: self.num_tokens] == 1


class Algorithm(Protocol):
    """Turns rollouts into credit for each of their samples."""

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return, for each rollout of a group (the rollouts of one task) in order, one `Credit` per sample of it."""
        ...

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the final credit of every sample of a batch, in order.

        `batch` has the credit that its group gave each.
        """
        ...


# DAPO's soft punishment of responses that come near the limit (arXiv 2503.14476, equation 13).


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """0 up to `max_tokens - buffer_tokens` sampled tokens, from there linearly down to `-factor` at `max_tokens`."""

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self | None:
        """Make the penalty of long responses that the table `overlong` of an algorithm's config describes.

        None without that table.
        """
        table = config.overlong
        if table is None:
            return None
        return cls(max_tokens=table.max_tokens, buffer_tokens=table.buffer_tokens, factor=table.factor)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the penalties to add to the rewards, float64 [G] from `-factor` to 0.

        `lengths` are sampled tokens, int64 [G].
        """
        over = lengths - (self.max_tokens - self.buffer_tokens)
        return -self.factor * np.clip(over / self.buffer_tokens, 0.0, 1.0)


class ScalarAdvantage(ABC):
    """An algorithm that gives every sampled token of a rollout the same advantage, from rewards and lengths alone."""

    def __init__(self, *, overlong: OverlongPenalty | None = None, by_turn: bool = False) -> None:
        """Take `overlong`, the penalty of long responses (None: no penalty).

        With `by_turn` each turn gets its own advantage, if the environment rewards turns.
        """
        self._overlong, self._by_turn = overlong, by_turn

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that an algorithm's table of the config describes.

        Of the table, the overlong penalty and the unit of credit (rollout or turn) are read.
        """
        return cls(overlong=OverlongPenalty.from_config(config), by_turn=config.credit == "turn")

    @abstractmethod
    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group of G rollouts, float64 [G].

        `rewards` are float64 [G], relative to some constant that is the same for the whole group if
        `is_shift_invariant`; `lengths` are int64 [G], sampled tokens.
        """

    compares = True
    """Whether rewards are compared with each other, so that equal ones give advantage 0."""
    is_shift_invariant = True
    """Whether only differences of rewards count: they are then computed against the first."""

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample of each rollout of a group, with the rollout's or the turn's advantage on its
        tokens.

        Where the algorithm compares rewards, a single rollout and rollouts of equal rewards get advantage 0.
        """
        rewards = self.shaped_rewards(group)
        lengths = np.asarray([rollout.num_loss_tokens for rollout in group], dtype=np.int64)
        if self._by_turn and (turns := _turns_of(group)) is not None:
            return self._credit_turns(group, turns, rewards, lengths)
        return [
            [Credit(advantages=broadcast(float(advantage), sample)) for sample in rollout.samples]
            for rollout, advantage in zip(group, self._compared(rewards, lengths), strict=True)
        ]

    def _compared(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group's rewards, float64 [G], as `advantages` computes them.

        Equal rewards give zeros if the algorithm compares rewards. If only differences count, `advantages` gets rewards
        relative to the first. `rewards` are float64 [G], may be empty; `lengths` are sampled tokens, int64 [G].
        """
        if are_equal(rewards):
            # Equal rewards may differ by rounding: without this their standard deviation would divide noise by noise.
            if self.compares or not len(rewards):
                return np.zeros(len(rewards))
            rewards = np.full(len(rewards), rewards[0])
        # Relative to the first, small differences between large rewards keep their digits.
        return self.advantages(rewards - rewards[0] if self.is_shift_invariant else rewards, lengths)

    def _credit_turns(
        self, group: Sequence[Rollout], turns: Sequence[_Turns], rewards: np.ndarray, lengths: np.ndarray
    ) -> list[list[Credit]]:
        """Return credit with an advantage for every turn: of its reward to go, the sum of what it and later turns earn.

        `turns` has each rollout's turns by sample. `rewards` are the shaped ones of the rollouts, float64 [G], and
        `lengths` their sampled tokens. A turn is compared with the same turn of the group's other rollouts, a baseline
        of the time step (Greensmith et al. 2004); one without any gets 0. What was earned before a turn cannot be its
        doing (the policy gradient theorem, Sutton et al. 1999).
        """
        to_go = [
            # The shaping of the whole reward (length penalties) applies to every turn, since it cannot be assigned to
            # one.
            _to_go(own) + (reward - rollout.reward)
            for rollout, own, reward in zip(group, turns, rewards, strict=True)
        ]
        advantages = [np.zeros(len(own)) for own in to_go]
        for number in range(max(len(each) for each in advantages)):
            # Only rollouts that reached this turn have a reward to go to compare.
            there = [at for at, each in enumerate(advantages) if number < len(each)]
            compared = self._compared(np.asarray([to_go[at][number] for at in there]), lengths[there])
            for at, advantage in zip(there, compared, strict=True):
                advantages[at][number] = advantage
        return [_by_turn(*each) for each in zip(group, turns, advantages, strict=True)]

    def shaped_rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rewards from which advantages are computed, float64 [N], in the order of the rollouts.

        The penalty of long responses, which is never above 0, is added if there is one. The rollouts may be of one
        group or of a whole batch: no reward depends on other rollouts.
        """
        rewards = np.asarray([rollout.reward for rollout in rollouts], dtype=np.float64)
        if self._overlong is None:
            return rewards
        return rewards + self._overlong(np.asarray([rollout.num_loss_tokens for rollout in rollouts], dtype=np.int64))

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the credit that each sample of the batch got from its group, unchanged."""
        return [item.credit for item in batch]


def _turns_of(group: Sequence[Rollout]) -> list[_Turns] | None:
    """Return, for each rollout of a group, its turns with rewards by sample; None if it cannot be credited by turns.

    It cannot if no turn of the group has a reward, or one rollout's turn rewards do not sum to its reward. A group is
    credited by turns altogether or not at all, because a reward to go is only compared with other rewards to go.
    """
    turns = [own for rollout in group if (own := rollout.earned_turns) is not None]
    return turns if len(turns) == len(group) and any(rollout.has_turn_rewards for rollout in group) else None


def _to_go(turns: _Turns) -> np.ndarray:
    """Return for each turn the sum of its reward and all later ones, float64 [turns].

    `turns` are those of each sample.
    """
    earned = [turn.reward for own in turns for turn in own]
    return np.cumsum(np.asarray(earned[::-1], dtype=np.float64))[::-1]


def _by_turn(rollout: Rollout, turns: _Turns, advantages: np.ndarray) -> list[Credit]:
    """Return one `Credit` per sample of a rollout, with each turn's advantage on the tokens sampled in that turn.

    `turns` are those of each sample, `advantages` float64 [turns] those of all in order.
    """
    credits, at = [], 0
    for sample, own in zip(rollout.samples, turns, strict=True):
        # Each turn's advantage covers the tokens up to its end; the loss mask below removes those of prompts and tools.
        sizes = np.diff([turn.end for turn in own], prepend=0)
        spread = np.zeros(sample.num_tokens)
        spread[: own[-1].end if own else 0] = np.repeat(advantages[at : at + len(sizes)], sizes)
        credits.append(Credit(advantages=np.where(sample.loss_mask == 1, spread, 0.0).astype(np.float32)))
        at += len(sizes)
    return credits


def broadcast(advantage: float, sample: Sample) -> np.ndarray:
    """Return one advantage spread over a sample's tokens: float32 [T], 0 where the policy did not sample the token."""
    return np.where(sample.loss_mask == 1, np.float32(advantage), np.float32(0.0)).astype(np.float32)


# The ranges of rewards that `[[orchestrator.env]] reward_range` states, and rewards that are outside of theirs.

WHOLE = (0.0, 1.0)
"""Without a configured range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRanges:
    """Lowest and highest reward, by name of environment."""

    by_env: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])

    @classmethod
    def of(cls, envs: Iterable[EnvConfig]) -> Self:
        """Return the range of rewards of each environment that the config names."""
        return cls(by_env={env.name: (env.reward_range[0], env.reward_range[1]) for env in envs})

    def shares(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rollouts' rewards as shares of their environment's range, float64 [N] from 0 to 1.

        Raises InvalidSpecError, naming the first rollout, for a reward outside of its range.
        """
        shares = np.asarray([self._share(rollout) for rollout in rollouts], dtype=np.float64)
        outside = [at for at, share in enumerate(shares) if not (reaches(share, 0.0) and reaches(-share, -1.0))]
        if outside:
            rollout = rollouts[outside[0]]
            low, high = self.by_env.get(rollout.env, WHOLE)
            message = (
                f"is [{low:g}, {high:g}] for environment {rollout.env!r}, and the reward of ordinal {rollout.ordinal}, "
                f"member {rollout.member} is {rollout.reward:g}: `buffer.online_difficulty_filtering` and max_rl have "
                "to know the lowest and the highest reward there is; set it"
            )
            value = f"{[low, high]}"
            wrong = Violation(field="orchestrator.env.reward_range", value=value, message=message, source="a rollout")
            raise InvalidSpecError([wrong], reason="REWARD_OUT_OF_RANGE")
        return np.clip(shares, 0.0, 1.0)

    def extreme(self, rollouts: Sequence[Rollout]) -> str:
        """Return "easy" if all rewards of a group are the highest of their range, "hard" if all are the lowest, else
        "".

        `rollouts` are those of one group. Raises InvalidSpecError for a reward outside of its range.
        """
        share = float(self.shares(rollouts)[0])
        if not are_equal([rollout.reward for rollout in rollouts]):
            return ""
        if reaches(share, 1.0):
            return "easy"
        return "hard" if reaches(-share, 0.0) else ""

    def _share(self, rollout: Rollout) -> float:
        """Return a rollout's reward as a share of its environment's range; below 0 or above 1 if it is outside."""
        low, high = self.by_env.get(rollout.env, WHOLE)
        return (rollout.reward - low) / (high - low)


# Rollouts that are left out, or compared with a lower reward, by what was sampled: `[[orchestrator.filters]]`.
#
# Repetition as in MiniMax-M1 (arXiv:2506.13585, section 3.2), gibberish as in arXiv:2510.02387, section 5.2. What a
# filter finds follows from the rollout alone, so a successor, a replay and a fork find the same.


class Filtered:
    """Wrap an algorithm, which sees what the filters leave of each group."""

    def __init__(self, algorithm: Algorithm, filters: Sequence[FilterConfig]) -> None:
        """Take the algorithm to wrap, and the filters of the config."""
        self._algorithm = algorithm
        self._filters = filters

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return the wrapped algorithm's credit per sample of each rollout; weights are 0 for masked and dropped ones.

        The algorithm does not see dropped rollouts. It sees penalised ones with the lower reward, and masked ones as
        they are.
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
        """Return the wrapped algorithm's final credit for samples that train something; the others keep theirs.

        The algorithm sees rollouts with the penalised rewards that `credit` compared, and no sample that trains
        nothing.
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
        """Take the algorithm to wrap, and `least`, the absolute advantage up to which tokens are not trained on."""
        self._algorithm = algorithm
        self._least = least

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return the wrapped algorithm's credit per sample of each rollout of a group.

        Tokens with an advantage of at most the threshold, in absolute value, get advantage and weight 0.
        """
        return [[self._cut(credit) for credit in credits] for credits in self._algorithm.credit(group)]

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the wrapped algorithm's final credit for samples that still train something, cut at the threshold.

        The other samples keep their credit, and the algorithm does not see them.
        """
        left = [item for item in batch if not item.credit.trains_nothing]
        finished = iter(self._algorithm.finish(left))
        return [item.credit if item.credit.trains_nothing else self._cut(next(finished)) for item in batch]

    def _cut(self, credit: Credit) -> Credit:
        """Return a copy of a credit.

        Advantages of at most the threshold, in absolute value, are 0 and have weight 0.
        """
        is_kept = np.abs(credit.advantages) > self._least
        weights = np.ones_like(credit.advantages) if credit.rl_weights is None else credit.rl_weights
        return replace(
            credit,
            advantages=np.where(is_kept, credit.advantages, np.float32(0)),
            rl_weights=np.where(is_kept, weights, np.float32(0)),
        )


def count_found(rollouts: Sequence[Rollout], filters: Sequence[FilterConfig]) -> Counter[str]:
    """Return how many of the rollouts each filter finds, by the filter's type."""
    return Counter(each.type for rollout in rollouts for each in filters if _finds(each, rollout))


def _actions(rollout: Rollout, filters: Sequence[FilterConfig]) -> set[str]:
    """Return the actions ("drop", "mask", "penalise") of the filters that find a rollout."""
    return {each.action for each in filters if _finds(each, rollout)}


def _penalised(rollout: Rollout, filters: Sequence[FilterConfig], *, has_turns: bool = False) -> Rollout:
    """Return the rollout with its reward lowered by the penalties of the filters that find it.

    `has_turns` says that a rollout of its group has turn rewards: the last turn then bears the penalty.
    """
    penalty = sum(each.penalty for each in filters if each.action == "penalise" and _finds(each, rollout))
    return rollout.penalised(penalty, has_turns=has_turns) if penalty else rollout


def _finds(config: FilterConfig, rollout: Rollout) -> bool:
    """Return whether a filter finds a rollout: it is truncated, or one of its samples repeats or is gibberish."""
    if config.type == "truncated":
        return rollout.is_truncated
    finds = _repeats if config.type == "repetition" else _is_gibberish
    return any(finds(config, sample) for sample in rollout.samples)


def _repeats(config: FilterConfig, sample: Sample) -> bool:
    """Return whether `window` sampled tokens in a row were each likelier than the filter's `prob_threshold`.

    Tokens that were not sampled are skipped: they interrupt no row.
    """
    is_sure = sample.inference_logprobs[sample.loss_mask == 1] > np.log(config.prob_threshold)
    if len(is_sure) < config.window:
        return False
    # A window of `window` sure tokens has a running sum that grows by exactly `window`.
    sums = np.concatenate([[0], np.cumsum(is_sure)])
    return bool((sums[config.window :] - sums[: -config.window] == config.window).any())


def _is_gibberish(config: FilterConfig, sample: Sample) -> bool:
    """Return whether a sampled token has both a large id (is rare) and a low log-prob, by the filter's thresholds."""
    is_rare = sample.token_ids > config.token_id_threshold
    return bool((is_rare & (sample.inference_logprobs < config.logprob_threshold) & (sample.loss_mask == 1)).any())


def _nothing(sample: Sample) -> Credit:
    """Return credit with which no token of the sample is trained on."""
    zeros = np.zeros(sample.num_tokens, dtype=np.float32)
    return Credit(advantages=zeros, rl_weights=zeros)
