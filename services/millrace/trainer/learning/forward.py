"""Log-probs and entropies of the tokens of a micro-batch, from hidden states in chunks, without whole logits.

Shape suffixes: B samples, T longest sample, N tokens whose log-probs are needed, V vocabulary.
"""

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional

from millrace.trainer.gang.devices import RandomState
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.model.compiled import width_of
from millrace.trainer.model.context_parallel import context_parallel_of, lengths_of_samples

_CHANGES_LOGITS = WeakSet[nn.Module]()
"""Models that change their head's output (a softcap, a scale), or whose head is more than a linear layer."""


def token_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, is_entropy_learned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model; return each token's log-prob given the earlier ones, and its distribution's entropy, both [B, T].

    Both are float32 under each token's temperature and truncation: a sampled token that the truncation excludes under
    this model has the log-prob -inf. Tokens that no loss needs (prompts, padding, column 0) hold log(1/V) and log V.
    The entropy has a gradient only if `is_entropy_learned`.
    """
    head, rows = _head_of(model), micro_batch.rows
    rows = rows.widened(width_of(model, rows.token_ids_RL.shape[1]))
    parallel = context_parallel_of(model)
    share = None if parallel is None else parallel.share(rows)
    scored_N = rows.scored_N if share is None else rows.scored_N[share.own_N]
    ways_N = micro_batch.sampled.ways(scored_N)
    targets = Targets(
        places_N=rows.before_N if share is None else share.before_N,
        labels_N=micro_batch.token_ids_BT.reshape(-1)[scored_N],
        temperature_N=micro_batch.sampled.temperature_W[ways_N],
        is_entropy_learned=is_entropy_learned,
        kept=_kept(micro_batch, scored_N, ways_N),
    )
    # No mask: causal attention does not see padding, which is on the right, and positions say where a sample begins.
    whole: dict[str, Any] = {"input_ids": rows.token_ids_RL, "position_ids": rows.position_ids_RL}
    whole |= lengths_of_samples(model, rows.position_ids_RL)
    arguments = {**(whole if share is None else share.arguments), "use_cache": False}
    if type(head) is nn.Linear and model not in _CHANGES_LOGITS:
        drawn = RandomState.of(rows.token_ids_RL.device)
        with instead_of_logits(head, targets) as given:
            both_N2 = model(**arguments).logits
        if not given or both_N2 is not given[0]:
            _CHANGES_LOGITS.add(model)
            both_N2 = None
            given.clear()  # and what a backward would have needed, before all of it is computed again
            # A process that has the model in `_CHANGES_LOGITS` already draws its dropout once: draw the same here.
            drawn.restore()
            return token_logprobs(model, micro_batch, is_entropy_learned=is_entropy_learned)
    else:
        both_N2 = _of_logits(targets.select(model(**arguments).logits).float(), targets)
    logprobs_N, entropy_N = (both_N2 if share is None else share.gathered(both_N2)).unbind(-1)
    log_vocabulary, shape = math.log(head.weight.shape[0]), micro_batch.token_ids_BT.shape

    def put(values_N: torch.Tensor, elsewhere: float) -> torch.Tensor:
        return values_N.new_full((shape.numel(),), elsewhere).index_copy(0, rows.scored_N, values_N).view(shape)

    entropy_N = entropy_N if is_entropy_learned else entropy_N.detach()
    return put(logprobs_N, -log_vocabulary), put(entropy_N, log_vocabulary)


def _kept(
    micro_batch: MicroBatch, scored_N: torch.Tensor, ways_N: torch.Tensor
) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
    """Return a function (start, scaled logits [N, V] from that token on) -> which tokens could be sampled, bool [N, V].

    Where the policy sampled nothing, or without truncation, these are all. None if no token was truncated.
    """
    sampled = micro_batch.sampled
    if not sampled.cuts_any:
        return None
    is_cut_N = micro_batch.loss_mask_BT.reshape(-1)[scored_N] & sampled.is_cut(ways_N)

    @torch.no_grad()  # which tokens are left is a fact; the gradient is that of what is renormalised
    def kept(start: int, z_NV: torch.Tensor) -> torch.Tensor:
        places_N = is_cut_N[start : start + len(z_NV)].nonzero().squeeze(1)
        kept_NV = torch.ones_like(z_NV, dtype=torch.bool)
        if len(places_N):
            logprobs_NV = torch.log_softmax(z_NV[places_N], dim=-1)
            kept_NV[places_N] = sampled.kept(logprobs_NV, ways_N[start + places_N])
        return kept_NV

    return kept


# Log-probs and entropies from hidden states, without the logits: the head's product and its softmax in chunks.
#
#     z = (x W' + b) / T      log p(label) = z[label] - log Σ exp z      H = log Σ exp z - Σ p z
#     dz = g_logp (onehot - p) - g_H p (z - log Σ exp z + H)
#
# Forward and backward each go over chunks of tokens and of the vocabulary with a running maximum, and the backward
# computes the products again: memory is that of one chunk, whatever the number of tokens and the vocabulary.
#
# Shape suffixes: N tokens, V vocabulary, C a chunk of it, H hidden size.

CHUNK = {"cpu": (1024, 8192), "cuda": (2048, 38_912)}
"""Tokens and words of a chunk, by device: with what is computed from it some 100 MB, or 1 GB on a GPU.

