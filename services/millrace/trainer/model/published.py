"""What a model publishes and saves: every tensor under its saved name, in its number format, and where it lies."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.models.saved import SavedTensor, kept_in_float32, saved_tensors
from millrace.policies.adapter import HIGH, LOW, published_name
from millrace.policies.tensors import TensorBytes
from millrace.trainer.model.layout import held
from millrace.trainer.model.lora import adapted_layers, is_adapted, trained_tensors, weight_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """One of the model's own tensors, live, and the saved tensors that are ranges of it, in order; all in `dtype`."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    saved: tuple[SavedTensor, ...]

    @property
    def tag(self) -> str:
        """The name of the number format in manifests."""
        return str(self.dtype).removeprefix("torch.")

    def within(self, start: int, count: int) -> Iterator[tuple[SavedTensor, int, int]]:
        """Saved tensors of which the elements [start, start + count) have some, with the first and the end of these.

        All of it counts from the tensor's own first element.
        """
        for each in self.saved:
            begin, end = max(each.start, start), min(each.end, start + count)
            if begin < end or each.start == each.end or len(self.saved) == 1:
                yield each, begin, max(begin, end)


def published_tensors(
    model: nn.Module, *, version: int, dtype: torch.dtype, is_merged: bool = False
) -> list[PublishedTensor]:
    """What version `version` is made of, floating-point tensors in `dtype` but for those that are kept in float32.

    Names are those that transformers saves the model under. Of a model with adapters that is version 0, and each one
    after it is what is trained, under PEFT's names; what adapters are on, or stand for, keeps the model's own name, by
    which PEFT finds it, unless the adapters are to be merged.
    """
    kept = kept_in_float32(model, dtype=dtype)
    found: list[PublishedTensor] = []
    if version and is_adapted(model):
        for name, tensor in trained_tensors(model).items():
            ends = next((end for end in (LOW, HIGH) if name.endswith(end)), None)
            weight = name if ends is None else f"{name.removesuffix(ends)}.weight"
            part = SavedTensor(name=published_name(name), source=name, start=0, shape=tuple(tensor.shape))
            given = _format(tensor, dtype, is_kept=weight in kept)
            found.append(PublishedTensor(name=name, tensor=tensor, dtype=given, saved=(part,)))
        return found
    tensors = weight_tensors(model)
    layers, own = adapted_layers(model), set[str]()
    if layers and not is_merged:
        own = {f"{layer}.weight" for layer in layers} | trained_tensors(model).keys()
    saved = saved_tensors(model, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, own=own)
    for name, tensor in tensors.items():
        given = _format(tensor, dtype, is_kept=name in kept)
        found.append(PublishedTensor(name=name, tensor=tensor, dtype=given, saved=saved[name]))
    return found


def policy_tensors(model: nn.Module, *, dtype: torch.dtype, version: int = 0) -> Iterator[tuple[str, TensorBytes]]:
    """The tensors that version `version` is made of, by published name.

    In a gang every rank must consume it, because each sharded tensor is gathered. Float32 tensors on a CPU are views of
    the live weights: use them before the next step.
    """
    for each in published_tensors(model, version=version, dtype=dtype):
        yield from _tensor_bytes(each, _whole(each.tensor))


def merged_tensors(model: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, TensorBytes]]:
    """The model's tensors with what the adapters add to them, as the model without adapters is saved.

    Collective in a gang, like `policy_tensors`.
    """
    layers = adapted_layers(model)
    for each in published_tensors(model, version=0, dtype=dtype, is_merged=True):
        value = _whole(each.tensor)
        if (layer := layers.get(each.name.removesuffix(".weight"))) is not None and each.name.endswith(".weight"):
            low, high = _whole(layer.lora_A.weight.detach()).float(), _whole(layer.lora_B.weight.detach()).float()
            value = value.float() + layer.scaling * (high @ low)
        yield from _tensor_bytes(each, value)


def described_tensors(
    model: nn.Module, *, dtype: torch.dtype, version: int = 0
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, format and shape of the tensors that `policy_tensors` and, of version 0, `merged_tensors` give."""
    for each in published_tensors(model, version=version, dtype=dtype, is_merged=not version):
        for part in each.saved:
            yield part.name, each.tag, part.shape


def published_share(tensor: torch.Tensor, *, rank: int, is_first_part: bool) -> tuple[torch.Tensor, int] | None:
    """What this rank publishes of a tensor, and the row-major index of its first element; None if nothing.

    What is not cut is rank 0's. Collective where columns are cut.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, 0) if rank == 0 else None
    share = held(tensor, is_first_part=is_first_part)
    rows = share.rows()
    return (rows, share.start) if share.writes else None


def _format(tensor: torch.Tensor, dtype: torch.dtype, *, is_kept: bool) -> torch.dtype:
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if is_kept else dtype


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a tensor that may be sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tensor_bytes(published: PublishedTensor, value: torch.Tensor) -> Iterator[tuple[str, TensorBytes]]:
    flat = value.to(published.dtype).cpu().contiguous().reshape(-1)
    for part in published.saved:
        piece = flat[part.start : part.end].reshape(part.shape)
        if piece.dtype == torch.bfloat16:
            yield part.name, TensorBytes.from_numpy(piece.view(torch.int16).numpy(), dtype="bfloat16")
        else:
            yield part.name, TensorBytes.from_numpy(piece.numpy())
