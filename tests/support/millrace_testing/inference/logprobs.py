"""Log-probs by one plain forward pass: what an engine's are compared with."""

from collections.abc import Sequence

import torch


def prompt_logprobs(model: torch.nn.Module, token_ids: Sequence[int]) -> list[float]:
    """Return the log-prob of each token of a prompt but the first, [T - 1], by one forward pass."""
    prompt = torch.tensor([list(token_ids)])
    with torch.inference_mode():
        logits_TV = model(input_ids=prompt, use_cache=False).logits[0, :-1].float()
    return torch.log_softmax(logits_TV, dim=-1).gather(-1, prompt[0, 1:, None]).squeeze(-1).tolist()
