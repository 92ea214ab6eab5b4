"""Which tokens top-p, top-k and min-p leave: one definition for the embedded engine, which samples, and the trainer.

It computes with the torch tensors that it is given, and imports no torch: most services do without. vLLM means the
same, in the same order: min-p, then top-k, then top-p.
"""

from typing import Any


def kept_tokens(logprobs: Any, *, top_p: Any, top_k: Any, min_p: Any) -> Any:
    """Return bool [..., V]: which tokens stay, of log-probs [..., V] under bounds that are tensors [...].

    The likeliest token always stays, and of equally likely ones those with the smaller ids. A bound that is off (top_p
    1, top_k 0, min_p 0) cuts nothing, not even by rounding.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    rank = order.new_ones(order.shape[-1]).cumsum(-1)
    probs = ordered.exp()
    keep = probs >= min_p[..., None] * probs[..., :1]
    keep &= (rank <= top_k[..., None]) | (top_k[..., None] == 0)
    probs = probs.masked_fill(~keep, 0)
    probs /= probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs
    keep &= (before < top_p[..., None]) | (top_p[..., None] >= 1)
    keep[..., 0] = True
    return keep.new_zeros(keep.shape).scatter_(-1, order, keep)
