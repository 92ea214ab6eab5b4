"""Sampling for a whole batch at once, with log-probs of exactly the distribution that was sampled.

One uniform number per request and token decides, by inversion of the cumulative distribution. The number is a hash of
(seed of the request, index of the token), so a seeded request gives the same tokens whatever else is in the batch, and
no random state has to move when requests join and leave.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.inference.engine import SamplingParams
from millrace.rollouts.truncation import kept_tokens

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_UNIFORM_BITS = np.uint64(48)  # u <= 1 - 2**-48, so u * total < total holds in float64 after rounding, too


def uniforms(seeds: NDArray[np.uint64], counters: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) per row from (seed, counter): the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    with np.errstate(over="ignore"):
        x = seeds + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
    return (x >> (np.uint64(64) - _UNIFORM_BITS)).astype(np.float64) * 2.0**-48


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """Which tokens may be sampled, of each row: `top_p` 1, `top_k` 0 and `min_p` 0 are off."""

    top_p: NDArray[np.float32]
    top_k: NDArray[np.int32]
    min_p: NDArray[np.float32]


def penalised(
    logits_V: torch.Tensor,
    sampling: SamplingParams,
    *,
    prompt: NDArray[np.int64],
    completion: NDArray[np.int64],
    stop_ids: NDArray[np.int64],
) -> torch.Tensor:
    """The logits of a row behind its penalties, float32 [V], in vLLM's order; `stop_ids` may be padded with -1."""
    logits_V = logits_V.float().clone()
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.unique(np.concatenate([prompt, completion])))
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.frequency_penalty or sampling.presence_penalty:
        ids, counts = np.unique(completion, return_counts=True)
        taken = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits_V[torch.from_numpy(ids)] -= torch.from_numpy(taken.astype(np.float32))
    if len(completion) < sampling.min_tokens:
        known = (stop_ids >= 0) & (stop_ids < len(logits_V))  # callers may name tokens that the model does not have
        logits_V[torch.from_numpy(stop_ids[known])] = -math.inf
    return logits_V


def sample(
    logits_BV: torch.Tensor,
    *,
    temperatures_B: NDArray[np.float32],
    limits_B: Limits,
    uniforms_B: NDArray[np.float64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Next tokens int64 [B] and their log-probs float32 [B].

    Log-probs are those of log_softmax(logits / temperature) in float32, renormalised over what the limits keep;
    rows of temperature 0 take the most likely token and its log-prob at temperature 1.
    """
    logits_BV = logits_BV.float()
    is_greedy = temperatures_B == 0
    if not (temperatures_B == 1).all():
        divisors = torch.from_numpy(np.where(is_greedy, np.float32(1), temperatures_B))
        logits_BV = logits_BV / divisors[:, None]
    logprobs_BV = torch.log_softmax(logits_BV, dim=-1)
    if ((limits_B.top_p < 1) | (limits_B.top_k > 0) | (limits_B.min_p > 0)).any():
        logprobs_BV = _truncate(logprobs_BV, limits_B, is_greedy)
    if is_greedy.all():
        tokens_B = logits_BV.argmax(dim=-1)  # of the logits: rounding in log_softmax can make ties of near ones
    else:
        cumulative_BV = logprobs_BV.exp().cumsum(dim=-1, dtype=torch.float64)
        thresholds_B = torch.from_numpy(uniforms_B)[:, None] * cumulative_BV[:, -1:]
        # The first index above the threshold has a probability above 0: the sum grows there.
        tokens_B = torch.searchsorted(cumulative_BV, thresholds_B, right=True)[:, 0]
        tokens_B.clamp_(max=logits_BV.shape[-1] - 1)  # only rows with NaN get here; their log-prob shows it
        if is_greedy.any():
            tokens_B = torch.where(torch.from_numpy(is_greedy), logits_BV.argmax(dim=-1), tokens_B)
    return tokens_B, logprobs_BV.gather(1, tokens_B[:, None])[:, 0]


def _truncate(logprobs_BV: torch.Tensor, limits_B: Limits, is_greedy_B: NDArray[np.bool_]) -> torch.Tensor:
    """Log-probs renormalised over the tokens that the limits leave; greedy rows stay whole."""
    kept_BV = kept_tokens(
        logprobs_BV,
        top_p=torch.from_numpy(np.where(is_greedy_B, np.float32(1), limits_B.top_p)),
        top_k=torch.from_numpy(np.where(is_greedy_B, 0, limits_B.top_k)),
        min_p=torch.from_numpy(np.where(is_greedy_B, np.float32(0), limits_B.min_p)),
    )
    return torch.log_softmax(logprobs_BV.masked_fill(~kept_BV, float("-inf")), dim=-1)
