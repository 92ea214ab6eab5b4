"""Tokens that a run has used, and its bytes in the store.

Each header has the sum over all rollouts that it and those before it archive. A rollout is archived by one header, so
the sum is exact however often processes die.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.batch_wire import decode_header
from millrace.rollouts.types import Rollout
from millrace.runlog.names import Names
from millrace.runlog.records.revisions import load_newest
from millrace.storage import ObjectStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUse:
    """Tokens of archived rollouts."""

    prompt: int = 0
    """What the policy was given, counted in each sequence."""
    sampled: int = 0

    @classmethod
    def of_header(cls, header: batch_pb2.BatchHeader) -> Self:
        """Return the tokens of all rollouts archived up to a header."""
        return cls(prompt=header.total_prompt_tokens, sampled=header.total_sampled_tokens)

    def plus(self, rollouts: Iterable[Rollout]) -> "TokenUse":
        """Return these tokens and those of further rollouts."""
        prompt, sampled = self.prompt, self.sampled
        for sample in (each for rollout in rollouts for each in rollout.samples):
            count = int(np.count_nonzero(sample.loss_mask))
            prompt, sampled = prompt + len(sample.token_ids) - count, sampled + count
        return TokenUse(prompt=prompt, sampled=sampled)

    def fill(self, header: batch_pb2.BatchHeader) -> None:
        """Write the tokens into a header."""
        header.total_prompt_tokens, header.total_sampled_tokens = self.prompt, self.sampled


def load_use(store: ObjectStore, names: Names) -> tuple[TokenUse, int]:
    """Return the tokens that a run has used, by its newest header, and its bytes in the store (blocking).

    `NotFoundError` if the run is gone, `CorruptObjectError` if its newest header cannot be read.
    """
    newest = load_newest(store, names)
    tokens = TokenUse()
    if newest is not None:
        # Also of a closing header that was reopened: what was sampled was used.
        tokens = TokenUse.of_header(decode_header(newest[1].revisions[-1]))
    return tokens, sum(info.size_bytes for info in store.list(names.root))
