"""This rank's share of the live weights, copied to host memory in the published format, so that training can go on."""

import math
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.errors import CapacityError
from millrace.policies.publishing.parts import TensorPart
from millrace.policies.tensors import bits_type
from millrace.processes.shared_memory import SharedMemory, SharedPlace
from millrace.trainer.model.layout import held
from millrace.trainer.model.mesh import RankLayout
from millrace.trainer.model.published import PublishedTensor, published_share, published_tensors

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshots:
    """Takes snapshots into buffers that are used again. Every rank copies what it holds; columns are brought together.

    Memory: one copy of the rank's shard per snapshot that was not given back (2 bytes per bf16 parameter, 4 per
    float32; pinned where there is a GPU). If they are shared, another process can map it.
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
        """The rank's parts of the tensors that version `version` is made of; give them back when nobody reads them."""
        tensors = published_tensors(self._model, version=version, dtype=self._dtype)
        buffers = self._buffers_for([each.name for each in tensors])
        parts: list[TensorPart] = []
        for each in tensors:
            share = published_share(each.tensor, rank=self._rank, is_first_part=self._is_first_part)
            if share is not None:
                parts += self._copied(each, *share, buffers=buffers)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if parts:
            self._used[id(parts[0])] = buffers
        return parts

    def _copied(
        self, each: PublishedTensor, local: torch.Tensor, start: int, *, buffers: "_Buffers"
    ) -> Iterator[TensorPart]:
        """The parts of the saved tensors that `local`, which begins at element `start` of its tensor, has some of."""
        buffer, place = buffers.buffer(each.name, local.shape, each.dtype)
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
        """The buffers of these parts may be overwritten."""
        if parts and (buffers := self._used.pop(id(parts[0]), None)) is not None:
            self._free.append(buffers)

    def close(self) -> None:
        """Give all buffers up: nothing is copied any more. What still reads parts may go on. Idempotent."""
        for buffers in (*self._free, *self._used.values()):
            buffers.close()
        self._free, self._used = [], {}

    def _buffers_for(self, names: Collection[str]) -> "_Buffers":
        """Buffers that were given back and are for tensors of these names, or new ones."""
        while self._free:
            buffers = self._free.pop()
            if buffers.names == frozenset(names):
                return buffers
            buffers.close()  # of the whole model, behind which only adapters are published
        memory = _new_memory() if self._are_shared else None
        return _Buffers(names, memory=memory, is_pinned=self._device.type == "cuda")


class _Buffers:
    """Host memory for one snapshot: `names` are those of the tensors that the version has."""

    def __init__(self, names: Collection[str], *, memory: SharedMemory | None, is_pinned: bool) -> None:
        self.names = frozenset(names)
        self._memory = memory
        self._is_pinned = is_pinned
        self._made: dict[str, tuple[torch.Tensor, SharedPlace | None]] = {}

    def buffer(self, name: str, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, SharedPlace | None]:
        """A buffer of that shape [shape], and where it lies if it is shared; CapacityError if there is no room."""
        made = self._made.get(name)
        if made is not None and (made[0].shape, made[0].dtype) == (shape, dtype):
            return made
        if self._memory is None or not math.prod(shape):
            made = torch.empty(shape, dtype=dtype, pin_memory=self._is_pinned), None
            if self._memory is not None:
                made = made[0], SharedPlace(self._memory, 0)
        else:
            made = self._share(self._memory, shape, dtype)
        self._made[name] = made
        return made

    def close(self) -> None:
        """Give the memory up."""
        if self._memory is not None:
            for buffer, _ in self._made.values():
                if self._is_pinned and buffer.numel():
                    unpin(buffer)
            self._memory.close()
        self._made = {}

    def _share(self, memory: SharedMemory, shape: torch.Size, dtype: torch.dtype) -> tuple[torch.Tensor, SharedPlace]:
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
    """Lock memory that CUDA did not allocate, so that it copies there without a detour and beside what runs.

    CapacityError if it cannot.
    """
    if code := int(_cuda_runtime().cudaHostRegister(buffer.data_ptr(), buffer.nbytes, 0)):
        raise _no_memory(f"CUDA cannot lock it (error {code})")


def unpin(buffer: torch.Tensor) -> None:
    """Undo `pin`, before the memory goes."""
    _cuda_runtime().cudaHostUnregister(buffer.data_ptr())


def _cuda_runtime() -> Any:
    return torch.cuda.cudart()


def share_bytes(model: nn.Module, *, dtype: torch.dtype, rank: int, layout: RankLayout) -> int:
    """The size of what this rank publishes of the whole model."""
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
    try:
        return SharedMemory()
    except OSError as error:
        raise _no_memory(error.strerror) from error


def _no_memory(why: str | None) -> CapacityError:
    return CapacityError(
        f"no memory for a snapshot of the weights, which the process that publishes shall see: {why}",
        reason="SNAPSHOT_MEMORY",
        remedy="give the trainer's machine or container more memory",
    )


def _bits(buffer: torch.Tensor, tag: str) -> np.ndarray:
    flat = buffer.reshape(-1).view(_SIGNED[buffer.element_size()]) if buffer.numel() else buffer.reshape(-1)
    return flat.numpy().view(bits_type(tag)) if buffer.numel() else np.empty(0, bits_type(tag))
