"""Log-probs and entropies from hidden states, without the logits: the head's product and its softmax in chunks.

    z = (x W' + b) / T      log p(label) = z[label] - log Σ exp z      H = log Σ exp z - Σ p z
    dz = g_logp (onehot - p) - g_H p (z - log Σ exp z + H)

Forward and backward each go over chunks of tokens and of the vocabulary with a running maximum, and the backward
computes the products again: memory is that of one chunk, whatever the number of tokens and the vocabulary.

Shape suffixes: N tokens, V vocabulary, C a chunk of it, H hidden size.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

CHUNK = {"cpu": (1024, 8192), "cuda": (2048, 38_912)}
"""Tokens and words of a chunk, by device: with what is computed from it some 100 MB, or 1 GB on a GPU.

A GPU takes as long to be told of a small chunk as to compute it.
"""
SORTED_TOKENS = 64
"""Tokens whose whole vocabularies are sorted at once where distributions are cut: some 300 MB for 150,000 tokens."""

_SKETCHED = 2
_sketched_as = ContextVar[str | None]("_sketched_as", default=None)

_CUT = -1e30
"""A logit that has no part in any sum, and whose product with its probability of 0 is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """Which log-probs are asked of the head: those of the tokens that follow the flat places `places_N`.

    `kept`, where distributions are cut, says of scaled logits [N, V] from token `start` on which could be sampled.
    """

    places_N: torch.Tensor
    labels_N: torch.Tensor
    temperature_N: torch.Tensor
    is_entropy_learned: bool
    kept: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    def select(self, rows_RLX: torch.Tensor) -> torch.Tensor:
        """What is at the places of rows, [N, X]."""
        return rows_RLX.flatten(0, 1).index_select(0, self.places_N)


@contextlib.contextmanager
def sketched(device_type: str) -> Iterator[None]:
    """In this block only the first chunks of the vocabulary are computed: the memory is that of all, no value is.

    Chunks are those of such a device, wherever the tensors are.
    """
    token = _sketched_as.set(device_type)
    try:
        yield
    finally:
        _sketched_as.reset(token)


@contextlib.contextmanager
def instead_of_logits(head: nn.Linear, targets: Targets) -> Iterator[list[torch.Tensor]]:
    """In this block the head gives, instead of logits, the log-prob and the entropy of the targets, [N, 2].

    It stays a part of the model's forward, where FSDP holds its weight whole. What it gave is in the list.
    """
    given: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        given.append(linear_logprobs(targets.select(hidden), head.weight, head.bias, targets=targets))
        return given[-1]

    head.__dict__["forward"] = forward
    try:
        yield given
    finally:
        del head.__dict__["forward"]  # the class's own again


def linear_logprobs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None = None, *, targets: Targets
) -> torch.Tensor:
    """Log-prob of each label and entropy, [N, 2], at least float32; no gradient of an entropy that is not learned."""
    return _LinearLogProbs.apply(hidden_NH, weight_VH, bias_V, targets)  # pyright: ignore[reportReturnType]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, targets: Targets
    ) -> torch.Tensor:
        chunks = _Chunks(hidden_NH, weight_VH, bias_V, targets)
        parts = [chunks.forward(tokens) for tokens in chunks.tokens()]
        logprobs_N, normaliser_N, entropy_N = (torch.cat(each) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, normaliser_N, entropy_N)
        ctx.targets = targets
        return torch.stack([logprobs_N, entropy_N], dim=-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, normaliser_N, entropy_N = ctx.saved_tensors
        chunks = _Chunks(hidden_NH, weight_VH, bias_V, ctx.targets)
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=chunks.dtype) if needs_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH) if needs_weight else None
        bias_grad_V = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        for columns in chunks.columns():
            weight_sum_CH = torch.zeros_like(weight_VH[columns], dtype=chunks.dtype) if needs_weight else None
            for tokens in chunks.tokens():
                dz_NC = chunks.gradient(tokens, columns, normaliser_N, entropy_N, grads[0]).to(hidden_NH.dtype)
                if hidden_grad_NH is not None:
                    hidden_grad_NH[tokens] += dz_NC @ weight_VH[columns]
                if weight_sum_CH is not None:
                    weight_sum_CH += dz_NC.T @ hidden_NH[tokens]
                if bias_grad_V is not None:
                    bias_grad_V[columns] += dz_NC.sum(0)
            if weight_grad_VH is not None and weight_sum_CH is not None:
                weight_grad_VH[columns] = weight_sum_CH
        hidden_grad = None if hidden_grad_NH is None else hidden_grad_NH.to(hidden_NH.dtype)
        return hidden_grad, weight_grad_VH, bias_grad_V, None


