"""Log-probs and entropies of the tokens of a micro-batch, from hidden states in chunks, without whole logits.

Shape suffixes: B samples, T longest sample, N tokens whose log-probs are needed, V vocabulary.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.nn import functional

from millrace.models.routing import routers_of
from millrace.trainer.gang.distributed import RandomState
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.model.compiled import width_of
from millrace.trainer.model.context_parallel import context_parallel_of, lengths_of_samples

logger = logging.getLogger(__name__)

_CHANGES_LOGITS = WeakSet[nn.Module]()
"""Models that change their head's output (a softcap, a scale), or whose head is more than a linear layer."""


def token_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, is_entropy_learned: bool = False, one_pass: "OnePass | None" = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model; return each token's log-prob given the tokens before it, and the entropy there, both [B, T].

    Both are float32 under each token's temperature and truncation: a sampled token that the truncation excludes under
    this model has the log-prob -inf. Tokens that no loss needs (prompts, padding, column 0) have log(1/V) and log V.
    The entropy has a gradient only if `is_entropy_learned`. With `one_pass` the gradient of its loss is computed here,
    and a backward of that loss only hands it on. Collective in a gang.
    """
    head, rows = _head_of(model), micro_batch.rows
    # More padding only where blocks are compiled, for which a new width could mean a new graph.
    rows = rows.widened(width_of(model, rows.token_ids_RL.shape[1]))
    parallel = context_parallel_of(model)
    share = None if parallel is None else parallel.share(rows)
    # With rows in pieces this rank scores the tokens whose previous token is in its piece.
    scored_N = rows.scored_N if share is None else rows.scored_N[share.own_N]
    targets, both = scoring(
        micro_batch,
        vocabulary=head.weight.shape[0],
        scored_N=scored_N,
        before_N=rows.before_N if share is None else share.before_N,
        is_entropy_learned=is_entropy_learned,
        one_pass=one_pass,
    )
    # No mask: causal attention does not see padding, which is on the right, and positions say where a sample begins.
    whole: dict[str, Any] = {"input_ids": rows.token_ids_RL, "position_ids": rows.position_ids_RL}
    whole |= lengths_of_samples(model, rows.position_ids_RL)
    arguments = {**(whole if share is None else share.arguments), "use_cache": False}
    if (routers := routers_of(model)) is not None:
        # Ranks that share rows are refused by the config (`broken_replay_rules`): these are whole rows.
        experts_RLXK = rows.experts_RLXK
        routers.give(None if experts_RLXK is None else experts_RLXK.flatten(0, 1).to(rows.token_ids_RL.device))
    # A subclass of `nn.Linear`, such as a head with an adapter, computes more than the product that is replaced.
    if type(head) is nn.Linear and model not in _CHANGES_LOGITS:
        drawn = RandomState.of(rows.token_ids_RL.device)
        with instead_of_logits(head, targets) as given:
            both_N2 = model(**arguments).logits
        # A model that scales or caps its head's output returns another tensor than the head gave.
        if not given or both_N2 is not given[0]:
            _CHANGES_LOGITS.add(model)
            both_N2 = None
            given.clear()  # and what a backward would have needed, before all of it is computed again
            # A process that has the model in `_CHANGES_LOGITS` already draws its dropout once: draw the same here.
            drawn.restore()
            return token_logprobs(model, micro_batch, is_entropy_learned=is_entropy_learned, one_pass=one_pass)
    else:
        both_N2 = _of_logits(targets.select(model(**arguments).logits).float(), targets)
    # With gradients they stay given: the backward may compute blocks again. `Learner.learning` takes them back.
    if routers is not None and not torch.is_grad_enabled():
        routers.give(None)
    return both(both_N2 if share is None else share.gathered(both_N2), rows.scored_N)


def changes_logits(model: nn.Module) -> bool:
    """Return whether `token_logprobs` found that the model does not return its head's output as it is."""
    return model in _CHANGES_LOGITS


