"""The tensors that a model publishes and saves: names, number formats, their place in the model, and snapshots."""

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.errors import CapacityError
from millrace.models.saved import SavedTensor, kept_in_float32, saved_tensors
from millrace.policies.peft.config import HIGH, LOW, published_name
from millrace.policies.publish import TensorPart
from millrace.policies.tensors import TensorBytes, bits_type
from millrace.processes.shared_memory import SharedMemory, SharedPlace
from millrace.trainer.model.lora import adapted_layers, is_adapted, trained_tensors, weight_tensors
from millrace.trainer.model.mesh import RankLayout, held


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTensor:
    """One of the model's own tensors, live, and the saved tensors that are ranges of it, in order; all in `dtype`."""

    name: str
    tensor: torch.Tensor
    dtype: torch.dtype
    saved: tuple[SavedTensor, ...]

    @property
    def tag(self) -> str:
        """Return the tensor's number format as manifests name it ("bfloat16")."""
        return str(self.dtype).removeprefix("torch.")

    def within(self, start: int, count: int) -> Iterator[tuple[SavedTensor, int, int]]:
        """Yield the saved tensors that overlap the elements [start, start + count), with begin and end of each overlap.

        All indices count elements from the first one of `tensor`. Empty tensors, and a single saved tensor, are always
        yielded.
        """
        for each in self.saved:
            begin, end = max(each.start, start), min(each.end, start + count)
            if begin < end or each.start == each.end or len(self.saved) == 1:
                yield each, begin, max(begin, end)


def published_tensors(
    model: nn.Module, *, version: int, dtype: torch.dtype, is_merged: bool = False
) -> list[PublishedTensor]:
    """Return the tensors of policy version `version`, live, with the names and formats in which they are published.

    Floating-point tensors have the format `dtype`, unless they are kept in float32. Names are those that transformers
    saves the model under. With adapters, versions after 0 have only the trained tensors, under PEFT's names. In version
    0 the weights that adapters are on, or replace, keep the live model's names, by which PEFT finds them, unless
    `is_merged`.
    """
    kept = kept_in_float32(model, dtype=dtype)
    found: list[PublishedTensor] = []
    if version and is_adapted(model):
        for name, tensor in trained_tensors(model).items():
            ends = next((end for end in (LOW, HIGH) if name.endswith(end)), None)
            weight = name if ends is None else f"{name.removesuffix(ends)}.weight"
            part = SavedTensor(name=published_name(name), source=name, start=0, shape=tuple(tensor.shape))
            # An adapter has the format of the weight that it is on.
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
    """Yield name and bytes of each tensor of policy version `version`, in the format `dtype`.

    With adapters, versions after 0 have only the trained tensors. In a gang every rank must consume the iterator,
    because each sharded tensor is gathered. Float32 tensors on a CPU are views of the live weights: use them before the
    next step.
    """
    for each in published_tensors(model, version=version, dtype=dtype):
        yield from _tensor_bytes(each, _whole(each.tensor))


def merged_tensors(model: nn.Module, *, dtype: torch.dtype) -> Iterator[tuple[str, TensorBytes]]:
    """Yield name and bytes of all the model's tensors in the format `dtype`, with the adapters added to the weights.

    In a gang every rank must consume the iterator, because each sharded tensor is gathered. The live model stays as it
    is.
    """
    layers = adapted_layers(model)
    for each in published_tensors(model, version=0, dtype=dtype, is_merged=True):
        value = _whole(each.tensor)
        if (layer := layers.get(each.name.removesuffix(".weight"))) is not None and each.name.endswith(".weight"):
            # In float32 and rounded once: in 16 bits most of a small B·A would vanish in the last bits of W.
            low, high = _whole(layer.lora_A.weight.detach()).float(), _whole(layer.lora_B.weight.detach()).float()
            value = value.float() + layer.scaling * (high @ low)
        yield from _tensor_bytes(each, value)


def described_tensors(
    model: nn.Module, *, dtype: torch.dtype, version: int = 0
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, number format and shape of the tensors of policy version `version`, in the format `dtype`.

    They are those that `policy_tensors` yields, or for version 0 those of `merged_tensors`, in their order. No tensor
    is gathered or copied.
    """
    for each in published_tensors(model, version=version, dtype=dtype, is_merged=not version):
        for part in each.saved:
            yield part.name, each.tag, part.shape


def published_share(tensor: torch.Tensor, *, rank: int, is_first_part: bool) -> tuple[torch.Tensor, int] | None:
    """Return the part of a tensor that this rank publishes, and its first element's row-major index in the tensor.

    None if it publishes nothing of it. A tensor that is not sharded is published by rank 0. `is_first_part` says
    whether this rank is the first of those that hold parts of the same layers. Collective for a tensor whose columns
    are split.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, 0) if rank == 0 else None
    share = held(tensor, is_first_part=is_first_part)
    rows = share.rows()
    return (rows, share.start) if share.writes else None


