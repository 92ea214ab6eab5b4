"""What every algorithm implements: group in, per-token streams out. Pure numpy, no I/O."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from millrace.config.sections.algo import AlgoConfig
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


class Algorithm(Protocol):
    """Turns the rollouts of one group into credit for each of their samples."""

    @classmethod
    def from_config(cls, config: AlgoConfig) -> Self:
        """As `[orchestrator.algo]` says."""
        ...

    def credit(self, group: Sequence[Rollout]) -> list[list[Credit]]:
        """Return, for each rollout in order, one `Credit` per sample of it."""
        ...


def broadcast(advantage: float, sample: Sample) -> np.ndarray:
    """Spread one scalar over a sample's sampled tokens: float32 [T], 0 elsewhere."""
    return np.where(sample.loss_mask == 1, np.float32(advantage), np.float32(0.0)).astype(np.float32)
