"""Weights of a torch model by name: check, write in place, read back. Tied parameters are one tensor of many names."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from millrace.errors import InvalidStateError
from millrace.inference.engine import require_fit
from millrace.inference.torch_dtypes import BITS, DTYPES, tag_of
from millrace.policies.change import TensorChange
from millrace.policies.tensors import TensorBytes

_REMEDY = "publish the policy with the tensors of its config.json, all floating-point ones in one dtype"


def float_dtype(tensors: Mapping[str, TensorBytes]) -> torch.dtype:
    """The dtype of the floating-point tensors; InvalidStateError if there are several or none.

    The engine computes in it, so what it holds are the published bits and the digest can be proved by readback.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        if DTYPES[tensor.dtype].is_floating_point:
            found.setdefault(tensor.dtype, name)
    if len(found) != 1:
        examples = ", ".join(f"{tag} ({name})" for tag, name in sorted(found.items())) or "none"
        raise InvalidStateError(
            f"the policy's floating-point tensors have not one dtype but: {examples}",
            reason="POLICY_DTYPE_MIXED",
            remedy=_REMEDY,
        )
    return DTYPES[next(iter(found))]


def check_tensors(model: torch.nn.Module, tensors: Mapping[str, TensorBytes]) -> None:
    """Raise InvalidStateError, naming tensors, unless `tensors` set every weight of the model exactly once."""
    held = model.state_dict(keep_vars=True)
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
    held = model.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        # A copy: the downloaded bytes are read-only and may lie unaligned, neither of which torch accepts.
        raw = torch.from_numpy(tensor.bits().view(np.uint8).copy())
        held[name].copy_(raw.view(DTYPES[tensor.dtype]).reshape(tensor.shape))


def write_changes(model: torch.nn.Module, changes: Mapping[str, tuple[TensorChange, ...]]) -> None:
    """Write only what differs, as bits, into the model's own memory; positions are checked against its shapes."""
    held = model.state_dict(keep_vars=True)
    for name, parts in changes.items():
        bits = _flat_bits(held[name])
        for part in parts:
            part.apply(bits)  # a fifth of the time that torch's indexing takes


def held_tensors(model: torch.nn.Module, names: Iterable[str]) -> dict[str, TensorBytes]:
    """The weights of these names as the model holds them, without a copy."""
    held = model.state_dict(keep_vars=True)
    return {name: as_tensor_bytes(held[name]) for name in names}


def as_tensor_bytes(tensor: torch.Tensor) -> TensorBytes:
    """A CPU tensor's bits, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return TensorBytes(dtype=tag_of(tensor), shape=tuple(tensor.shape), data=flat.numpy().data)


def _flat_bits(tensor: torch.Tensor) -> NDArray[np.unsignedinteger]:
    width = tensor.element_size()
    return tensor.detach().view(-1).view(BITS[width]).numpy().view(f"u{width}")
