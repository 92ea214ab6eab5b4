"""From samples to micro-batches: length-sorted, padded rows of a bounded number of tokens.

On CPU, padded rows of nearly equal length are faster than packed rows with a block mask, whose attention is quadratic
in the packed length. The plan is a pure function of the samples' lengths, so every rank computes it from the header's
sample table alone and reads only the chunks that hold its own samples.

Shape suffixes: B rows, T padded length.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from millrace.config.sections.trainer import TrainerConfig
from millrace.rollouts.truncation import kept_tokens
from millrace.rollouts.types import FULL, TrainSample
from millrace.trainer.losses.base import LossInputs, outside_support


@dataclass(frozen=True, slots=True, kw_only=True)
class TruncationRows:
    """What cut the distributions that the rows were sampled from; each is [B]."""

    top_p: torch.Tensor
    top_k: torch.Tensor
    min_p: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, device: torch.device) -> "TruncationRows | None":
        """Those of samples; None if none was cut. Engines cut nothing of greedy ones."""
        rows = [sample.truncation if sample.temperature else FULL for sample in samples]
        if all(row.is_full for row in rows):
            return None
        return cls(
            top_p=torch.tensor([row.top_p for row in rows], dtype=torch.float32, device=device),
            top_k=torch.tensor([row.top_k for row in rows], dtype=torch.int64, device=device),
            min_p=torch.tensor([row.min_p for row in rows], dtype=torch.float32, device=device),
        )

    @property
    def is_cut(self) -> torch.Tensor:
        """Which rows were sampled from less than the whole vocabulary, bool [B]."""
        return (self.top_p < 1) | (self.top_k > 0) | (self.min_p > 0)

    def kept(self, logprobs_NV: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        """Which tokens could be sampled at positions of the rows `rows_N`, bool [N, V]."""
        bounds = {"top_p": self.top_p[rows_N], "top_k": self.top_k[rows_N], "min_p": self.min_p[rows_N]}
        return kept_tokens(logprobs_NV, **bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows that go through the model at once, right-padded with token 0, mask 0 and weight 0.

    `loss_mask_BT` and `ce_weights_BT` never select position 0: nothing precedes it, so it has no log-prob.
    `rl_weights_BT` is 1 where a sample has no weights of its own; the rl component is where the mask is 1 and the
    weight is not 0, the cross-entropy component where its weight is not 0. `versions_B` are the oldest and newest
    policy version of each row's sampled tokens. A temperature of 0 (greedy) is 1 here, as engines report its log-probs.
    `truncation_B` is None where no row was sampled from a truncated distribution; `reference_kl_B` is that of `Credit`.
    `proximal_logprobs_BT` are those of `LossInputs`, as the model computes them.
    """

    token_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    loss_mask_BT: torch.Tensor
    inference_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    rl_weights_BT: torch.Tensor
    ce_weights_BT: torch.Tensor
    temperature_B: torch.Tensor
    truncation_B: TruncationRows | None
    reference_kl_B: torch.Tensor
    env_B: tuple[str, ...]
    versions_B: tuple[tuple[int, int], ...]
    proximal_logprobs_BT: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Real tokens, padding excluded."""
        return int(self.attention_mask_BT.sum())

    @property
    def num_rl_tokens(self) -> int:
        """Tokens of the rl component."""
        return int((self.loss_mask_BT & (self.rl_weights_BT != 0)).sum())

    @property
    def num_rl_samples(self) -> int:
        """Rows with a token of the rl component."""
        return int((self.loss_mask_BT & (self.rl_weights_BT != 0)).any(dim=-1).sum())

    def loss_inputs(
        self,
        trainer_logprobs_BT: torch.Tensor,
        *,
        entropy_BT: torch.Tensor | None = None,
        reference_logprobs_BT: torch.Tensor | None = None,
    ) -> LossInputs:
        """What the loss is computed from; entropy and reference where they have a part in it.

        Tokens outside of what the truncation leaves under the trainer's policy are masked: they have no log-prob there.
        Advantages that are log-ratios of a reference to the behaviour policy become those to the trainer's.
        """
        is_outside_BT = outside_support(trainer_logprobs_BT)
        logprobs_BT = torch.where(is_outside_BT, self.inference_logprobs_BT, trainer_logprobs_BT)
        proximal_BT = self.proximal_logprobs_BT
        if proximal_BT is not None:  # a token that only the policy before the batch had left out counts as unmoved
            proximal_BT = torch.where(outside_support(proximal_BT), logprobs_BT.detach(), proximal_BT)
        moved_BT = (logprobs_BT.detach() - self.inference_logprobs_BT) * self.loss_mask_BT
        return LossInputs(
            trainer_logprobs=logprobs_BT,
            inference_logprobs=self.inference_logprobs_BT,
            advantages=self.advantages_BT - self.reference_kl_B[:, None] * moved_BT,
            loss_mask=self.loss_mask_BT & ~is_outside_BT,
            rl_weights=self.rl_weights_BT,
            ce_weights=self.ce_weights_BT * ~is_outside_BT,
            proximal_logprobs=proximal_BT,
            entropy=entropy_BT,
            reference_logprobs=reference_logprobs_BT,
        )

    @property
    def num_ce_tokens(self) -> int:
        """Tokens of the cross-entropy component."""
        return int((self.ce_weights_BT != 0).sum())

    @property
    def first_scored(self) -> int:
        """Column of the first token of any row that a log-prob is needed for; at least 1."""
        needed = (self.loss_mask_BT | (self.ce_weights_BT != 0)).any(dim=0)
        columns = torch.nonzero(needed)
        return max(1, int(columns[0])) if len(columns) else needed.numel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """What one optimizer step learns from: this rank's share of it.

    `rows` has for each micro-batch the places of its rows in the header's sample table.
    """

    micro_batches: list[MicroBatch]
    rows: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How batches are cut: samples at `seq_len`, the batch into minibatches, and these into micro-batches."""

    seq_len: int
    micro_batch_tokens: int
    minibatches: int = 1

    @classmethod
    def of(cls, config: TrainerConfig) -> "BatchLayout":
        """That of a run."""
        return cls(
            seq_len=config.model.seq_len,
            micro_batch_tokens=config.micro_batch_tokens,
            minibatches=config.minibatches,
        )


