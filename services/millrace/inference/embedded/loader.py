"""Builds torch models from a directory of Hugging Face files and published tensors, without a network."""

import importlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, DynamicCache

from millrace.errors import InvalidStateError
from millrace.inference.engine import PromptScores, require_fit
from millrace.inference.model_files import load_config
from millrace.models import loading
from millrace.models.context_length import fix_context_length
from millrace.models.saved import kept_in_float32, recall_conversions, saved_tensors
from millrace.models.torch_support import BITS, DTYPES, tag_of
from millrace.policies.manifest import Probe
from millrace.policies.tensors import TensorBytes, TensorChange
from millrace.telemetry.startup import without_gc

_DEFAULT_POSITIONS = 2048  # where a config names no longest sequence


def warm_up() -> None:
    """Import what building any model needs, so that the first policy takes half the time from the process's start.

    Blocks for seconds; called in a thread, before the first policy arrives.
    """
    with without_gc():
        importlib.import_module("transformers.modeling_utils")


def load_model(model_dir: Path, tensors: Mapping[str, TensorBytes] | None, *, context_length: int) -> torch.nn.Module:
    """Build the model that `model_dir` describes, with weights from `tensors`, or from the directory if that is None.

    The model is returned in evaluation mode, on the CPU. Positions are computed for sequences of at most
    `context_length` tokens. Raises InvalidStateError for a model whose layers are not full attention, or tensors that
    do not fit.
    """
    config = load_config(model_dir) if tensors is not None else loading.load_config(model_dir)
    _require_full_attention(config, context_length=context_length)
    if tensors is None:
        model = loading.empty_model(model_dir, dtype=loading.stored_dtype(model_dir, config))
        loading.fill_model(model, model_dir, device=torch.device("cpu"))
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=float_dtype(tensors))
        recall_conversions(model, tensors)
        hold_formats(model, tensors)
        check_tensors(model, tensors)
        copy_tensors(model, tensors)
    fix_context_length(model, context_length)
    return model.eval().requires_grad_(False)


def context_length(config: Any, *, most: int | None, probe: Probe | None) -> int:
    """Return the most tokens of a sequence: the least of the model's positions (in `config`), `most`, and the policy's.

    The policy's is in its `probe`; None is no bound. Raises InvalidStateError (CONTEXT_DIFFERS) if the result is too
    short for the positions that the policy's trainer computes.
    """
    length = int(getattr(config, "max_position_embeddings", 0) or _DEFAULT_POSITIONS)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":  # the positions that a model was trained on, which these go beyond
        length = int(length * rope.get("factor", 1))
    if rope.get("rope_type") == "longrope" and most is None and probe is None:  # as vLLM has it: short factors
        most = rope.get("original_max_position_embeddings")
    length = min(length, most or length)
    if probe is not None:
        length = min([length, *probe.contexts[1:]])
        probe.require_context(length)
    return length


def cache_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that one token takes in the KV cache of a model with this config, in numbers of this dtype."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize


def _require_full_attention(config: Any, *, context_length: int) -> None:
    """Raise InvalidStateError if a layer attends to less than a whole sequence of `context_length` tokens, which
    the row cache needs.
    """
    layer_types = set(getattr(config, "layer_types", None) or ())
    has_windows = not layer_types and hasattr(type(config), "sliding_window")  # else left over from another model
    window = config.sliding_window if has_windows else None
    if layer_types - {"full_attention"} or (window and window < context_length):
        raise InvalidStateError(
            f"model type {config.model_type} has layers that are not full attention "
            f"({', '.join(sorted(layer_types)) or f'sliding window of {window}'}); the embedded engine cannot run it",
            reason="MODEL_NOT_SUPPORTED",
            remedy="use a model with full attention in every layer",
        )


# Weights of a torch model by name: check, write in place, read back. Tied parameters are one tensor with several names.

_REMEDY = "publish the policy with the tensors of its config.json, in one floating-point dtype but for those that the "
_REMEDY += "model keeps in float32"


def float_dtype(tensors: Mapping[str, TensorBytes]) -> torch.dtype:
    """Return the dtype of a policy's floating-point tensors; float32 ones may be beside a narrower dtype, which is
    returned.

    Raises InvalidStateError if there are several narrower ones, or no floating-point tensor. The engine computes in it,
    so that it has the published bits and their digest can be proved by readback.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if DTYPES[tensor.dtype].is_floating_point:
            found.setdefault(tensor.dtype, name)
    narrow = found.keys() - {"float32"}
    if not found or len(narrow) > 1:
        raise _mixed(found)
    return DTYPES[next(iter(narrow), "float32")]


def hold_formats(model: torch.nn.Module, tensors: Mapping[str, TensorBytes]) -> None:
    """Convert those of the model's parameters to float32 that the policy `tensors` has in float32 beside a narrower
    dtype.

    Raises InvalidStateError for one that the model's family does not keep in float32.
    """
    dtype = float_dtype(tensors)
    if dtype == torch.float32:
        return
    kept = kept_in_float32(model, dtype=dtype)
    # Reversed, so that of several names of a tied parameter the first one counts.
    owners = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    sources = {name: owner for name, (owner, _) in _memory(model, tensors).items()}
    for name, tensor in tensors.items():
        if tensor.dtype == "float32" and (owner := sources.get(name)) is not None:
            if owners[id(owner)] not in kept:
                other = next(each for each in tensors if DTYPES[tensors[each].dtype] == dtype)
                raise _mixed({tensors[other].dtype: other, "float32": name})
            owner.data = owner.data.float()  # the object stays, and so do ties


def _mixed(found: Mapping[str, str]) -> InvalidStateError:
    """Make the error for a policy of several floating-point dtypes; `found` has the name of a tensor for each."""
    examples = ", ".join(f"{tag} ({name})" for tag, name in sorted(found.items())) or "none"
    return InvalidStateError(
        f"the policy's floating-point tensors have not one dtype but: {examples}",
        reason="POLICY_DTYPE_MIXED",
        remedy=_REMEDY,
    )


def policy_memory(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return views of the model's memory by the names of a policy's tensors, which may be ranges of the model's
    tensors.

    A tensor of the model that no name of the policy covers is under the model's own name.
    """
    return {name: view for name, (_, view) in _memory(model, names).items()}


