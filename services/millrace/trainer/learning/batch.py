"""From samples to micro-batches: what the loss is computed from sample by sample, and the rows that the model sees.

A row of the model is one sample, or several one after the other (`plan`). The loss does not depend on that, because
log-probs are put back to where their tokens are in the samples.

Shape suffixes: B samples, T longest sample, R rows of the model, L longest row, N tokens whose log-probs are needed, X
layers with experts, K experts of a token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import numpy as np
import torch

from millrace.config.sections.trainer import TrainerConfig
from millrace.models.routing import FREE, RoutingShape
from millrace.rollouts.parameters import kept_tokens
from millrace.rollouts.routed_experts import dtype_of
from millrace.rollouts.types import FULL, RoutedArray, TrainSample, Truncation
from millrace.trainer.learning.plan import Packing, Rows
from millrace.trainer.losses import LossInputs, outside_support


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The W different settings of temperature and truncation of a micro-batch, and the index of each token's setting.

    A temperature of 0 (greedy) is 1 here without truncation, because engines report log-probs like that.
    """

    way_BT: torch.Tensor
    temperature_W: torch.Tensor
    top_p_W: torch.Tensor
    top_k_W: torch.Tensor
    min_p_W: torch.Tensor
    cuts_any: bool
    """Whether any setting truncates the vocabulary."""

    @classmethod
    def of(cls, samples: Sequence[TrainSample], *, shape: tuple[int, int], device: torch.device) -> Self:
        """Collect the different settings of temperature and truncation of the samples, the rows of [B, T] = `shape`.

        A sample's `own_sampling` are ranges of its tokens with settings of their own. Padding has temperature 1 without
        truncation, and so has what was sampled with temperature 0.
        """
        places = {(1.0, FULL): 0}  # that of padding, too
        way_BT = np.zeros(shape, np.int64)

        def place(temperature: float, truncation: Truncation) -> int:
            """Return the index of a setting, a new one if the setting is new."""
            # `places` keeps the order of insertion, so that an index is the setting's row in the tensors below.
            return places.setdefault((temperature, truncation) if temperature else (1.0, FULL), len(places))

        for row, sample in enumerate(samples):
            way_BT[row] = place(sample.temperature, sample.truncation)
            for own in sample.own_sampling:
                way_BT[row, own.start : own.end] = place(own.temperature, own.truncation)
        cuts = [truncation for _, truncation in places]
        return cls(
            way_BT=torch.from_numpy(way_BT).to(device),
            temperature_W=torch.tensor([each for each, _ in places], dtype=torch.float32, device=device),
            top_p_W=torch.tensor([cut.top_p for cut in cuts], dtype=torch.float32, device=device),
            top_k_W=torch.tensor([cut.top_k for cut in cuts], dtype=torch.int64, device=device),
            min_p_W=torch.tensor([cut.min_p for cut in cuts], dtype=torch.float32, device=device),
            cuts_any=not all(cut.is_full for cut in cuts),
        )

    def ways(self, places_N: torch.Tensor) -> torch.Tensor:
        """Return the index of the setting of each token; `places_N` are the tokens' flat indices in [B, T]."""
        return self.way_BT.reshape(-1)[places_N]

    def is_cut(self, ways_N: torch.Tensor) -> torch.Tensor:
        """Return which tokens were sampled from less than the whole vocabulary, bool [N].

        `ways_N` are their settings' indices.
        """
        return ((self.top_p_W < 1) | (self.top_k_W > 0) | (self.min_p_W > 0))[ways_N]

    def kept(self, logprobs_NV: torch.Tensor, ways_N: torch.Tensor) -> torch.Tensor:
        """Return which words of the vocabulary top-p, top-k and min-p leave to each token's setting, bool [N, V].

        `logprobs_NV` are the distributions before truncation, and `ways_N` the indices of the settings.
        """
        bounds = {"top_p": self.top_p_W[ways_N], "top_k": self.top_k_W[ways_N], "min_p": self.min_p_W[ways_N]}
        return kept_tokens(logprobs_NV, **bounds)

    def uncut(self) -> Self:
        """Return a copy of the settings with the same temperatures and without any truncation."""
        return replace(self, cuts_any=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRows:
    """The model's input, and where in its output the log-probs are that the loss needs.

    Positions restart at every sample of a row, by which the model tells samples apart. Padding is on the right, where
    causal attention does not look: it is one more sample of token 0, or, if every row is one sample, continues that
    sample. `scored_N` are the flat indices in [B, T] of the tokens that need a log-prob, `before_N` the flat indices
    in [R, L] of the tokens before them. `experts_RLXK`, int16, are the experts that tokens are sent to, FREE where the
    routers choose; None: they choose everywhere.
    """

    token_ids_RL: torch.Tensor
    position_ids_RL: torch.Tensor
    scored_N: torch.Tensor
    before_N: torch.Tensor
    experts_RLXK: torch.Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Return whether a row has more than one sample, that is, whether positions restart within a row."""
        return bool((self.position_ids_RL[:, 1:] == 0).any())

    def widened(self, width: int) -> "ModelRows":
        """Return the rows padded on the right to `width` tokens, which may not be fewer than they have.

        In packed rows the new padding is one more sample, in other rows it continues the sample.
        """
        num_rows, before = self.token_ids_RL.shape
        if width == before:
            return self
        more = torch.arange(width - before, device=self.position_ids_RL.device).expand(num_rows, -1)
        last_R1 = self.position_ids_RL[:, -1:]
        # Flat indices move by the columns that were added to the rows before.
        row_N = torch.div(self.before_N, before, rounding_mode="floor")
        return ModelRows(
            token_ids_RL=torch.nn.functional.pad(self.token_ids_RL, (0, width - before)),
            position_ids_RL=torch.cat([self.position_ids_RL, more if self.is_packed else last_R1 + 1 + more], dim=1),
            scored_N=self.scored_N,
            before_N=self.before_N + row_N * (width - before),
            experts_RLXK=_padded_experts(self.experts_RLXK, width - before),
        )


def _padded_experts(experts_RLXK: torch.Tensor | None, more: int) -> torch.Tensor | None:
    """Return the experts of rows that are `more` tokens longer, which are FREE; None for None."""
    if experts_RLXK is None:
        return None
    return torch.nn.functional.pad(experts_RLXK, (0, 0, 0, 0, 0, more), value=FREE)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Samples that go through the model at once, right-padded with token 0, mask 0 and weight 0.

    `loss_mask_BT` and `ce_weights_BT` never select position 0: nothing precedes it, so it has no log-prob.
    `rl_weights_BT` is 1 where a sample has no weights of its own; the rl component is where the mask is 1 and the
    weight is not 0, the cross-entropy component where its weight is not 0. `versions_B` are the oldest and newest
    policy version of each row's sampled tokens. `reference_kl_B` is that of `Credit`.
    `proximal_logprobs_BT` and `group_tokens_B1` are those of `LossInputs`, the former as the model computes them.
    `num_tokens` are without padding; `num_routed_tokens` of them have experts given. `num_misfit_tokens` have experts
    of another model in the batch, and none given.
    """

    token_ids_BT: torch.Tensor
    rows: ModelRows
    num_tokens: int
    loss_mask_BT: torch.Tensor
    inference_logprobs_BT: torch.Tensor
    advantages_BT: torch.Tensor
    rl_weights_BT: torch.Tensor
    ce_weights_BT: torch.Tensor
    sampled: Sampled
    reference_kl_B: torch.Tensor
    env_B: tuple[str, ...]
    versions_B: tuple[tuple[int, int], ...]
    ordinal_B: tuple[int, ...] = ()
    """Of each row the ordinal of its group; empty for the row of padding alone."""
    proximal_logprobs_BT: torch.Tensor | None = None
    group_tokens_B1: torch.Tensor | None = None
    num_routed_tokens: int = 0
    num_misfit_tokens: int = 0

    def of_reference(self) -> Self:
        """Return a copy for another model than the policy: nothing is truncated, and its routers choose."""
        return replace(self, sampled=self.sampled.uncut(), rows=replace(self.rows, experts_RLXK=None))

    @property
    def num_rl_tokens(self) -> int:
        """Return the number of tokens of the policy loss: sampled ones whose rl weight is not 0."""
        return int((self.loss_mask_BT & (self.rl_weights_BT != 0)).sum())

    @property
    def num_rl_samples(self) -> int:
        """Return the number of samples with a token of the policy loss."""
        return int((self.loss_mask_BT & (self.rl_weights_BT != 0)).any(dim=-1).sum())

    def loss_inputs(
        self,
        trainer_logprobs_BT: torch.Tensor,
        *,
        entropy_BT: torch.Tensor | None = None,
        reference_logprobs_BT: torch.Tensor | None = None,
    ) -> LossInputs:
        """Return the inputs of the loss for the log-probs that the trained model gives the micro-batch's tokens.

        `entropy_BT` and `reference_logprobs_BT` are passed on; None if the loss does not use them. Tokens that the
        truncation excludes under the trainer's policy (log-prob -inf) are masked. Advantages that are log-ratios of a
        reference to the behaviour policy become log-ratios to the trainer's policy (`reference_kl_B`).
        """
        is_outside_BT = outside_support(trainer_logprobs_BT)
        # A log-prob of -inf would become nan in differences. The engine's takes its place, and the masks below exclude
        # the token.
        logprobs_BT = torch.where(is_outside_BT, self.inference_logprobs_BT, trainer_logprobs_BT)
        proximal_BT = self.proximal_logprobs_BT
        if proximal_BT is not None:  # a token that only the policy before the batch had left out counts as unmoved
            proximal_BT = torch.where(outside_support(proximal_BT), logprobs_BT.detach(), proximal_BT)
        # log(reference / behaviour) minus this is log(reference / trainer).
        moved_BT = (logprobs_BT.detach() - self.inference_logprobs_BT) * self.loss_mask_BT
        return LossInputs(
            trainer_logprobs=logprobs_BT,
            inference_logprobs=self.inference_logprobs_BT,
            advantages=self.advantages_BT - self.reference_kl_B[:, None] * moved_BT,
            loss_mask=self.loss_mask_BT & ~is_outside_BT,
            rl_weights=self.rl_weights_BT,
            # Cross-entropy, too, leaves out what the truncation excludes: its log-prob is -inf.
            ce_weights=self.ce_weights_BT * ~is_outside_BT,
            proximal_logprobs=proximal_BT,
            entropy=entropy_BT,
            reference_logprobs=reference_logprobs_BT,
            group_tokens=self.group_tokens_B1,
        )

    def with_group_tokens(self, counts: Mapping[int, int] | None) -> Self:
        """Return a copy with `LossInputs.group_tokens` from the minibatch's rl tokens of each group, by ordinal.

        Return it as it is if `counts` is None.
        """
        if counts is None:
            return self
        # Rows of a dataset are in no group, and the row of padding has no ordinal: 1 keeps the division finite.
        own = [counts.get(ordinal, 1) for ordinal in self.ordinal_B] or [1]
        return replace(self, group_tokens_B1=torch.tensor(own, device=self.token_ids_BT.device)[:, None])

    def tokens_by_group(self) -> dict[int, int]:
        """Return the number of tokens of the policy loss by group (ordinal); groups without any are left out."""
        counts = dict[int, int]()
        rows = (self.loss_mask_BT & (self.rl_weights_BT != 0)).sum(dim=-1).tolist()
        for ordinal, count in zip(self.ordinal_B, rows, strict=False):  # the row of padding has no ordinal
            if count:  # rows of a dataset are of no group
                counts[ordinal] = counts.get(ordinal, 0) + count
        return counts

    @property
    def num_ce_tokens(self) -> int:
        """Return the number of tokens of the cross-entropy loss."""
        return int((self.ce_weights_BT != 0).sum())


class StepRows(Protocol):
    """Rows of a dataset that steps learn beside rollouts; `trainer.sft.data.DatasetRows` are some."""

    @property
    def digest(self) -> str:
        """Return a digest of the rows and of how they are tokenized."""
        ...

    def samples(self, step: int) -> list[TrainSample]:
        """Return the rows that step `step` (counted from 0) learns, as samples with cross-entropy weights."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Minibatch:
    """This rank's part of what one optimizer step learns from.

    `samples` has for each micro-batch the indices of its samples in the header's sample table.
    """

    micro_batches: list[MicroBatch]
    samples: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """How batches are cut: samples at `seq_len`, the batch into minibatches, and these into micro-batches.

    Rows of these hold one sample each without `packing`. Tokens are sent to recorded experts only with `routing`, which
    is the model's.
    """

    seq_len: int
    micro_batch_tokens: int
    minibatches: int = 1
    packing: Packing | None = None
    routing: RoutingShape | None = None

    @classmethod
    def of(
        cls, config: TrainerConfig, packing: Packing | None, *, routing: RoutingShape | None = None
    ) -> "BatchLayout":
        """Make the layout that the config says; with `packing` None each row holds one sample.

        `routing` is that of a model whose tokens are sent to recorded experts, None otherwise.
        """
        return cls(
            seq_len=config.model.seq_len,
            micro_batch_tokens=config.micro_batch_tokens,
            minibatches=config.minibatches,
            packing=packing,
            routing=routing,
        )


def build_micro_batch(
    samples: Sequence[TrainSample],
    *,
    seq_len: int,
    device: torch.device,
    rows: Rows | None = None,
    routing: RoutingShape | None = None,
) -> MicroBatch:
    """Build a micro-batch on `device`, with each sample cut at `seq_len` tokens.

    `rows` says which samples each row of the model has, as indices into `samples`; None: each sample is a row. Without
    samples the micro-batch is one row of two padding tokens with weight 0: it keeps this rank's collectives in step
    with the others' and contributes a zero gradient. With `routing`, the model's, tokens get the experts that are
    recorded for them; routers choose in samples with experts of another model (`num_misfit_tokens`).
    """
    lengths = [min(len(sample.token_ids), seq_len) for sample in samples] or [2]
    shape = (len(lengths), max(lengths))
    token_ids = np.zeros(shape, np.int64)
    mask = np.zeros(shape, np.bool_)
    logprobs, advantages, rl_weights, ce_weights = (np.zeros(shape, np.float32) for _ in range(4))
    for row, (sample, length) in enumerate(zip(samples, lengths, strict=bool(samples))):
        token_ids[row, :length] = sample.token_ids[:length]
        # Column 0 never counts: no token precedes it.
        mask[row, 1:length] = sample.loss_mask[1:length] != 0
        logprobs[row, :length] = sample.inference_logprobs[:length]
        advantages[row, :length] = sample.advantages[:length]
        rl_weights[row, :length] = 1.0 if sample.rl_weights is None else sample.rl_weights[:length]
        if sample.ce_weights is not None:
            ce_weights[row, 1:length] = sample.ce_weights[1:length]

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    rows = rows or [[place] for place in range(len(lengths))]
    laid = _lay(rows, lengths, token_ids, mask | (ce_weights != 0))
    experts_RLXK, num_misfit = None, 0
    if routing is not None:
        width = laid["token_ids_RL"].shape[1]
        laid_RLXK, num_misfit = _lay_experts(rows, lengths, samples, routing, width=width)
        # In host memory: they are most of a batch, and each micro-batch takes its own to the device.
        experts_RLXK = torch.from_numpy(laid_RLXK)
    return MicroBatch(
        token_ids_BT=tensor(token_ids),
        rows=ModelRows(**{name: tensor(array) for name, array in laid.items()}, experts_RLXK=experts_RLXK),
        num_tokens=sum(lengths),
        loss_mask_BT=tensor(mask),
        inference_logprobs_BT=tensor(logprobs),
        advantages_BT=tensor(advantages),
        rl_weights_BT=tensor(rl_weights),
        ce_weights_BT=tensor(ce_weights),
        sampled=Sampled.of(samples, shape=shape, device=device),
        reference_kl_B=tensor(np.array([s.reference_kl for s in samples] or [0.0], np.float32)),
        env_B=tuple(sample.env for sample in samples) or ("",),
        versions_B=tuple((sample.min_version, sample.max_version) for sample in samples) or ((0, 0),),
        ordinal_B=tuple(sample.ordinal for sample in samples),
        num_routed_tokens=0 if experts_RLXK is None else int((experts_RLXK[:, :, 0, 0] != FREE).sum()),
        num_misfit_tokens=num_misfit,
    )


def _lay_experts(
    rows: Rows, lengths: Sequence[int], samples: Sequence[TrainSample], routing: RoutingShape, *, width: int
) -> tuple[np.ndarray, int]:
    """Lay the recorded experts of samples out in the model's rows, int16 [R, L, X, K]; FREE where none are recorded.

    `rows` says which samples each row has, `lengths` how many tokens each sample has; rows have `width` tokens. Return
    them with the number of tokens whose experts are those of another model: these are FREE, too.
    """
    num_misfit = 0
    laid_RLXK = np.full((len(rows), width, len(routing.layers), routing.top_k), FREE, np.int16)
    for at, row in enumerate(rows):
        start = 0
        for place in row:
            experts = samples[place].routed_experts if samples else None
            if experts is not None:
                known = experts[: lengths[place]]
                if (choices := routing.choices(known)) is not None:
                    laid_RLXK[at, start : start + len(known)] = choices
                else:
                    # The batch is in the log: a step that fails on it would fail again after every resume.
                    num_misfit += len(known)
            start += lengths[place]
    return laid_RLXK, num_misfit


def _lay(rows: Rows, lengths: Sequence[int], token_ids_BT: np.ndarray, needed_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Lay samples out in the model's rows; return the fields of `ModelRows` by name, as arrays.

    `rows` says which samples each row has, `lengths` how many tokens each sample has, `needed_BT` which tokens need a
    log-prob.
    """
    widths = [sum(lengths[place] for place in row) for row in rows]
    shape = (len(rows), max(widths))
    laid_RL, positions_RL = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    places_BT = np.zeros(token_ids_BT.shape, np.int64)
    for at, row in enumerate(rows):
        start = 0
        for place in row:
            length = lengths[place]
            end = start + length
            laid_RL[at, start:end] = token_ids_BT[place, :length]
            positions_RL[at, start:end] = np.arange(length)
            places_BT[place, :length] = at * shape[1] + np.arange(start, end)
            start = end
        # Padding continues the sample's positions, or begins one more sample: a restart would make rows of one sample
        # packed.
        goes_on = start if max(map(len, rows)) == 1 else 0
        positions_RL[at, start:] = np.arange(goes_on, goes_on + shape[1] - start)
    # A token in column 0 is never scored, so that the token before a scored one belongs to the same sample.
    scored_N = np.flatnonzero(needed_BT)
    return {
        "token_ids_RL": laid_RL,
        "position_ids_RL": positions_RL,
        "scored_N": scored_N,
        "before_N": places_BT.reshape(-1)[scored_N] - 1,
    }


# Samples for measurements, from no environment or data set: the cost of a step depends on their lengths only.


def fake_sample(
    length: int, *, vocabulary: int, of_rl: bool = True, routing: RoutingShape | None = None
) -> TrainSample:
    """Make a sample of `length` tokens for measurements, without content; token ids are below `vocabulary`.

    It is trained on by the policy loss with `of_rl`, otherwise by cross-entropy. With `routing` each token but the last
    has experts of a model of that shape, all of which occur equally often.
    """
    ones, zeros = np.ones(length, np.float32), np.zeros(length, np.float32)
    return TrainSample(
        token_ids=np.arange(length, dtype=np.int32) % vocabulary,
        loss_mask=(ones if of_rl else zeros).astype(np.uint8),
        inference_logprobs=zeros,
        advantages=ones,
        ordinal=0,
        member=0,
        attempt=0,
        env="",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
        ce_weights=None if of_rl else ones,
        routed_experts=None if routing is None else _fake_experts(length - 1, routing),
    )


def _fake_experts(num_tokens: int, routing: RoutingShape) -> RoutedArray:
    """Make the experts of so many tokens for measurements: in each layer, token by token, the next `top_k` in turn."""
    turns_TK = np.arange(num_tokens * routing.top_k).reshape(num_tokens, 1, routing.top_k) % routing.num_experts
    experts_TXK = np.repeat(turns_TK, len(routing.layers), axis=1)
    return experts_TXK.astype(dtype_of(routing.num_experts))