def plan_minibatches(ordinals: Sequence[int], count: int) -> list[list[int]]:
    """Sample indices by minibatch: whole groups, dealt in turn in the order of their ordinals.

    A pure function of the sample table. Fewer groups than `count` make fewer minibatches, but at least one.
    """
    places = {ordinal: place for place, ordinal in enumerate(sorted(set(ordinals)))}
    minibatches: list[list[int]] = [[] for _ in range(max(min(count, len(places)), 1))]
    for index, ordinal in enumerate(ordinals):
        minibatches[places[ordinal] % len(minibatches)].append(index)
    return minibatches


def plan_micro_batches(lengths: Sequence[int], *, max_tokens: int, world_size: int = 1) -> list[list[list[int]]]:
    """Sample indices by rank, then by micro-batch: rows sorted by length, rows times longest row at most `max_tokens`.

    A sample longer than `max_tokens` gets a micro-batch of its own. Every rank gets equally many micro-batches, because
    the ranks' collectives pair up: until that is so, the largest one is halved, and every rank has work. Where there
    are fewer samples than ranks, micro-batches are empty. Consecutive ones go to consecutive ranks, so that the ranks'
    work is nearly equal.
    """
    order = sorted((index for index, length in enumerate(lengths) if length), key=lambda i: (-lengths[i], i))
    micro_batches: list[list[int]] = []
    for index in order:
        # Sorted downwards, so the first row of a micro-batch is its longest.
        if micro_batches and (len(micro_batches[-1]) + 1) * lengths[micro_batches[-1][0]] <= max_tokens:
            micro_batches[-1].append(index)
        else:
            micro_batches.append([index])
    while len(micro_batches) % world_size:
        several = [at for at, rows in enumerate(micro_batches) if len(rows) > 1]
        if not several:
            micro_batches.append([])
            continue
        largest = max(several, key=lambda at: len(micro_batches[at]) * lengths[micro_batches[at][0]])
        rows, half = micro_batches[largest], -(-len(micro_batches[largest]) // 2)
        micro_batches[largest : largest + 1] = [rows[:half], rows[half:]]
    return [micro_batches[rank::world_size] for rank in range(world_size)]


def build_micro_batch(samples: Sequence[TrainSample], *, seq_len: int, device: torch.device) -> MicroBatch:
    """Pad samples to a micro-batch on `device`, cutting each at `seq_len`.

    No samples give one row of two padding tokens with weight 0: it keeps this rank's collectives in step with the
    others' and contributes a zero gradient.
    """
    lengths = [min(len(sample.token_ids), seq_len) for sample in samples] or [2]
    shape = (len(lengths), max(lengths))
    token_ids = np.zeros(shape, np.int64)
    attention = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    logprobs, advantages, rl_weights, ce_weights = (np.zeros(shape, np.float32) for _ in range(4))
    if not samples:
        attention[:] = 1  # an attention row without any key would be NaN
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=bool(samples))):
        token_ids[row, :length] = sample.token_ids[:length]
        attention[row, :length] = 1
        mask[row, 1:length] = sample.loss_mask[1:length] != 0
        logprobs[row, :length] = sample.inference_logprobs[:length]
        advantages[row, :length] = sample.advantages[:length]
        rl_weights[row, :length] = 1.0 if sample.rl_weights is None else sample.rl_weights[:length]
        if sample.ce_weights is not None:
            ce_weights[row, 1:length] = sample.ce_weights[1:length]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    return MicroBatch(
        token_ids_BT=tensor(token_ids),
        attention_mask_BT=tensor(attention),
        position_ids_BT=tensor(np.broadcast_to(np.arange(shape[1]), shape).copy()),
        loss_mask_BT=tensor(mask),
        inference_logprobs_BT=tensor(logprobs),
        advantages_BT=tensor(advantages),
        rl_weights_BT=tensor(rl_weights),
        ce_weights_BT=tensor(ce_weights),
        temperature_B=tensor(np.array([s.temperature or 1.0 for s in samples] or [1.0], np.float32)),
        truncation_B=TruncationRows.of(samples, device=device),
        reference_kl_B=tensor(np.array([s.reference_kl for s in samples] or [0.0], np.float32)),
        env_B=tuple(sample.env for sample in samples) or ("",),
        versions_B=tuple((sample.min_version, sample.max_version) for sample in samples) or ((0, 0),),
    )
