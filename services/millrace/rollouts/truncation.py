"""Which tokens top-p, top-k and min-p leave: one definition for the embedded engine, which samples, and the trainer.

It computes with the torch tensors that it is given, and imports no torch: most services do without. vLLM means the
same, in the same order: min-p, then top-k, then top-p.
"""

from typing import Any

_ONE = 2.0**40
"""A probability of 1 as an integer: finer than float32, and a sum over any vocabulary fits into int64."""


def kept_tokens(logprobs: Any, *, top_p: Any, top_k: Any, min_p: Any) -> Any:
    """Return bool [..., V]: which tokens stay, of log-probs [..., V] under bounds that are tensors [...].

    The likeliest token always stays. Tokens as likely as the last of the top-k stay, too; of equally likely ones at the
    border of the top-p those with the smaller ids. A bound that is off (top_p 1, top_k 0, min_p 0) cuts nothing, not
    even by rounding. Sums are those of integers, which are the same in any order, on any device.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    keep = probs >= min_p[..., None] * probs[..., :1]
    last = ordered.gather(-1, (top_k - 1).clamp(0, ordered.shape[-1] - 1).long()[..., None])
    keep &= (ordered >= last) | (top_k[..., None] == 0)
    if (top_p < 1).any():
        # Integers add up to the same sum in any order: trainer and engine cut at the same token.
        shares = (probs.masked_fill(~keep, 0) * _ONE).long()
        # A token stays while the tokens before it have not filled top_p, so the one that crosses the bound stays.
        before = shares.cumsum(dim=-1) - shares
        room = top_p[..., None].double() * shares.sum(dim=-1, keepdim=True)
        keep &= (before < room) | (top_p[..., None] >= 1)
    # Rounding could drop even the likeliest token, and an empty choice cannot be sampled from.
    keep[..., 0] = True
    return keep.new_zeros(keep.shape).scatter_(-1, order, keep)
