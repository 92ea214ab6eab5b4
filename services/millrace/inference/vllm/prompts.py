"""Log-probs of a fixed prompt through vLLM's engine itself: what the probe of a policy is compared with."""

import secrets
from collections.abc import Sequence
from typing import Any

_FIRST = -(1 << 31)  # vLLM's smallest number goes first; requests have 0 unless their callers ask for less


async def prompt_logprobs(
    client: Any, token_ids: Sequence[int], *, lora_request: Any = None, core: int | None = None
) -> list[float]:
    """Log-prob of each token of the prompt but the first, [T - 1]. A salt keeps it out of every prefix cache.

    It goes before all that waits in vLLM, if that schedules by priority; what runs keeps its slot.

    `core` is the engine core that computes it, in a replica with several.
    """
    # vllm is in its own environment, which the type checker does not see.
    from vllm.inputs.engine import tokens_input  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # pyright: ignore[reportMissingImports]

    params = SamplingParams(
        max_tokens=1,
        temperature=1.0,
        prompt_logprobs=0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    name = f"probe-{secrets.token_hex(8)}"
    prompt = tokens_input(list(token_ids), cache_salt=name)
    found: Any = None
    number = f"probe-{secrets.token_hex(8)}"
    options = {"lora_request": lora_request, "data_parallel_rank": core, "priority": _FIRST}
    async for output in client.generate(prompt, params, number, **options):
        found = output.prompt_logprobs
    return [entry[token].logprob for entry, token in zip(found[1:], token_ids[1:], strict=True)]
