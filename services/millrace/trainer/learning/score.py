"""How far the trainer's log-probs and the engine's agree on tokens that one version produced."""

import math
from dataclasses import dataclass

import torch

from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.losses.base import k3, outside_support


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Over sampled tokens: mean of k3 = exp(d) - d - 1 with d = trainer - inference log-prob, and the largest |d|.

    `num_outside_tokens` were sampled, but the truncation (top-p, …) leaves them out under the trainer's policy: those
    at its border, where the two sides round differently.
    """

    num_tokens: int
    mismatch_kl: float
    max_abs_logprob_diff: float
    num_other_version_tokens: int
    num_outside_tokens: int = 0


class Score:
    """Adds up micro-batches; samples of another version are counted, not scored: they would differ rightly."""

    def __init__(self) -> None:
        self._sums = [0.0] * 4  # k3, tokens, tokens of other versions, tokens outside of what the truncation leaves
        self._max_difference = 0.0

    def add(self, micro_batch: MicroBatch, trainer_logprobs_BT: torch.Tensor, *, version: int) -> None:
        """Add a micro-batch."""
        is_version_B = torch.tensor(
            [versions == (version, version) for versions in micro_batch.versions_B],
            device=trainer_logprobs_BT.device,
            dtype=torch.bool,
        )
        sampled = micro_batch.loss_mask_BT
        is_outside = outside_support(trainer_logprobs_BT)
        scored = sampled & is_version_B[:, None] & ~is_outside
        difference = (trainer_logprobs_BT - micro_batch.inference_logprobs_BT)[scored].double()
        self._sums[0] += float(k3(difference).sum())
        self._sums[1] += difference.numel()
        self._sums[2] += int((sampled & ~is_version_B[:, None]).sum())
        self._sums[3] += int((sampled & is_version_B[:, None] & is_outside).sum())
        if difference.numel():
            self._max_difference = max(self._max_difference, float(difference.abs().max()))

    def reduce(self, gang: Gang) -> ScoreResult:
        """The result over all ranks; the mean over no tokens is NaN. Collective in a gang."""
        kl, num_tokens, num_other, num_outside = gang.sum_of_data(self._sums)
        return ScoreResult(
            num_tokens=int(num_tokens),
            mismatch_kl=kl / num_tokens if num_tokens else math.nan,
            max_abs_logprob_diff=gang.max([self._max_difference])[0],
            num_other_version_tokens=int(num_other),
            num_outside_tokens=int(num_outside),
        )
