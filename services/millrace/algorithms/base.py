"""What every algorithm implements: groups in, per-token streams out. Pure numpy, no I/O, nothing kept between batches.

An algorithm has two hooks. `credit` sees one group of rollouts of the same task; `finish` sees every sample of a batch,
for what is computed over a whole batch. Both run where the batch is cut, so the log holds what came of them, and the
trainer, a replay and a fork never compute them again.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self, TypeAlias

import numpy as np

from millrace.config.sections.algo import AdvantageConfig
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
        """Return whether every token has weight 0."""
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
        """Return, for each rollout of a group in order, one `Credit` per sample of it."""
        ...

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the final credit of every sample of a batch, in order."""
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
        """Make the penalty that `[orchestrator.algo.overlong]` describes; None without that table."""
        table = config.overlong
        if table is None:
            return None
        return cls(max_tokens=table.max_tokens, buffer_tokens=table.buffer_tokens, factor=table.factor)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return the penalties, at most 0, to add to the rewards, float64 [G]; `lengths` are sampled tokens."""
        over = lengths - (self.max_tokens - self.buffer_tokens)
        return -self.factor * np.clip(over / self.buffer_tokens, 0.0, 1.0)


class ScalarAdvantage(ABC):
    """An algorithm that gives every sampled token of a rollout the same advantage, from rewards and lengths alone."""

    def __init__(self, *, overlong: OverlongPenalty | None = None, by_turn: bool = False) -> None:
        """Take `by_turn`: whether each turn gets its own credit, see `_credit_turns`."""
        self._overlong, self._by_turn = overlong, by_turn

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """Make the algorithm that `[orchestrator.algo]` describes."""
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
        """Return one `Credit` per sample; where rewards are compared, one alone or equal ones get advantage 0."""
        rewards = self.shaped_rewards(group)
        lengths = np.asarray([rollout.num_loss_tokens for rollout in group], dtype=np.int64)
        if self._by_turn and (turns := _turns_of(group)) is not None:
            return self._credit_turns(group, turns, rewards, lengths)
        return [
            [Credit(advantages=broadcast(float(advantage), sample)) for sample in rollout.samples]
            for rollout, advantage in zip(group, self._compared(rewards, lengths), strict=True)
        ]

    def _compared(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
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
        """Return credit with an advantage for every turn, from the reward to go: what it and later turns earn.

        What was earned before a turn cannot be its doing (the policy gradient theorem, Sutton et al. 1999). It is
        compared with that of the rollouts of the group which came to the same turn: a baseline of the time step
        (Greensmith et al. 2004). One alone there gets 0.
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
        """Return the rewards that are compared, float64 [N]: with the punishment of long responses if there is one."""
        rewards = np.asarray([rollout.reward for rollout in rollouts], dtype=np.float64)
        if self._overlong is None:
            return rewards
        return rewards + self._overlong(np.asarray([rollout.num_loss_tokens for rollout in rollouts], dtype=np.int64))

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the groups' credit as it is."""
        return [item.credit for item in batch]


def _turns_of(group: Sequence[Rollout]) -> list[_Turns] | None:
    """Return the turns of each rollout; None if no turn of the group has a reward, or one rollout's do not add up.

    A rollout's turns add up if their rewards sum to its reward. The group is credited by turns altogether or not at
    all, because a reward to go is only compared with other rewards to go.
    """
    turns = [own for rollout in group if (own := rollout.earned_turns) is not None]
    return turns if len(turns) == len(group) and any(rollout.has_turn_rewards for rollout in group) else None


def _to_go(turns: _Turns) -> np.ndarray:
    """Return for each turn the sum of its reward and all later ones, float64 [turns]; 0 if no reward follows."""
    earned = [turn.reward for own in turns for turn in own]
    return np.cumsum(np.asarray(earned[::-1], dtype=np.float64))[::-1]


def _by_turn(rollout: Rollout, turns: _Turns, advantages: np.ndarray) -> list[Credit]:
    """Return credit per sample that has each turn's advantage, of float64 [turns], on the turn's sampled tokens."""
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
    """Spread one scalar over a sample's sampled tokens: float32 [T], 0 elsewhere."""
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
        """Read the ranges from the config."""
        return cls(by_env={env.name: (env.reward_range[0], env.reward_range[1]) for env in envs})

    def shares(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rewards as shares of their ranges, float64 [N] from 0 to 1; raise InvalidSpecError for a
        reward outside.
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
        """Return "easy" for a group whose rewards are all the highest, "hard" if all are the lowest; else "".

        Raises InvalidSpecError for a reward outside its range.
        """
        share = float(self.shares(rollouts)[0])
        if not are_equal([rollout.reward for rollout in rollouts]):
            return ""
        if reaches(share, 1.0):
            return "easy"
        return "hard" if reaches(-share, 0.0) else ""

    def _share(self, rollout: Rollout) -> float:
        low, high = self.by_env.get(rollout.env, WHOLE)
        return (rollout.reward - low) / (high - low)