def scoring(
    micro_batch: MicroBatch,
    *,
    vocabulary: int,
    scored_N: torch.Tensor,
    before_N: torch.Tensor,
    is_entropy_learned: bool,
    one_pass: "OnePass | None",
) -> "tuple[Targets, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]":
    """Return what the head has to compute for a micro-batch, and the function that puts its results into [B, T].

    `scored_N` are the flat indices in [B, T] of the tokens to score, and `before_N` those, in the rows that the head
    sees, of the tokens before them. The function takes the head's results [N, 2] and the flat indices of their tokens;
    it returns log-probs and entropies, with log(1/V) and log V for all other tokens, where V is `vocabulary`.
    """
    ways_N = micro_batch.sampled.ways(scored_N)
    log_vocabulary, shape = math.log(vocabulary), micro_batch.token_ids_BT.shape

    def put(values_N: torch.Tensor, places_N: torch.Tensor, elsewhere: float) -> torch.Tensor:
        # Not in place, so that the gradient reaches the values. [N] → [B, T]
        return values_N.new_full((shape.numel(),), elsewhere).index_copy(0, places_N, values_N).view(shape)

    def both(both_N2: torch.Tensor, places_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs_N, entropy_N = both_N2.unbind(-1)
        entropy_N = entropy_N if is_entropy_learned else entropy_N.detach()
        return put(logprobs_N, places_N, -log_vocabulary), put(entropy_N, places_N, log_vocabulary)

    def slopes(tokens: slice, both_C2: torch.Tensor) -> torch.Tensor:
        assert one_pass is not None
        one_pass.num_tokens += len(both_C2)
        # The autograd function that calls this runs without gradients: the graph from log-probs to the loss exists in
        # here only.
        with torch.enable_grad():
            given_C2 = both_C2.requires_grad_()
            loss = one_pass.loss_at(*both(given_C2, scored_N[tokens]))
            return torch.autograd.grad(loss, given_C2)[0]

    targets = Targets(
        places_N=before_N,
        labels_N=micro_batch.token_ids_BT.reshape(-1)[scored_N],
        temperature_N=micro_batch.sampled.temperature_W[ways_N],
        is_entropy_learned=is_entropy_learned,
        kept=_kept(micro_batch, scored_N, ways_N),
        # Without gradients, as for a reference, there is no loss whose slopes could be asked for.
        slopes=slopes if one_pass is not None and torch.is_grad_enabled() else None,
    )
    return targets, both


def _kept(
    micro_batch: MicroBatch, scored_N: torch.Tensor, ways_N: torch.Tensor
) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
    """Return the function that says which words truncation leaves to the tokens at the flat indices `scored_N`.

    It takes the index of the first token of a chunk and the chunk's logits divided by temperature, [N, V], and returns
    bool [N, V], all True for tokens that were not sampled or without truncation. None if the micro-batch has no
    truncation. `ways_N` are the indices of the tokens' settings.
    """
    sampled = micro_batch.sampled
    if not sampled.cuts_any:
        return None
    # Tokens that were not sampled have a setting as well, which cuts nothing.
    is_cut_N = micro_batch.loss_mask_BT.reshape(-1)[scored_N] & sampled.is_cut(ways_N)

    @torch.no_grad()  # which tokens are left is a fact; the gradient is that of what is renormalised
    def kept(start: int, z_NV: torch.Tensor) -> torch.Tensor:
        """Return which words are left to the tokens of a chunk that begins at token `start`, bool [N, V].

        `z_NV` are the chunk's logits divided by temperature.
        """
        # The costly part is to sort a vocabulary: it is done only for tokens that were sampled from a part of theirs.
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
# The forward takes the whole vocabularies of some tokens at a time. If the loss of each token is its own, the forward
# asks for the loss's slopes g at their log-probs and computes the gradients of hidden states and weight at once: three
# products instead of four. The backward compares the slopes that it is given with those that were used. If they differ,
# and for every other loss, it computes the products again, over chunks of tokens and of the vocabulary. Memory is that
# of one chunk, whatever the number of tokens and the vocabulary.
#
# Shape suffixes: N tokens, V vocabulary, C a chunk of either, K some columns of a chunk, H hidden size.

ONE_PASS_ON = ("cpu",)
"""Devices on which gradients are computed in one pass. On a GPU it was not measured, and takes 4 bytes more for each
weight of the head: weights in bfloat16 need their gradient summed in float32."""
CHUNK = {"cpu": (1024, 8192), "cuda": (2048, 38_912)}
"""Tokens and words of a chunk of the second pass, by device: with what is computed from it some 100 MB, or 1 GB.

Launching a small chunk takes a GPU as long as computing it.
"""
SORTED_TOKENS = 64
"""Tokens whose whole vocabularies are sorted at once where distributions are cut: some 300 MB for 150,000 tokens."""

WHOLE_BYTES = {"cpu": 128 << 20, "cuda": 256 << 20}
"""Bytes of the logits of a chunk of the forward, by device."""
CACHED_COLUMNS = {"cpu": 4096, "cuda": 16_384}
"""Words whose exponentials are computed at a time: on a CPU those of some hundred tokens fit its cache."""

_SKETCHED = 2
_sketched_as = ContextVar[str | None]("_sketched_as", default=None)

_CUT = -1e30
"""A logit in place of -inf: its probability is 0, and the product of both is 0, not nan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The log-probs that the head has to compute: of `labels_N`, each after the token at the flat index `places_N`.

    `kept` is what `_kept` returns. `slopes` returns the loss's derivatives by both results of a chunk of tokens,
    [C, 2]; None computes the gradient in a second pass.
    """

    places_N: torch.Tensor
    labels_N: torch.Tensor
    temperature_N: torch.Tensor
    is_entropy_learned: bool
    kept: Callable[[int, torch.Tensor], torch.Tensor] | None = None
    slopes: Callable[[slice, torch.Tensor], torch.Tensor] | None = None

    def select(self, rows_RLX: torch.Tensor) -> torch.Tensor:
        """Return the vectors of [R, L, X] at the flat indices `places_N`, [N, X]."""
        return rows_RLX.flatten(0, 1).index_select(0, self.places_N)


@dataclass(slots=True)
class OnePass:
    """A loss of which the share of every token depends on that token's log-prob and entropy, and on no other's.

    `loss_at` returns the loss, a scalar, from log-probs and entropies [B, T] of a micro-batch. `num_tokens` counts the
    tokens whose gradient was computed together with their log-prob.
    """

    loss_at: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    num_tokens: int = 0


@contextlib.contextmanager
def sketched(device_type: str) -> Iterator[None]:
    """Compute only the first chunks of the vocabulary in the block, so that memory use is right and values are not.

    Chunks have the size for `device_type` ("cpu" or "cuda"), wherever the tensors are. For estimates of memory.
    """
    token = _sketched_as.set(device_type)
    try:
        yield
    finally:
        _sketched_as.reset(token)


@contextlib.contextmanager
def instead_of_logits(head: nn.Linear, targets: Targets) -> Iterator[list[torch.Tensor]]:
    """Let the head layer return log-prob and entropy of the targets, [N, 2], instead of logits, during the block.

    The model's forward calls the head, where FSDP has its weight gathered. Yields a list that receives each returned
    tensor.
    """
    given: list[torch.Tensor] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        # Vectors are chosen before the product, [R, L, H] → [N, H], so that only tokens with a loss get logits.
        given.append(linear_logprobs(targets.select(hidden), head.weight, head.bias, targets=targets))
        return given[-1]

    # Set on the instance: `nn.Module.__call__` and FSDP's hooks still run around it.
    head.__dict__["forward"] = forward
    try:
        yield given
    finally:
        del head.__dict__["forward"]  # the class's own again


def linear_logprobs(
    hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None = None, *, targets: Targets
) -> torch.Tensor:
    """Return log-prob of the label and entropy of every token, [N, 2], from hidden states, without holding all logits.

    `weight_VH` and `bias_V` are the head's. The result is float32, or float64 if the hidden states are. The entropy has
    a gradient only if `targets.is_entropy_learned`.
    """
    return _LinearLogProbs.apply(hidden_NH, weight_VH, bias_V, targets)  # pyright: ignore[reportReturnType]


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, bias_V: torch.Tensor | None, targets: Targets
    ) -> torch.Tensor:
        ctx.targets, chunks = targets, _Chunks(hidden_NH, weight_VH, bias_V, targets)
        is_one_pass = targets.slopes is not None and chunks.kind in ONE_PASS_ON
        needed = ctx.needs_input_grad[:3] if is_one_pass else (False,) * 3
        both_N2, *rest = chunks.forward(*needed)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, both_N2, *rest)
        return both_N2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, both_N2, normaliser_N, slopes_N2, *made = ctx.saved_tensors
        if slopes_N2 is not None:
            # Values are meaningless in `sketched`, and so would be the comparison.
            if _sketched_as.get() is not None or torch.equal(slopes_N2, grads[0]):
                return *made, None
            # A nan is not equal to itself: a loss that is not finite gets here without a defect of the one pass.
            if torch.isfinite(grads[0]).all():
                logger.warning(
                    "the head's one pass used other slopes than the loss has; its gradient is computed again"
                )
            del made
        chunks, entropy_N = _Chunks(hidden_NH, weight_VH, bias_V, ctx.targets), both_N2[:, 1]
        needs_hidden, needs_weight, needs_bias, _ = ctx.needs_input_grad
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=chunks.dtype) if needs_hidden else None
        weight_grad_VH = torch.zeros_like(weight_VH) if needs_weight else None
        bias_grad_V = torch.zeros_like(bias_V) if needs_bias and bias_V is not None else None
        # Words in the outer loop: the sum for the weight's gradient is in at least float32, and this way only a chunk
        # of it exists beside the gradient in the weight's own dtype.
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
        """Hold hidden states, the head's weight and bias, and the targets, from which chunks of logits are computed."""
        self._hidden_NH, self._weight_VH, self._bias_V, self._targets = hidden_NH, weight_VH, bias_V, targets
        self.dtype = torch.promote_types(hidden_NH.dtype, torch.float32)
        self._temperature_N1 = targets.temperature_N.to(self.dtype)[:, None]
        self._labels_N = targets.labels_N
        self.kind = kind = _sketched_as.get() or hidden_NH.device.type
        self._chunk, self._whole_bytes, self._cached_columns = CHUNK[kind], WHOLE_BYTES[kind], CACHED_COLUMNS[kind]

    def tokens(self) -> Iterator[slice]:
        """Return the chunks of tokens, as slices that cover all tokens."""
        return _slices(len(self._labels_N), self._chunk[0] if self._targets.kept is None else SORTED_TOKENS)

    def columns(self) -> Iterator[slice]:
        """Return the chunks of the vocabulary, as slices.

        There is one chunk if distributions are truncated, which needs sorting all of it; in `sketched` only the first
        two.
        """
        size = len(self._weight_VH)
        return self._limited(_slices(size, self._chunk[1] if self._targets.kept is None else size))

    @staticmethod
    def _limited(chunks: Iterator[slice]) -> Iterator[slice]:
        """Return the chunks, or only the first ones if the computation is `sketched`."""
        return chunks if _sketched_as.get() is None else itertools.islice(chunks, _SKETCHED)

    def forward(
        self, needs_hidden: bool, needs_weight: bool, needs_bias: bool
    ) -> tuple[torch.Tensor, *tuple[torch.Tensor | None, ...]]:
        """Return log-probs and entropies [N, 2], log Σ exp z [N], the loss's slopes [N, 2], and three gradients.

        These are of hidden states, weight and bias; one that is not needed is None. The slopes are None if none is
        needed.
        """
        hidden_NH, weight_VH = self._hidden_NH, self._weight_VH
        # The gradient of a hidden state is written once, in its own dtype; those of weight and bias are summed over
        # chunks.
        hidden_grad_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        weight_sum_VH = torch.zeros_like(weight_VH, dtype=self.dtype) if needs_weight else None
        bias_sum_V = weight_VH.new_zeros(len(weight_VH), dtype=self.dtype) if needs_bias else None
        both_N2 = hidden_NH.new_zeros((len(hidden_NH), 2), dtype=self.dtype)
        normaliser_N = both_N2.new_zeros(len(hidden_NH))
        slopes_N2 = torch.zeros_like(both_N2) if needs_hidden or needs_weight or needs_bias else None
        most, size = self._whole_tokens, len(weight_VH)
        # Made once: each chunk overwrites the one before.
        z_CV = hidden_NH.new_empty((min(most, len(hidden_NH)), size), dtype=self.dtype)
        p_CK = z_CV.new_empty((len(z_CV), min(self._cached_columns, size)))
        for tokens in self._limited(_slices(len(hidden_NH), most)):
            p_CV, total_C = self._exponentials(tokens, z_CV, p_CK, both_N2, normaliser_N)
            if slopes_N2 is None or self._targets.slopes is None:
                continue
            # A copy, because `slopes` makes its argument the leaf of a graph.
            slopes_N2[tokens] = self._targets.slopes(tokens, both_N2[tokens].clone())
            dz_CV = self._gradient_of_whole(tokens, p_CV, p_CK, total_C, both_N2, slopes_N2).to(hidden_NH.dtype)
            if hidden_grad_NH is not None:
                torch.mm(dz_CV, weight_VH, out=hidden_grad_NH[tokens])
            # `addmm_` takes one dtype only; products in 16 bits are added to the float32 sum by the other branch.
            if weight_sum_VH is not None and weight_sum_VH.dtype == dz_CV.dtype:
                weight_sum_VH.addmm_(dz_CV.T, hidden_NH[tokens])
            elif weight_sum_VH is not None:
                weight_sum_VH += dz_CV.T @ hidden_NH[tokens]
            if bias_sum_V is not None:
                bias_sum_V += dz_CV.sum(0)
        weight_grad_VH = None if weight_sum_VH is None else weight_sum_VH.to(weight_VH.dtype)
        bias_grad_V = None if bias_sum_V is None or self._bias_V is None else bias_sum_V.to(self._bias_V.dtype)
        return both_N2, normaliser_N, slopes_N2, hidden_grad_NH, weight_grad_VH, bias_grad_V

    def _exponentials(
        self,
        tokens: slice,
        buffer_CV: torch.Tensor,
        buffer_CK: torch.Tensor,
        both_N2: torch.Tensor,
        normaliser_N: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute log-probs, entropies and log Σ exp z of some tokens; return exp(z - max z) [C, V], and its sums [C].

        The first three are written into `both_N2` and `normaliser_N` at `tokens`. The exponentials are in `buffer_CV`;
        `buffer_CK` is scratch memory for some columns.
        """
        whole = slice(0, len(self._weight_VH))
        z_CV = self._logits(tokens, whole, out=buffer_CV[: tokens.stop - tokens.start])
        # The label's logit is read before -inf becomes `_CUT`: an excluded label has the log-prob -inf.
        label_z_C = z_CV.gather(1, self._labels_N[tokens, None]).squeeze(1)
        top_C1 = self._make_finite(z_CV).amax(1, keepdim=True)
        # Both sums are of z - max z: no exponential overflows, and the maximum cancels in the entropy.
        total_C, weighted_C = label_z_C.new_zeros(len(z_CV)), label_z_C.new_zeros(len(z_CV))
        for z_CK in z_CV.split(buffer_CK.shape[1], dim=1):  # while they are in the processor's cache
            p_CK = torch.exp(z_CK.sub_(top_C1), out=buffer_CK[: len(z_CK), : z_CK.shape[1]])
            total_C += p_CK.sum(1)
            weighted_C += z_CK.mul_(p_CK).sum(1)
            # The exponentials take the place of the logits, which nothing needs from here on; `_gradient_of_whole`
            # starts from them.
            z_CK.copy_(p_CK)
        log_total_C = total_C.log()
        normaliser_N[tokens] = top_C1.squeeze(1) + log_total_C
        logprob_C = label_z_C - top_C1.squeeze(1) - log_total_C
        both_N2[tokens] = torch.stack([logprob_C, log_total_C - weighted_C / total_C], dim=-1)
        return z_CV, total_C

    def _gradient_of_whole(
        self,
        tokens: slice,
        p_CV: torch.Tensor,
        buffer_CK: torch.Tensor,
        total_C: torch.Tensor,
        both_N2: torch.Tensor,
        slopes_N2: torch.Tensor,
    ) -> torch.Tensor:
        """Make the exponentials of some tokens, in place, the gradient of the head's product x W' + b; return it.

        `p_CV` and `total_C` are the results of `_exponentials` for `tokens`, `both_N2` and `slopes_N2` the log-probs
        and entropies and the loss's slopes of all tokens. `buffer_CK` is scratch memory for some columns.
        """
        # z is the head's product divided by T: the slope at the product is the slope at z divided by T.
        logprob_slope_C, entropy_slope_C = (slopes_N2[tokens] / self._temperature_N1[tokens]).unbind(1)
        if self._targets.is_entropy_learned:
            entropy_C1 = both_N2[tokens, 1:]
            # g_H (p log p + p H), where `xlogy` is 0 for a word of probability 0.
            for p_CK in p_CV.split(buffer_CK.shape[1], dim=1):
                term_CK = buffer_CK[: len(p_CK), : p_CK.shape[1]]
                torch.special.xlogy(p_CK.div_(total_C[:, None]), p_CK, out=term_CK)
                term_CK.addcmul_(p_CK, entropy_C1).mul_(entropy_slope_C[:, None])
                p_CK.mul_(-logprob_slope_C[:, None]).sub_(term_CK)
        else:
            p_CV.mul_((-logprob_slope_C / total_C)[:, None])
        # A label that truncation excludes has log-prob -inf, a constant: it gets no gradient.
        own_C = torch.where(both_N2[tokens, 0] == -math.inf, 0.0, logprob_slope_C)
        return p_CV.scatter_add_(1, self._labels_N[tokens, None], own_C[:, None])

    @property
    def _whole_tokens(self) -> int:
        """Return the number of tokens whose logits one pass holds at once."""
        if self._targets.kept is not None:
            return SORTED_TOKENS
        return max(1, self._whole_bytes // (self.dtype.itemsize * len(self._weight_VH)))

    def gradient(
        self,
        tokens: slice,
        columns: slice,
        normaliser_N: torch.Tensor,
        entropy_N: torch.Tensor,
        grad_N2: torch.Tensor,
    ) -> torch.Tensor:
        """Return the gradient of the head's product x W' + b for a chunk of tokens and of the vocabulary, [N, C].

        `normaliser_N` (log Σ exp z) and `entropy_N` are the forward's results, and `grad_N2` the gradient of its
        output, all for all tokens.
        """
        z_NC = self._logits(tokens, columns)
        place_N1, is_here_N = self._places(tokens, columns)
        # A label that truncation excludes has log-prob -inf, a constant: it gets no gradient.
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

    def _logits(self, tokens: slice, columns: slice, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits divided by temperature of a chunk, [N, C]; -inf for words that truncation excludes.

        They are in the memory of `out` if it is given.
        """
        hidden_NH, weight_CH = self._hidden_NH[tokens], self._weight_VH[columns]
        bias_C = None if self._bias_V is None else self._bias_V[columns]
        if out is None:
            z_NC = functional.linear(hidden_NH, weight_CH, bias_C).to(self.dtype)
        elif hidden_NH.dtype != self.dtype:
            z_NC = out.copy_(functional.linear(hidden_NH, weight_CH, bias_C))
        elif bias_C is None:
            z_NC = torch.mm(hidden_NH, weight_CH.T, out=out)
        else:
            z_NC = torch.addmm(bias_C, hidden_NH, weight_CH.T, out=out)
        z_NC = z_NC.div_(self._temperature_N1[tokens])
        if self._targets.kept is not None:
            z_NC = z_NC.masked_fill_(~self._targets.kept(tokens.start, z_NC), -math.inf)
        return z_NC

    def _make_finite(self, z_NC: torch.Tensor) -> torch.Tensor:
        """Replace logits of -inf by `_CUT`, in place, if distributions are truncated; return the tensor."""
        return z_NC if self._targets.kept is None else z_NC.clamp_(min=_CUT)

    def _places(self, tokens: slice, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the labels' columns within a chunk, [N, 1], and whether each label is in the chunk, bool [N].

        Columns are clamped to the chunk, so that they can be gathered for all labels.
        """
        labels_N = self._labels_N[tokens]
        is_here_N = (labels_N >= columns.start) & (labels_N < columns.stop)
        return (labels_N - columns.start).clamp(0, columns.stop - columns.start - 1)[:, None], is_here_N


def _slices(size: int, step: int) -> Iterator[slice]:
    """Yield slices of `step` indices that cut [0, size), of which the last may be shorter; an empty one for size 0."""
    # The first slice comes even for size 0: a rank without tokens has to take part in the products all the same.
    return (slice(start, min(start + step, size)) for start in itertools.chain([0], range(step, size, step)))


def _of_logits(logits_NV: torch.Tensor, targets: Targets) -> torch.Tensor:
    """Return log-prob of the label and entropy of every target, [N, 2], from whole logits at the targets."""
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
    """Return log-softmax of logits / temperature at the labels, and the entropy, both [B, K] in the logits' dtype.

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
        # In place, because a second tensor of the logits' size may not fit into memory.
        probabilities_BKV = torch.exp(logits_BKV - normaliser_BK[..., None])
        weighted_BKV = probabilities_BKV.mul_(logits_BKV)
        # A word that cannot be sampled is 0 · -inf = nan here, and adds 0. Infinities stay, so that a broken model is
        # noticed.
        entropy_BK = normaliser_BK - weighted_BKV.nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf).sum(-1)
    return logprobs_BK, entropy_BK


def _head_of(model: Any) -> Any:
    """Return the layer of a causal model of transformers that computes logits from hidden states."""
    return model.get_output_embeddings()
