"""This rank's share of the live weights, copied to host memory in the published format, so that training can go on."""

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from millrace.policies.publishing.parts import TensorPart
from millrace.policies.tensors import bits_type
from millrace.trainer.model.layout import held
from millrace.trainer.model.lora import published_tensors
from millrace.trainer.model.mesh import RankLayout

_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Snapshots:
    """Takes snapshots into buffers that are used again. Every rank copies what it holds; columns are brought together.

    Memory: one copy of the rank's shard per snapshot that was not given back (2 bytes per bf16 parameter, 4 per
    float32; pinned where there is a GPU).
    """

    def __init__(
        self, model: nn.Module, *, dtype: torch.dtype, rank: int, device: torch.device, layout: RankLayout
    ) -> None:
        self._model = model
        self._dtype = dtype
        self._rank = rank
        self._device = device
        self._is_first_part = layout.is_first_part(rank)
        self._free: list[dict[str, torch.Tensor]] = []
        self._used: dict[int, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def take(self, version: int) -> list[TensorPart]:
        """The rank's parts of the tensors that version `version` is made of; give them back when nobody reads them."""
        free = self._free.pop() if self._free else {}
        used: dict[str, torch.Tensor] = {}
        parts: list[TensorPart] = []
        for name, tensor in published_tensors(self._model, version=version).items():
            share = published_share(tensor, rank=self._rank, is_first_part=self._is_first_part)
            if share is None:
                continue
            local, start = share
            dtype = self._dtype if local.is_floating_point() else local.dtype
            buffer = free.get(name)
            if buffer is None or (buffer.shape, buffer.dtype) != (local.shape, dtype):
                buffer = torch.empty(local.shape, dtype=dtype, pin_memory=self._device.type == "cuda")
            used[name] = buffer
            buffer.copy_(local, non_blocking=True)
            tag = str(dtype).removeprefix("torch.")
            parts.append(
                TensorPart(name=name, dtype=tag, shape=tuple(tensor.shape), start=start, bits=_bits(buffer, tag))
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        if parts:
            self._used[id(parts[0])] = used
        return parts

    def give_back(self, parts: list[TensorPart]) -> None:
        """The buffers of these parts may be overwritten."""
        if parts and (buffers := self._used.pop(id(parts[0]), None)) is not None:
            self._free.append(buffers)


def _bits(buffer: torch.Tensor, tag: str) -> np.ndarray:
    flat = buffer.reshape(-1).view(_SIGNED[buffer.element_size()]) if buffer.numel() else buffer.reshape(-1)
    return flat.numpy().view(bits_type(tag)) if buffer.numel() else np.empty(0, bits_type(tag))


def published_share(tensor: torch.Tensor, *, rank: int, is_first_part: bool) -> tuple[torch.Tensor, int] | None:
    """What this rank publishes of a tensor, and the row-major index of its first element; None if nothing.

    What is not cut is rank 0's. Collective where columns are cut.
    """
    if not isinstance(tensor, DTensor):
        return (tensor, 0) if rank == 0 else None
    share = held(tensor, is_first_part=is_first_part)
    rows = share.rows()
    return (rows, share.start) if share.writes else None
