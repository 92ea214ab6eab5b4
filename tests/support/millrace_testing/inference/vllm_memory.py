"""A program for vLLM's interpreter: what a worker holds after updates, parameters and all that hangs on its modules.

    python vllm_memory.py MODEL_DIRECTORY ORDERS OUT [copies]

ORDERS is a JSON list of orders of `millrace.inference.vllm.ranks`: the first one is loaded, the others are applied as
deltas. OUT gets digests by path, after the first one and after all, and what the model then says. With `copies` the
halves of `kv_b_proj` are copies, as they are where that is quantised, and not views.
"""

import functools
import hashlib
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports] - another environment's

EXTENSION = "millrace.inference.vllm.workers.extension.PolicyExtension"
PROMPT = [1, 2, 3, 4, 5]
_OF_TORCH = ("_parameters", "_buffers", "_modules", "kv_cache")
_ADDRESS = ".handler_tensor"  # of what oneDNN has packed, on machines where vLLM packs with that
_DEPTH = 5

Digests = dict[str, str]


def held(model: torch.nn.Module) -> Digests:
    """Return the dtype, shape and SHA-256 of every tensor that the model reaches; what packed layers compute
    stands for these.
    """
    found: Digests = {}
    for name, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        for each, tensor in {**parameters, **buffers}.items():
            _note(found, f"{name}.{each}", tensor)
        for each, value in module.__dict__.items():
            if each not in _OF_TORCH:
                _follow(found, f"{name}:{each}", value, 0, set())
        weight = parameters.get("weight")
        if hasattr(module, "cpu_linear") and weight is not None and weight.dim() == 2:
            rows = torch.arange(3 * weight.shape[1], dtype=torch.float32).reshape(3, -1).sin().to(weight.dtype)
            with torch.inference_mode():
                _note(found, f"{name}()", module.cpu_linear(rows, weight, None))  # pyright: ignore[reportCallIssue]
    return found


def _note(found: Digests, path: str, tensor: Any) -> None:
    if isinstance(tensor, torch.Tensor) and tensor.numel():
        data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        found[path] = f"{tensor.dtype} {list(tensor.shape)} {hashlib.sha256(data).hexdigest()}"


def _follow(found: Digests, path: str, value: Any, depth: int, seen: set[int]) -> None:
    """Follow references into containers, functions and objects, but not into modules or configs."""
    if path.endswith(_ADDRESS):
        return
    _note(found, path, value)
    if isinstance(value, torch.Tensor | torch.nn.Module | type) or id(value) in seen or depth == _DEPTH:
        return
    seen.add(id(value))
    inner: dict[str, Any] = {}
    if isinstance(value, dict):
        inner = {str(key): each for key, each in value.items()}
    elif isinstance(value, list | tuple):
        inner = {str(at): each for at, each in enumerate(value)}
    elif isinstance(value, functools.partial):
        inner = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
    elif isinstance(value, types.MethodType):
        inner = {"self": value.__self__}
    elif isinstance(value, types.FunctionType):
        inner = {str(at): cell.cell_contents for at, cell in enumerate(value.__closure__ or ())}
    elif not type(value).__module__.startswith(("vllm.config", "transformers")):
        inner = dict(getattr(value, "__dict__", {}))
    for each, below in inner.items():
        _follow(found, f"{path}.{each}", below, depth + 1, seen)


def copy_halves() -> None:
    """Make vLLM keep derived copies of weights for latent attention."""
    from vllm.model_executor.layers.attention import mla_attention  # pyright: ignore[reportMissingImports]

    split = mla_attention.split_kv_b_proj
    mla_attention.split_kv_b_proj = lambda *args: tuple(half.clone() for half in split(*args))


def caller(llm: Any) -> Callable[..., Any]:
    """Return a function that calls a method of the extension in the only worker."""

    def call(method: str, *args: Any) -> Any:
        [(_, result, error)] = llm.collective_rpc("millrace_call", args=(0, method, args))
        if error:
            raise SystemExit(f"{method}: {error}")
        return result

    return call


def take(call: Callable[..., Any], order: dict[str, Any], version: int) -> None:
    """Apply a delta in the worker."""
    staged = call("millrace_stage", order)
    call("millrace_gather", 0, len(staged["slices"]))
    call("millrace_prepare", 0, len(staged["units"]))
    while call("millrace_foreseen")["is_pending"]:
        time.sleep(0.05)  # a thread of the worker digests
    call("millrace_activate", version)


def main(model: str, orders: list[dict[str, Any]], out: Path) -> None:
    """Apply the orders one after the other, and write the digests after each to `out`."""
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20,
        worker_extension_cls=EXTENSION,
    )

    call = caller(llm)

    def look() -> Digests:
        [found] = llm.apply_model(held)
        return found

    first: Digests = {}
    for version, order in enumerate(orders):
        if version == 0:
            call("millrace_reload", order)
            first = look()
            continue
        take(call, order, version)
    now = look()
    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=0, ignore_eos=True, detokenize=False)
    [answer] = llm.generate([{"prompt_token_ids": PROMPT}], sampling)
    said = answer.outputs[0]
    logprobs = [entry[token].logprob for token, entry in zip(said.token_ids, said.logprobs, strict=True)]
    out.write_text(json.dumps({"first": first, "now": now, "tokens": list(said.token_ids), "logprobs": logprobs}))


if __name__ == "__main__":
    if sys.argv[4:] == ["copies"]:
        copy_halves()
    main(sys.argv[1], json.loads(Path(sys.argv[2]).read_text()), Path(sys.argv[3]))