class _Chunks:
    """The scaled logits of all tokens, of which only a chunk exists at a time."""

    def __init__(
        self, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, targets: Targets
    ) -> None:
        self._hidden_NH, self._weight_VH, self._bias_V, self._targets = hidden_NH, weight_VH, bias_V, targets
        self.dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        self._temperature_N1 = targets.temperature_N.to(self.dtype)[:, None]
        self._labels_N = targets.labels_N
        self._chunk = CHUNK[_sketched_as.get() or hidden_NH.device.type]

    def tokens(self) -> Iterator[slice]:
        """The chunks of tokens."""
        return _slices(len(self._labels_N), self._chunk[0] if self._targets.kept is None else SORTED_TOKENS)

    def columns(self) -> Iterator[slice]:
        """The chunks of the vocabulary, which is sorted as a whole where distributions are cut."""
        size = len(self._weight_VH)
        columns = _slices(size, self._chunk[1] if self._targets.kept is None else size)
        return columns if _sketched_as.get() is None else itertools.islice(columns, _SKETCHED)

    def forward(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probs, normalisers and entropies of some tokens: one pass with a running maximum."""
        maximum_N = self._hidden_NH.new_full((len(self._labels_N[tokens]),), -math.inf, dtype=self.dtype)
        label_N, total_N, weighted_N = maximum_N.clone(), maximum_N.new_zeros(()), maximum_N.new_zeros(())
        for columns in self.columns():
            z_NC = self._logits(tokens, columns)
            place_N1, is_here_N = self._places(tokens, columns)
            label_N = torch.where(is_here_N, z_NC.gather(1, place_N1).squeeze(1), label_N)
            z_NC = self._make_finite(z_NC)
            highest_N = torch.maximum(maximum_N, z_NC.amax(1))
            shrink_N = torch.exp(maximum_N - highest_N)
            p_NC = (z_NC - highest_N[:, None]).exp_()
            total_N = total_N * shrink_N + p_NC.sum(1)
            weighted_N = weighted_N * shrink_N + p_NC.mul_(z_NC).sum(1)
            maximum_N = highest_N
        normaliser_N = maximum_N + total_N.log()
        return label_N - normaliser_N, normaliser_N, normaliser_N - weighted_N / total_N

    def gradient(
        self,
        tokens: slice,
        columns: slice,
        normaliser_N: torch.Tensor,
        entropy_N: torch.Tensor,
        grad_N2: torch.Tensor,
    ) -> torch.Tensor:
        """The gradient by the head's product, of some tokens and columns."""
        z_NC = self._logits(tokens, columns)
        place_N1, is_here_N = self._places(tokens, columns)
        is_here_N &= z_NC.gather(1, place_N1).squeeze(1) != -math.inf
        logp_NC = self._make_finite(z_NC).sub_(normaliser_N[tokens, None])
        logprob_grad_N, entropy_grad_N = (grad_N2[tokens].to(self.dtype) / self._temperature_N1[tokens]).unbind(1)
        if self._targets.is_entropy_learned:
            factor_NC = (logp_NC + entropy_N[tokens, None]).mul_(-entropy_grad_N[:, None]).sub_(logprob_grad_N[:, None])
            dz_NC = logp_NC.exp_().mul_(factor_NC)
        else:
            dz_NC = logp_NC.exp_().mul_(-logprob_grad_N[:, None])
        label_N1 = dz_NC.gather(1, place_N1) + torch.where(is_here_N, logprob_grad_N, 0.0)[:, None]
        return dz_NC.scatter_(1, place_N1, label_N1)

    def _logits(self, tokens: slice, columns: slice) -> torch.Tensor:
        bias_C = None if self._bias_V is None else self._bias_V[columns]
        z_NC = functional.linear(self._hidden_NH[tokens], self._weight_VH[columns], bias_C).to(self.dtype)
        z_NC = z_NC.div_(self._temperature_N1[tokens])
        if self._targets.kept is not None:
            z_NC = z_NC.masked_fill_(~self._targets.kept(tokens.start, z_NC), -math.inf)
        return z_NC

    def _make_finite(self, z_NC: torch.Tensor) -> torch.Tensor:
        return z_NC if self._targets.kept is None else z_NC.clamp_(min=_CUT)

    def _places(self, tokens: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the labels are in a chunk [N, 1], and whether they are."""
        labels_N = self._labels_N[tokens]
        is_here_N = (labels_N >= columns.start) & (labels_N < columns.stop)
        return (labels_N - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], is_here_N


def _slices(size: int, step: int) -> Iterator[slice]:
    """[0, size) in equal steps; one empty slice of nothing."""
    return (slice(start, min(start + step, size)) for start in itertools.chain([0], range(step, size, step)))