def _memory(model: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return by the names of a policy's tensors: the model's tensor that owns the memory, and the view of the named
    part.
    """
    state, given = model.state_dict(keep_vars=True), set(names)
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for name, parts in saved_tensors(model, shapes, own=given & state.keys()).items():
        parts = parts if any(part.name in given for part in parts) else ()
        flat = state[name].detach().view(-1)
        found |= {part.name: (state[name], flat[part.start : part.end].view(part.shape)) for part in parts}
        if not parts:
            found[name] = state[name], state[name].detach()
    return found


def check_tensors(model: torch.nn.Module, tensors: Mapping[str, TensorBytes]) -> None:
    """Raise InvalidStateError, naming tensors, unless the policy `tensors` sets every weight of the model.

    Shapes and dtypes must be equal, and so must be the contents of several tensors for one tied weight.
    """
    held = policy_memory(model, tensors)
    problems = [f"{name} is not a weight of the model" for name in tensors if name not in held]
    covered: dict[int, str] = {}
    for name, tensor in tensors.items():
        target = held.get(name)
        if target is None:
            continue
        if tuple(target.shape) != tensor.shape or target.dtype != DTYPES[tensor.dtype]:
            problems.append(
                f"{name} is {tensor.dtype}{list(tensor.shape)}, the model has {tag_of(target)}{list(target.shape)}"
            )
        # Tied weights share their memory, so the address of the data tells that two names are one weight.
        first = covered.setdefault(target.data_ptr(), name)
        if first != name and tensors[first].data != tensor.data:
            problems.append(f"{first} and {name} are one tied weight in the model, but differ in the policy")
    # By address, because one name of a tied weight is enough.
    problems += [f"{name} is missing" for name, target in held.items() if target.data_ptr() not in covered]
    require_fit(problems, what="policy", reason="POLICY_MODEL_MISMATCH", remedy=_REMEDY)


@torch.no_grad()
def copy_tensors(model: torch.nn.Module, tensors: Mapping[str, TensorBytes]) -> None:
    """Copy the policy's tensors, which fit, into the model's own memory, so that tied weights and views stay as
    they are.
    """
    held = policy_memory(model, tensors)
    for name, tensor in tensors.items():
        # A copy: the downloaded bytes are read-only and may be unaligned, neither of which torch accepts.
        raw = torch.from_numpy(tensor.bits().view(np.uint8).copy())
        held[name].copy_(raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape))


def write_changes(
    model: torch.nn.Module, changes: Mapping[str, tuple[TensorChange, ...]], *, names: Iterable[str]
) -> None:
    """Write the changed elements of a policy's tensors, as bits, into the model's own memory.

    `names` are those of all tensors of the policy. Positions are checked against the tensors' shapes.
    """
    held = policy_memory(model, names)
    for name, parts in changes.items():
        bits = _flat_bits(held[name])
        for part in parts:
            part.apply(bits)  # a fifth of the time that torch's indexing takes


def held_tensors(model: torch.nn.Module, names: Iterable[str]) -> dict[str, TensorBytes]:
    """Return the model's weights by the names of a policy's tensors, as bytes that are views of its memory."""
    names = list(names)
    held = policy_memory(model, names)
    return {name: as_tensor_bytes(held[name]) for name in names}


def as_tensor_bytes(tensor: torch.Tensor) -> TensorBytes:
    """Return a CPU tensor as bytes with dtype and shape: a view of its memory, or a copy if it is not contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(dtype=tag_of(tensor), shape=tuple(tensor.shape), data=flat.numpy().data)


def _flat_bits(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    """Return a tensor's memory as unsigned integers of its element's width, flat; a view."""
    width = tensor.element_size()
    return tensor.detach().view(-1).view(BITS[width]).numpy().view(f"u{width}")


# Log-probs of given tokens, such as a distillation's teacher returns: in chunks, so that memory stays bounded.

CHUNK_TOKENS = 512
"""Tokens per forward pass: their logits over a vocabulary of 150 000 are 300 MB in float32."""


def score_prompt(model: torch.nn.Module, token_ids: Sequence[int]) -> PromptScores:
    """Return the log-prob of each token but the first given those before it, and its rank among all tokens, both [T -
    1].

    Must be called in the thread that owns the model, between two of its passes.
    """
    tokens_1T = torch.tensor([list(token_ids)])
    num_tokens = tokens_1T.shape[1]
    logprobs, ranks = np.zeros(num_tokens - 1, np.float32), np.ones(num_tokens - 1, np.int32)
    cache = DynamicCache()
    with torch.inference_mode():
        for start in range(0, num_tokens - 1, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens - 1)
            # The last token is left out: nothing follows it whose log-prob would be asked for.
            logits = model(input_ids=tokens_1T[:, start:end], past_key_values=cache, use_cache=True).logits
            logprobs_CV = torch.log_softmax(logits[0].float(), dim=-1)
            own_C1 = logprobs_CV.gather(-1, tokens_1T[0, start + 1 : end + 1, None])
            logprobs[start:end] = own_C1[:, 0].numpy()
            # A token counts itself, so that the likeliest one has rank 1.
            ranks[start:end] = (logprobs_CV >= own_C1).sum(-1).numpy()
    return PromptScores(logprobs=logprobs, ranks=ranks)
