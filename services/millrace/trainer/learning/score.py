"""How far the trainer's log-probs and the engine's agree on tokens that one version produced."""

import math
from dataclasses import dataclass

import torch

from millrace.trainer.gang.distributed import Gang
from millrace.trainer.learning.batch import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreResult:
    """Over sampled tokens: mean of k3 = exp(d) - d - 1 with d = trainer - inference log-prob, and the largest |d|."""

    num_tokens: int
    mismatch_kl: float
    max_abs_logprob_diff: float
    num_other_version_tokens: int


class Score:
    """Adds up micro-batches; samples of another version are counted, not scored: they would differ rightly."""

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0]  # k3, tokens, tokens of other versions
        self._max_difference = 0.0

    def add(self, micro_batch: MicroBatch, trainer_logprobs_BT: torch.Tensor, *, version: int) -> None:
        """Add a micro-batch."""
        is_version_B = torch.tensor(
            [versions == (version, version) for versions in micro_batch.versions_B],
            device=trainer_logprobs_BT.device,
            dtype=torch.bool,
        )
        sampled = micro_batch.loss_mask_BT
        scored = sampled & is_version_B[:, None]
        difference = (trainer_logprobs_BT - micro_batch.inference_logprobs_BT)[scored].double()
        self._sums[0] += float((torch.expm1(difference) - difference).sum())
        self._sums[1] += difference.numel()
        self._sums[2] += int((sampled & ~is_version_B[:, None]).sum())
        if difference.numel():
            self._max_difference = max(self._max_difference, float(difference.abs().max()))

    def reduce(self, gang: Gang) -> ScoreResult:
        """The result over all ranks; the mean over no tokens is NaN. Collective in a gang."""
        kl, num_tokens, num_other = gang.sum(self._sums)
        return ScoreResult(
            num_tokens=int(num_tokens),
            mismatch_kl=kl / num_tokens if num_tokens else math.nan,
            max_abs_logprob_diff=gang.max([self._max_difference])[0],
            num_other_version_tokens=int(num_other),
        )
