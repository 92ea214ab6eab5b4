"""Log-probs of the tokens of a micro-batch under the model.

Shape suffixes: B samples, T longest sample, N tokens whose log-probs are needed, V vocabulary.
"""

import math
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from millrace.trainer.gang.devices import RandomState
from millrace.trainer.learning.batch import MicroBatch
from millrace.trainer.learning.head import SORTED_TOKENS, Targets, instead_of_logits
from millrace.trainer.model.attention import lengths_of_samples
from millrace.trainer.model.compiled import width_of
from millrace.trainer.model.context_parallel import context_parallel_of

_CHANGES_LOGITS = WeakSet[nn.Module]()
"""Models that do something to what their head gives (a softcap, a scale), or whose head is more than a linear layer."""


def token_logprobs(
    model: nn.Module, micro_batch: MicroBatch, *, is_entropy_learned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every token given those before it, and the entropy of the distribution it was drawn from, [B, T].

    Both are float32 under each token's temperature and truncation: a sampled token that the truncation leaves out under
    this model has the log-prob -inf. Those of tokens that no loss needs, prompts and padding, are not computed: they
    hold log(1/V) and log V, as column 0 does, which no token precedes. The entropy carries a gradient only where it is
    learned.
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
            drawn.restore()  # a process that knows the model already draws its dropout once
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
    """What says of scaled logits [N, V], from token `start` on, which tokens could be sampled, bool [N, V].

    All of them where the policy sampled nothing, or nothing was cut; None if nothing was cut anywhere.
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


def _of_logits(logits_NV: torch.Tensor, targets: Targets) -> torch.Tensor:
    """What the head would give instead of the logits, [N, 2]."""
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
    """Log-softmax of the logits at the labels, and the entropy, both [B, K] in the logits' dtype.

    A logit of -inf is a token that cannot be sampled; it adds nothing to the entropy.
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
    """The layer that makes logits of hidden states, of a causal model of transformers."""
    return model.get_output_embeddings()
