"""Weights of a torch model by name: check, write in place, read back. Tied parameters are one tensor of many names."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import InvalidStateError
from millrace.inference.engine import require_fit
from millrace.inference.torch_dtypes import BITS, DTYPES, tag_of
from millrace.models.saved import kept_in_float32, saved_tensors
from millrace.policies.change import TensorChange
from millrace.policies.tensors import TensorBytes

_REMEDY = "publish the policy with the tensors of its config.json, in one floating-point dtype but for those that the "
_REMEDY += "model keeps in float32"


def float_dtype(tensors: Mapping[str, TensorBytes]) -> torch.dtype:
    """The dtype of the floating-point tensors, but for those that may be kept in float32.

    InvalidStateError if there are several or none. The engine computes in it, so what it holds are the published bits
    and the digest can be proved by readback.
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
    """Hold in float32 what the model keeps in it and the policy has in it; InvalidStateError for anything else."""
    dtype = float_dtype(tensors)
    if dtype == torch.float32:
        return
    kept = kept_in_float32(model, dtype=dtype)
    owners = {id(tensor): name for name, tensor in reversed(model.state_dict(keep_vars=True).items())}
    sources = {name: owner for name, (owner, _) in _memory(model, tensors).items()}
    for name, tensor in tensors.items():
        if tensor.dtype == "float32" and (owner := sources.get(name)) is not None:
            if owners[id(owner)] not in kept:
                other = next(each for each in tensors if DTYPES[tensors[each].dtype] == dtype)
                raise _mixed({tensors[other].dtype: other, "float32": name})
            owner.data = owner.data.float()  # the object stays, and so do ties


def _mixed(found: Mapping[str, str]) -> InvalidStateError:
    """The error of several number formats, with a tensor's name for each."""
    examples = ", ".join(f"{tag} ({name})" for tag, name in sorted(found.items())) or "none"
    return InvalidStateError(
        f"the policy's floating-point tensors have not one dtype but: {examples}",
        reason="POLICY_DTYPE_MIXED",
        remedy=_REMEDY,
    )


def policy_memory(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """The model's memory by the names of a policy's tensors, which may be ranges of the model's own ones.

    What the policy has no name for is there under the model's own name.
    """
    return {name: view for name, (_, view) in _memory(model, names).items()}


def _memory(model: torch.nn.Module, names: Iterable[str]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The owner of the memory, and the view of it that the name is for."""
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
    """Raise InvalidStateError, naming tensors, unless `tensors` set every weight of the model exactly once."""
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
        first = covered.setdefault(target.data_ptr(), name)
        if first != name and tensors[first].data != tensor.data:
            problems.append(f"{first} and {name} are one tied weight in the model, but differ in the policy")
    problems += [f"{name} is missing" for name, target in held.items() if target.data_ptr() not in covered]
    require_fit(problems, what="policy", reason="POLICY_MODEL_MISMATCH", remedy=_REMEDY)


@torch.no_grad()
def copy_tensors(model: torch.nn.Module, tensors: Mapping[str, TensorBytes]) -> None:
    """Copies checked tensors into the model's own memory, so tied weights and views stay what they are."""
    held = policy_memory(model, tensors)
    for name, tensor in tensors.items():
        # A copy: the downloaded bytes are read-only and may lie unaligned, neither of which torch accepts.
        raw = torch.from_numpy(tensor.bits().view(np.uint8).copy())
        held[name].copy_(raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape))


def write_changes(
    model: torch.nn.Module, changes: Mapping[str, tuple[TensorChange, ...]], *, names: Iterable[str]
) -> None:
    """Write only what differs, as bits, into the model's own memory; positions are checked against its shapes.

    `names` are those of all tensors of the policy.
    """
    held = policy_memory(model, names)
    for name, parts in changes.items():
        bits = _flat_bits(held[name])
        for part in parts:
            part.apply(bits)  # a fifth of the time that torch's indexing takes


def held_tensors(model: torch.nn.Module, names: Iterable[str]) -> dict[str, TensorBytes]:
    """The policy's tensors, by their names, as the model holds them, without a copy."""
    names = list(names)
    held = policy_memory(model, names)
    return {name: as_tensor_bytes(held[name]) for name in names}


def as_tensor_bytes(tensor: torch.Tensor) -> TensorBytes:
    """A CPU tensor's bits, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(dtype=tag_of(tensor), shape=tuple(tensor.shape), data=flat.numpy().data)


def _flat_bits(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    width = tensor.element_size()
    return tensor.detach().view(-1).view(BITS[width]).numpy().view(f"u{width}")