Launching a small chunk takes a GPU as long as computing it.
"""
SORTED_TOKENS = 64
"""Tokens whose whole vocabularies are sorted at once where distributions are cut: some 300 MB for 150,000 tokens."""

_SKETCHED = 2
_sketched_as = ContextVar[str | None]("_sketched_as", default=None)

_CUT = -1e30
"""A logit in place of -inf: its probability is 0, and the product of both is 0, not nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The log-probs that the head has to compute: of `labels_N`, each after the token at the flat index `places_N`.

    `kept` is what `_kept` returns.
    """

    places_N: torch.Tensor
    labels_N: torch.Tensor
    temperature_N: torch.Tensor
    is_entropy_learned: bool
    kept: Callable[[int, torch.Tensor], torch.Tensor] | None = None

    def select(self, rows_RLX: torch.Tensor) -> torch.Tensor:
        """Return the rows of [R, L, X] at `places_N`, [N, X]."""
        return rows_RLX.flatten(0, 1).index_select(0, self.places_N)


@contextlib.contextmanager
def sketched(device_type: str) -> Iterator[None]:
    """Compute only the first chunks of the vocabulary in the block: memory use is right, values are not.

    Chunks have the size for `device_type`, wherever the tensors are.
    """
    token = _sketched_as.set(device_type)
    try:
        yield
    finally:
        _sketched_as.reset(token)


@contextlib.contextmanager
def instead_of_logits(head: nn.Linear, targets: Targets) -> Iterator[list[torch.Tensor]]:
    """Let the head return the targets' log-prob and entropy, [N, 2], instead of logits during the block.

    It is still called by the model's forward, where FSDP has its weight gathered. The list receives what it returned.
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
    """Return the log-prob of each label and the entropy, [N, 2], at least float32, without ever holding all logits.

    The entropy has a gradient only if `targets.is_entropy_learned`.
    """
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
        """Yield the chunks of tokens."""
        return _slices(len(self._labels_N), self._chunk[0] if self._targets.kept is None else SORTED_TOKENS)

    def columns(self) -> Iterator[slice]:
        """Yield the chunks of the vocabulary; one chunk if distributions are cut, which needs sorting all of it."""
        size = len(self._weight_VH)
        columns = _slices(size, self._chunk[1] if self._targets.kept is None else size)
        return columns if _sketched_as.get() is None else itertools.islice(columns, _SKETCHED)

    def forward(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute log-probs, normalisers and entropies of some tokens in one pass with a running maximum."""
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
        """Compute the gradient with respect to the head's product, for some tokens and columns."""
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
        """Return the labels' indices within a chunk [N, 1], clamped to it, and whether each label is in the chunk."""
        labels_N = self._labels_N[tokens]
        is_here_N = (labels_N >= columns.start) & (labels_N < columns.stop)
        return (labels_N - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], is_here_N


def _slices(size: int, step: int) -> Iterator[slice]:
    """Yield slices that cut [0, size) into equal steps; one empty slice if `size` is 0."""
    return (slice(start, min(start + step, size)) for start in itertools.chain([0], range(step, size, step)))


def _of_logits(logits_NV: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return the targets' log-prob and entropy, [N, 2], from whole logits."""
    if targets.kept is not None:
        z_NV = logits_NV / targets.temperature_N[:, None]
        starts = range(0, len(z_NV), SORTED_TOKENS)
        kept = [targets.kept(start, z_NV[start : start + SORTED_TOKENS]) for start in starts]
        logits_NV = logits_NV.masked_fill(~torch.cat(kept), -math.inf) if kept else logits_NV
    both = select_logprobs(
        logits_NV[:, None],
        targets.labels_N[:, None],
        temperature_B=targets.temperature_N,
        is_entropy_learned=targets.is_entropy_learned,
    )
    return torch.cat(both, dim=-1)


def select_logprobs(
    logits_BKV: torch.Tensor,
    labels_BK: torch.Tensor,
    *,
    temperature_B: torch.Tensor,
    is_entropy_learned: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-softmax of logits / temperature at the labels, and the entropy, both [B, K] in the logits' dtype.

    A logit of -inf is a token that cannot be sampled; it adds nothing to the entropy, which has a gradient only if
    `is_entropy_learned`.
    """
    logits_BKV = logits_BKV / temperature_B.to(logits_BKV.dtype)[:, None, None]
    normaliser_BK = torch.logsumexp(logits_BKV, dim=-1)
    logprobs_BK = logits_BKV.gather(-1, labels_BK[..., None]).squeeze(-1) - normaliser_BK
    if is_entropy_learned:
        finite_BKV = logits_BKV.masked_fill(logits_BKV == -math.inf, 0.0)  # whose gradient is then 0 instead of nan
        return logprobs_BK, normaliser_BK - (torch.softmax(logits_BKV, dim=-1) * finite_BKV).sum(-1)
    with torch.no_grad():
        probabilities_BKV = torch.exp(logits_BKV - normaliser_BK[..., None])
        weighted_BKV = probabilities_BKV.mul_(logits_BKV)
        entropy_BK = normaliser_BK - weighted_BKV.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf).sum(-1)
    return logprobs_BK, entropy_BK


def _head_of(model: Any) -> Any:
    """Return the layer that makes logits of hidden states, of a causal model of transformers."""
    return model.get_output_embeddings()
