"""Log-probs of the tokens of a micro-batch under the model.

Shape suffixes: B rows, T padded length, K = T - first scored column + 1 (the logits that are computed), V vocabulary.
"""

import inspect
import math
from typing import Any

import torch

from millrace.trainer.learning.batch import MicroBatch, TruncationRows

_POSITIONS = 64
"""Positions whose vocabularies are sorted at once: some 300 MB for 150,000 tokens."""


def token_logprobs(
    model: torch.nn.Module, micro_batch: MicroBatch, *, is_entropy_learned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of every token given those before it, and the entropy of the distribution it was drawn from, [B, T].

    Both are float32 under the sample's temperature and truncation: a sampled token that the truncation leaves out under
    this model has the log-prob -inf. Columns before the first token that any row needs are not computed:
    they hold log(1/V) and log V, as column 0 does, which no token precedes. The entropy carries a gradient only where
    it is learned, which costs the memory of the logits once more.
    """
    first = micro_batch.first_scored
    length = micro_batch.token_ids_BT.shape[1]
    keep = length - first + 1  # the logits of column j predict the token of column j + 1
    arguments: dict[str, Any] = {
        "input_ids": micro_batch.token_ids_BT,
        "attention_mask": micro_batch.attention_mask_BT,
        "position_ids": micro_batch.position_ids_BT,
        "use_cache": False,
    }
    if _takes_logits_to_keep(model):
        arguments["logits_to_keep"] = keep
    logits_BKV = model(**arguments).logits[:, -keep:-1].float()
    labels_BK = micro_batch.token_ids_BT[:, first:]
    if micro_batch.truncation_B is not None:
        logits_BKV = logits_BKV.masked_fill(~_kept(logits_BKV, micro_batch, micro_batch.truncation_B), -math.inf)
    logprobs_BK, entropy_BK = select_logprobs(
        logits_BKV, labels_BK, temperature_B=micro_batch.temperature_B, is_entropy_learned=is_entropy_learned
    )
    log_vocabulary = math.log(logits_BKV.shape[-1])
    shape = (labels_BK.shape[0], first)
    return (
        torch.cat([logprobs_BK.new_full(shape, -log_vocabulary), logprobs_BK], dim=1),
        torch.cat([entropy_BK.new_full(shape, log_vocabulary), entropy_BK], dim=1),
    )


@torch.no_grad()  # which tokens are left is a fact; the gradient is that of what is renormalised
def _kept(logits_BKV: torch.Tensor, micro_batch: MicroBatch, truncation_B: TruncationRows) -> torch.Tensor:
    """Which tokens could be sampled, bool [B, K, V]: all of them where the policy sampled nothing, or nothing was cut.

    Sorting takes many times the memory of the logits, so it goes by `_POSITIONS` positions at a time.
    """
    is_cut_BK = micro_batch.loss_mask_BT[:, micro_batch.first_scored :] & truncation_B.is_cut[:, None]
    kept_BKV = torch.ones_like(logits_BKV, dtype=torch.bool)
    for rows_N, columns_N in (part.unbind(1) for part in is_cut_BK.nonzero().split(_POSITIONS)):
        scaled_NV = logits_BKV[rows_N, columns_N] / micro_batch.temperature_B[rows_N, None]
        kept_BKV[rows_N, columns_N] = truncation_B.kept(torch.log_softmax(scaled_NV, dim=-1), rows_N)
    return kept_BKV


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


def _takes_logits_to_keep(model: torch.nn.Module) -> bool:
    """Whether the model's forward can leave out the logits of the prompt, which are most of the memory."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters
