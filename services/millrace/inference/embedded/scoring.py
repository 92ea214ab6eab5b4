"""Log-probs of given tokens, as a teacher of a distillation gives them: in chunks, so that memory stays bounded."""

from collections.abc import Sequence

import numpy as np
import torch
from transformers import DynamicCache

from millrace.inference.engine import PromptScores

CHUNK_TOKENS = 512
"""Tokens per forward pass: their logits over a vocabulary of 150 000 are 300 MB in float32."""


def score_prompt(model: torch.nn.Module, token_ids: Sequence[int]) -> PromptScores:
    """The scores of a prompt; call it in the thread that owns the model, between two of its passes."""
    tokens_1T = torch.tensor([list(token_ids)])
    num_tokens = tokens_1T.shape[1]
    logprobs, ranks = np.zeros(num_tokens - 1, np.float32), np.ones(num_tokens - 1, np.int32)
    cache = DynamicCache()
    with torch.inference_mode():
        for start in range(0, num_tokens - 1, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens - 1)
            logits = model(input_ids=tokens_1T[:, start:end], past_key_values=cache, use_cache=True).logits
            logprobs_CV = torch.log_softmax(logits[0].float(), dim=-1)
            own_C1 = logprobs_CV.gather(-1, tokens_1T[0, start + 1 : end + 1, None])
            logprobs[start:end] = own_C1[:, 0].numpy()
            ranks[start:end] = (logprobs_CV >= own_C1).sum(-1).numpy()
    return PromptScores(logprobs=logprobs, ranks=ranks)