def _format(tensor: torch.Tensor, dtype: torch.dtype, *, is_kept: bool) -> torch.dtype:
    """Return the format in which a tensor is published: `dtype`, or float32 if `is_kept`.

    A tensor of integers keeps its own.
    """
    if not tensor.is_floating_point():
        return tensor.dtype
    return torch.float32 if is_kept else dtype


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered in a collective call if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tensor_bytes(published: PublishedTensor, value: torch.Tensor) -> Iterator[tuple[str, TensorBytes]]:
    """Yield name and bytes of each saved tensor that `value`, the whole tensor of `published`, consists of."""
    flat = value.to(published.dtype).cpu().contiguous().reshape(-1)
    for part in published.saved:
        piece = flat[part.start : part.end].reshape(part.shape)
        if piece.dtype == torch.bfloat16:
            yield part.name, TensorBytes.from_numpy(piece.view(torch.int16).numpy(), dtype="bfloat16")
        else:
            yield part.name, TensorBytes.from_numpy(piece.numpy())


# This rank's share of the live weights, copied to host memory in the published format, so that training can go on.

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshots:
    """Takes snapshots of the weights into buffers that are reused.

    Every rank copies its shard; cut columns are gathered.

    Memory: one copy of the rank's shard per snapshot that was not given back (2 bytes per bf16 parameter, 4 per
    float32; pinned if there is a GPU). With `are_shared` another process can map it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype,
        rank: int,
        device: torch.device,
        layout: RankLayout,
        are_shared: bool = False,
    ) -> None:
        """Prepare snapshots of what `rank` publishes of the model in the format `dtype`; allocate nothing yet.

        `device` is that of the model. With `are_shared` the buffers are in memory that another process can map.
        """
        self._model = model
        self._dtype = dtype
        self._rank = rank
        self._device = device
        self._is_first_part = layout.is_first_part(rank)
        self._are_shared = are_shared
        self._free: list[_Buffers] = []
        self._used: dict[int, _Buffers] = {}

    @torch.no_grad()
    def take(self, version: int) -> list[TensorPart]:
        """Copy what this rank publishes of policy version `version` into host buffers; return it as parts of tensors.

        The weights may change as soon as it returns. Pass the same list to `give_back` after use, so that the buffers
        are used again. Collective in a gang if columns of a tensor are split.
        """
        tensors = published_tensors(self._model, version=version, dtype=self._dtype)
        buffers = self._buffers_for([each.name for each in tensors])
        parts: list[TensorPart] = []
        for each in tensors:
            share = published_share(each.tensor, rank=self._rank, is_first_part=self._is_first_part)
            if share is not None:
                parts += self._copied(each, *share, buffers=buffers)
        # The copies were asynchronous, and the next step changes the weights that they read.
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if parts:
            # The first part identifies the list, and lives as long as the caller holds it.
            self._used[id(parts[0])] = buffers
        return parts

    def _copied(
        self, each: PublishedTensor, local: torch.Tensor, start: int, *, buffers: "_Buffers"
    ) -> Iterator[TensorPart]:
        """Copy `local` into a buffer, and yield its parts of the saved tensors.

        `local` is a range of the tensor `each` that begins at element `start`.
        """
        buffer, place = buffers.buffer(each.name, local.shape, each.dtype)
        # Asynchronous only from a GPU into pinned memory.
        buffer.copy_(local, non_blocking=True)
        bits = _bits(buffer, each.tag)
        for saved, begin, end in each.within(start, local.numel()):
            at = begin - start
            yield TensorPart(
                name=saved.name,
                dtype=each.tag,
                shape=saved.shape,
                start=begin - saved.start,
                bits=bits[at : at + end - begin],
                place=None if place is None else SharedPlace(place.memory, place.offset + at * each.dtype.itemsize),
            )

    def give_back(self, parts: list[TensorPart]) -> None:
        """Make the buffers of `parts`, a list that `take` returned, free for the next snapshot."""
        if parts and (buffers := self._used.pop(id(parts[0]), None)) is not None:
            self._free.append(buffers)

    def close(self) -> None:
        """Release all buffers and their shared memory; no snapshot may follow. Parts stay readable. Idempotent."""
        for buffers in (*self._free, *self._used.values()):
            buffers.close()
        self._free, self._used = [], {}

    def _buffers_for(self, names: Collection[str]) -> "_Buffers":
        """Return free buffers that were made for exactly these names of tensors, or new ones.

        Free buffers of other names are released.
        """
        while self._free:
            buffers = self._free.pop()
            if buffers.names == frozenset(names):
                return buffers
            buffers.close()  # of the whole model, after which only adapters are published
        memory = _new_memory() if self._are_shared else None
        return _Buffers(names, memory=memory, is_pinned=self._device.type == "cuda")


class _Buffers:
    """Host memory for one snapshot: `names` are those of the tensors that the version has."""

    def __init__(self, names: Collection[str], *, memory: SharedMemory | None, is_pinned: bool) -> None:
        """Prepare buffers for a version's tensors `names`; allocate nothing yet.

        `memory` None: the buffers are this process's own. `is_pinned`: lock them, so that a GPU copies into them
        directly.
        """
        self.names = frozenset(names)
        self._memory = memory
        self._is_pinned = is_pinned
        self._made: dict[str, tuple[torch.Tensor, SharedPlace | None]] = {}

    def buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, SharedPlace | None]:
        """Return a buffer for the tensor `name`, reused for the same shape and dtype, and its place in shared memory.

        The place is None if memory is not shared. Raises CapacityError if there is no memory.
        """
        made = self._made.get(name)
        if made is not None and (made[0].shape, made[0].dtype) == (shape, dtype):
            return made
        # An empty tensor takes no memory, but its description has a place.
        if self._memory is None or not math.prod(shape):
            made = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned), None
            if self._memory is not None:
                made = made[0], SharedPlace(self._memory, 0)
        else:
            made = self._share(self._memory, shape, dtype)
        self._made[name] = made
        return made

    def close(self) -> None:
        """Forget all buffers; unpin and close the shared memory, if there is any."""
        if self._memory is not None:
            for buffer, _ in self._made.values():
                if self._is_pinned and buffer.numel():
                    unpin(buffer)
            self._memory.close()
        self._made = {}

    def _share(self, memory: SharedMemory, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, SharedPlace]:
        """Allocate a buffer in shared memory, pinned if the buffers are, and return it with its place.

        Raises CapacityError if there is no memory.
        """
        count = math.prod(shape)
        try:
            offset, view = memory.allocate(count * dtype.itemsize)
        except OSError as error:
            raise _no_memory(error.strerror) from error
        buffer = torch.frombuffer(view, dtype=dtype, count=count).reshape(shape)
        if self._is_pinned:  # what torch allocates is pinned by torch
            pin(buffer)
        return buffer, SharedPlace(memory, offset)


def pin(buffer: torch.Tensor) -> None:
    """Lock memory that CUDA did not allocate (cudaHostRegister), so that GPUs copy into it directly and asynchronously.

    Raises CapacityError if CUDA cannot lock it.
    """
    if code := int(_cuda_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
        raise _no_memory(f"CUDA cannot lock it (error {code})")


def unpin(buffer: torch.Tensor) -> None:
    """Undo `pin` for this buffer; call it before the memory is released."""
    _cuda_runtime().cudaHostUnregister(buffer.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def share_bytes(model: nn.Module, *, dtype: torch.dtype, rank: int, layout: RankLayout) -> int:
    """Return the number of bytes that this rank publishes of policy version 0, the whole model, as `dtype`."""
    is_first_part, found = layout.is_first_part(rank), 0
    for each in published_tensors(model, version=0, dtype=dtype):
        width = each.dtype.itemsize
        if isinstance(each.tensor, DTensor):
            share = held(each.tensor, is_first_part=is_first_part)
            found += share.num_elements * width if share.writes else 0
        else:
            found += each.tensor.numel() * width if rank == 0 else 0
    return found


def _new_memory() -> SharedMemory:
    """Make an empty shared memory; raise CapacityError if the system has none."""
    try:
        return SharedMemory()
    except OSError as error:
        raise _no_memory(error.strerror) from error


def _no_memory(why: str | None) -> CapacityError:
    """Make the error that there is no memory for a snapshot; `why` is the system's reason."""
    return CapacityError(
        f"no memory for a snapshot of the weights, which the process that publishes shall see: {why}",
        reason="SNAPSHOT_MEMORY",
        remedy="give the trainer's machine or container more memory",
    )


def _bits(buffer: torch.Tensor, tag: str) -> np.ndarray:
    """Return a buffer's content as a flat array of bit patterns, a view; `tag` is the number format in manifests."""
    # numpy knows no bfloat16: bits go over as integers of the same size. An empty tensor has no view of another dtype.
    flat = buffer.reshape(-1).view(_SIGNED[buffer.element_size()]) if buffer.numel() else buffer.reshape(-1)
    return flat.numpy().view(bits_type(tag)) if buffer.numel() else np.empty(0, bits_type(tag))
