"""DAPO's soft punishment of responses that come near the limit (arXiv 2503.14476, equation 13)."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from millrace.config.sections.algo import AdvantageConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPenalty:
    """0 up to `max_tokens - buffer_tokens` sampled tokens, from there linearly down to `-factor` at `max_tokens`."""

    max_tokens: int
    buffer_tokens: int
    factor: float = 1.0

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> Self | None:
        """As `[orchestrator.algo.overlong]` says; None without that table."""
        table = config.overlong
        if table is None:
            return None
        return cls(max_tokens=table.max_tokens, buffer_tokens=table.buffer_tokens, factor=table.factor)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """Return what is added to the rewards, float64 [G], for int64 [G] lengths in sampled tokens."""
        over = lengths - (self.max_tokens - self.buffer_tokens)
        return -self.factor * np.clip(over / self.buffer_tokens, 0.0, 1.0)
