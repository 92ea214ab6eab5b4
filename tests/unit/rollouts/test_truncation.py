"""Which tokens min-p, top-k and top-p leave, against a definition in words, and in the trainer by parts."""

import math

import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from millrace.rollouts.parameters import kept_tokens


def kept(logprobs: list[float], *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> set[int]:
    found = kept_tokens(
        torch.tensor([logprobs]), top_p=torch.tensor([top_p]), top_k=torch.tensor([top_k]), min_p=torch.tensor([min_p])
    )
    return set(found[0].nonzero().flatten().tolist())


def by_the_words(probs: list[float], *, top_p: float, top_k: int, min_p: float) -> set[int]:
    """Of the tokens with at least `min_p` of the best one's probability the top-k, and of these the smallest top-p."""
    best = max(probs)
    left = [token for token in range(len(probs)) if probs[token] >= min_p * best]
    if top_k:
        last = sorted((probs[token] for token in left), reverse=True)[:top_k][-1]
        left = [token for token in left if probs[token] >= last]
    if top_p < 1:
        total, before, nucleus = sum(probs[token] for token in left), 0.0, []
        for token in sorted(left, key=lambda token: (-probs[token], token)):
            # On the border itself the rounding of a device decides, and no word says which way.
            assume(not nucleus or abs(before - top_p * total) > 1e-6 * total)
            if nucleus and before >= top_p * total:
                break
            nucleus.append(token)
            before += probs[token]
        left = nucleus
    return set(left)


WEIGHTS = st.lists(st.integers(1, 64), min_size=2, max_size=20)


@given(
    weights=WEIGHTS,
    top_p=st.sampled_from([1.0, 0.9, 0.51, 0.3, 0.01]),
    top_k=st.integers(0, 25),
    tenths=st.integers(0, 9),
)
def test_what_is_left_is_what_the_words_say(weights: list[int], top_p: float, top_k: int, tenths: int) -> None:
    probs = torch.tensor([weight / sum(weights) for weight in weights]).log().exp().tolist()
    bounds = {"top_p": top_p, "top_k": top_k, "min_p": tenths / 10 + 0.0123 * bool(tenths)}
    logprobs = [math.log(weight / sum(weights)) for weight in weights]
    assert kept(logprobs, **bounds) == by_the_words(probs, **bounds)


def test_tokens_as_likely_as_the_last_of_the_top_k_stay() -> None:
    logprobs = [math.log(share) for share in (0.4, 0.2, 0.2, 0.1, 0.1)]
    assert kept(logprobs, top_k=1) == {0}
    assert kept(logprobs, top_k=2) == {0, 1, 2}, "as in vLLM: no token is better than its equal"
    assert kept(logprobs, top_k=4) == {0, 1, 2, 3, 4} == kept(logprobs, top_k=99)


def test_bounds_that_are_off_cut_nothing_and_the_likeliest_token_always_stays() -> None:
    logprobs = [0.0, -30.0, -80.0, -math.inf]
    assert kept(logprobs) == {0, 1, 2, 3}
    assert kept(logprobs, top_p=1e-6) == kept(logprobs, min_p=1.0) == kept(logprobs, top_k=1) == {0}


def test_nothing_in_it_depends_on_the_order_of_a_sum() -> None:
    """Float sums by running totals are refused on GPUs where steps have to repeat: those of integers are exact."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        logprobs = torch.log_softmax(torch.randn(3, 1000, generator=torch.Generator().manual_seed(0)), dim=-1)
        bounds = {"top_k": torch.zeros(3, dtype=torch.int64), "min_p": torch.zeros(3)}
        found = kept_tokens(logprobs, top_p=torch.full((3,), 0.9), **bounds)
        shuffled = torch.randperm(1000, generator=torch.Generator().manual_seed(1))
        again = kept_tokens(logprobs[:, shuffled], top_p=torch.full((3,), 0.9), **bounds)
    finally:
        torch.use_deterministic_algorithms(before)
    assert torch.equal(found[:, shuffled], again)
