"""What a step's own forward gave for the tokens that are logged: kept as it goes by, computed never again.

Shape suffixes: B samples, T longest sample, K chosen ones of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.internal.v1 import batch_pb2
from millrace.rollouts.token_log import LoggedSample, TokenLog, chosen_rollouts
from millrace.trainer.learning.batch import MicroBatch, Minibatch


@dataclass(frozen=True, slots=True)
class _Part:
    """The chosen samples of one micro-batch, by their places in the header's sample table."""

    places: list[int]
    values_2KT: torch.Tensor
    mask_KT: torch.Tensor


class TokenRows:
    """The values of this rank's chosen samples, as their own minibatch's forward computed them."""

    def __init__(self, header: batch_pb2.BatchHeader, minibatches: Sequence[Minibatch], *, share: float) -> None:
        self._header = header
        self._share = share
        self._places = [minibatch.samples for minibatch in minibatches]
        members = {(entry.ordinal, entry.member, entry.attempt) for entry in header.samples}
        chosen = chosen_rollouts(members, share)
        self._num_rollouts = len(members)
        self._chosen = {
            place
            for place, entry in enumerate(header.samples)
            if (entry.ordinal, entry.member, entry.attempt) in chosen
        }
        self._parts: list[_Part] = []

    def add(
        self, micro_batch: MicroBatch, samples: Sequence[int], *, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor
    ) -> None:
        """Keep what belongs to chosen samples; `samples` are the places of the rows."""
        rows = [row for row, place in enumerate(samples) if place in self._chosen]
        if not rows:
            return
        at = torch.tensor(rows, device=logprobs_BT.device)
        values_2KT = torch.stack((logprobs_BT.detach()[at], entropy_BT.detach()[at])).cpu()
        self._parts.append(_Part([samples[row] for row in rows], values_2KT, micro_batch.loss_mask_BT[at].cpu()))

    def to_log(self, *, lineage: int, chain_hash: bytes) -> TokenLog:
        """This rank's part of the step's log; for the thread beside the training."""
        minibatch_of = {
            place: number
            for number, micro_batches in enumerate(self._places)
            for places in micro_batches
            for place in places
        }
        samples = [each for part in self._parts for each in self._samples(part, minibatch_of)]
        return TokenLog(
            run_uid=self._header.run_uid,
            step=self._header.step,
            lineage=lineage,
            chain_hash=chain_hash,
            num_rollouts=self._num_rollouts,
            share=self._share,
            samples=tuple(sorted(samples, key=lambda each: each.sample)),
        )

    def _samples(self, part: _Part, minibatch_of: Mapping[int, int]) -> list[LoggedSample]:
        values_2KT, mask_KT = part.values_2KT.numpy(), part.mask_KT.numpy()
        found = []
        for row, place in enumerate(part.places):
            entry = self._header.samples[place]
            mask = mask_KT[row, : entry.length]  # of a longer sample the trainer took as much as the row has
            logprobs, entropies = values_2KT[:, row, : entry.length][:, mask]
            found.append(
                LoggedSample(
                    sample=place,
                    ordinal=entry.ordinal,
                    member=entry.member,
                    attempt=entry.attempt,
                    minibatch=minibatch_of[place],
                    mask=mask.astype(np.uint8),
                    logprobs=logprobs,
                    entropies=entropies.astype(np.float16),
                )
            )
        return found
