"""What every algorithm implements: groups in, per-token streams out. Pure numpy, no I/O, nothing kept between batches.

An algorithm has two hooks. `credit` sees one group of rollouts of the same task; `finish` sees every sample of a batch,
for what is computed over a whole batch. Both run where the batch is cut, so the log holds what came of them, and the
trainer, a replay and a fork never compute them again.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from millrace.algorithms.overlong import OverlongPenalty
from millrace.config.sections.algo import AdvantageConfig
from millrace.rollouts.types import Rollout, Sample


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
        """Whether every token has weight 0."""
        has_rl = self.rl_weights is None or bool(self.rl_weights.any())
        return not has_rl and (self.ce_weights is None or not self.ce_weights.any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Credited:
    """A sample of a batch, with the credit that its group gave it. Its first `num_tokens` tokens are trained on."""

    rollout: Rollout
    sample: Sample
    credit: Credit
    num_tokens: int

    @property
    def sampled(self) -> np.ndarray:
        """Which of the tokens that are trained on the policy sampled, bool [num_tokens]."""
        return self.sample.loss_mask[: self.num_tokens] == 1


class Algorithm(Protocol):
    """Turns rollouts into credit for each of their samples."""

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return, for each rollout of a group in order, one `Credit` per sample of it."""
        ...

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the final credit of every sample of a batch, in order."""
        ...


class ScalarAdvantage(ABC):
    """An algorithm that gives every sampled token of a rollout the same advantage, from rewards and lengths alone."""

    def __init__(self, *, overlong: OverlongPenalty | None = None) -> None:
        self._overlong = overlong

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self:
        """As `[orchestrator.algo]` says."""
        return cls(overlong=OverlongPenalty.from_config(config))

    @abstractmethod
    def advantages(self, rewards: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the advantages of a group of G rollouts, float64 [G].

        `rewards` are float64 [G], relative to some constant that is the same for the whole group if
        `is_shift_invariant`; `lengths` are int64 [G], sampled tokens.
        """

    compares = True
    """Whether rewards are compared with each other, so that equal ones give advantage 0."""
    is_shift_invariant = True
    """Whether only differences of rewards count: they are then computed against the first, so equal ones give exactly 0
    (the mean of equal values may round to another value)."""

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return one `Credit` per sample; where rewards are compared, one alone or equal ones get advantage 0."""
        rewards = self.shaped_rewards(group)
        lengths = np.asarray([rollout.num_loss_tokens for rollout in group], dtype=np.int64)
        advantages = np.zeros(len(rewards))
        if len(rewards) and (not self.compares or (rewards != rewards[0]).any()):
            advantages = self.advantages(rewards - rewards[0] if self.is_shift_invariant else rewards, lengths)
        return [
            [Credit(advantages=broadcast(float(advantage), sample)) for sample in rollout.samples]
            for rollout, advantage in zip(group, advantages, strict=True)
        ]

    def shaped_rewards(self, rollouts: Sequence[Rollout]) -> np.ndarray:
        """Return the rewards that are compared, float64 [N]: with the punishment of long responses if there is one."""
        rewards = np.asarray([rollout.reward for rollout in rollouts], dtype=np.float64)
        if self._overlong is None:
            return rewards
        return rewards + self._overlong(np.asarray([rollout.num_loss_tokens for rollout in rollouts], dtype=np.int64))

    def finish(self, batch: Sequence[Credited]) -> list[Credit]:
        """Return the groups' credit as it is."""
        return [item.credit for item in batch]


def broadcast(advantage: float, sample: Sample) -> np.ndarray:
    """Spread one scalar over a sample's sampled tokens: float32 [T], 0 elsewhere."""
    return np.where(sample.loss_mask == 1, np.float32(advantage), np.float32(0.0)).astype(np.float32)
