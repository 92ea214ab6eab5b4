"""A program for vLLM's interpreter: where a worker's parameters and buffers are, after each of many deltas.

    python vllm_addresses.py MODEL_DIRECTORY ORDERS OUT FLAGS

As `vllm_memory.py`, beside which it is; FLAGS are more of vLLM's, as JSON. Captured graphs read from the addresses
that were there when they were captured. OUT gets how many tensors were looked at, the versions behind which one of them
had moved, with its name, and what the model says at last.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from vllm_memory import EXTENSION, PROMPT, caller, take  # pyright: ignore[reportMissingImports] - sets vLLM up

from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] # isort: skip


def addresses(model: torch.nn.Module) -> dict[str, int]:
    """Return the memory address of each parameter and buffer, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor.numel()}


def main(model: str, orders: list[dict[str, Any]], out: Path, flags: dict[str, Any]) -> None:
    """Apply the orders one after the other, and write the addresses after each to `out`."""
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=128,
        max_num_seqs=4,
        worker_extension_cls=EXTENSION,
        **flags,
    )
    call = caller(llm)
    [begin] = llm.apply_model(addresses)
    moved: list[tuple[int, str]] = []
    for version, order in enumerate(orders):
        if version == 0:
            call("millrace_reload", order)
        else:
            take(call, order, version)
        [now] = llm.apply_model(addresses)
        moved += [(version, name) for name in sorted({*begin, *now}) if begin.get(name) != now.get(name)]
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], sampling)
    said = answer.outputs[0]
    logprobs = [entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)]
    found = {"tensors": len(begin), "moved": moved, "tokens": list(said.token_ids), "logprobs": logprobs}
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]), json.loads(sys.argv[4]))
