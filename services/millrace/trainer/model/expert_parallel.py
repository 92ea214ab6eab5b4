"""Experts split over ranks: tokens are sent to the ranks that have their experts, and results back.

The rows that a rank receives are sorted by expert, and multiplied in one product per expert; on a GPU these are one
kernel. The number of rows differs from micro-batch to micro-batch, so counts are exchanged first.

Shape suffixes: T tokens, K experts of each, P = T · K pairs of both, E experts, e those of a rank, M rows received,
H hidden size.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from millrace.trainer.model.mesh import all_to_all

PROVED = ("qwen3_moe",)
"""Types of models whose experts can be split."""
_CLASSES = ("Qwen3MoeExperts",)


def experts_of(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that hold the experts of a layer, in order."""
    for module in model.modules():
        if any(each.__name__ in _CLASSES for each in type(module).__mro__):
            yield module


def cut_experts(model: nn.Module, mesh: DeviceMesh) -> list[nn.Module]:
    """Split the experts of a whole model over a mesh of one dimension, in place; return the modules of experts.

    Call it before FSDP cuts them further.
    """
    found = list(experts_of(model))
    for experts in found:
        for name, parameter in list(experts.named_parameters(recurse=False)):
            size, place = mesh.size(), mesh.get_local_rank()
            own = parameter.detach().chunk(size)[place].clone()  # not a view, which would keep all of them in memory
            cut = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
            setattr(experts, name, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        experts.__dict__["forward"] = _Dispatch(experts, mesh.get_group())
    return found


class _Dispatch:
    """The forward of a split experts module: sends tokens to their experts' ranks, and gets the results back."""

    def __init__(self, experts: Any, group: dist.ProcessGroup) -> None:
        self._experts = experts
        self._group = group
        self._size = dist.get_world_size(group)

    def __call__(self, hidden_TH: torch.Tensor, index_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        order_P = torch.argsort(index_TK.reshape(-1), stable=True)
        token_P = torch.div(order_P, index_TK.shape[1], rounding_mode="floor")
        sent_RE = torch.bincount(index_TK.reshape(-1), minlength=self._experts.num_experts).view(self._size, -1)
        received_RE = sent_RE.clone()  # the result in the fake group of `trainer.estimate`, which sends nothing
        dist.all_to_all_single(received_RE, sent_RE, group=self._group)
        sends, receives = torch.stack([sent_RE.sum(1), received_RE.sum(1)]).tolist()
        rows_MH = all_to_all(hidden_TH[token_P], self._group, sends=sends, receives=receives)
        # The received rows are sorted by rank, then by expert.
        expert_M = torch.arange(received_RE.numel(), device=received_RE.device) % received_RE.shape[1]
        expert_M = expert_M.repeat_interleave(received_RE.reshape(-1))
        order_M = torch.argsort(expert_M, stable=True)
        rows_MH = self._compute(rows_MH[order_M], received_RE.sum(0))[torch.argsort(order_M)]
        rows_PH = all_to_all(rows_MH, self._group, sends=receives, receives=sends)
        rows_PH = rows_PH * weights_TK.reshape(-1)[order_P, None]
        return torch.zeros_like(hidden_TH).index_add(0, token_P, rows_PH.to(hidden_TH.dtype))

    def _compute(self, rows_MH: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
        """Compute this rank's experts on rows sorted by expert."""
        up, down = _local(self._experts.gate_up_proj), _local(self._experts.down_proj)
        gate_MI, up_MI = grouped(rows_MH, up, counts_e).chunk(2, dim=-1)
        return grouped(self._experts.act_fn(gate_MI) * up_MI, down, counts_e)


def grouped(rows_MX: torch.Tensor, weight_eYX: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Return the product of each row with its expert's weight, [M, Y]; rows are sorted by expert, `counts_e` each.

    An expert without rows takes part, too: every weight has to get a gradient, or the collectives of FSDP's ranks would
    not match.
    """
    by_kernel = has_kernel(rows_MX.device) and fits_kernel(rows_MX, weight_eYX)
    return (grouped_by_kernel if by_kernel else grouped_by_loop)(rows_MX, weight_eYX, counts_e)


def grouped_by_kernel(rows_MX: torch.Tensor, weight_eYX: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Do `grouped` in one operation, for tensors that fit it (`fits_kernel`); the gradient must be contiguous."""
    offsets_e = counts_e.cumsum(0).to(torch.int32)
    return functional.grouped_mm(rows_MX, weight_eYX.transpose(1, 2), offs=offsets_e)


def grouped_by_loop(rows_MX: torch.Tensor, weight_eYX: torch.Tensor, counts_e: torch.Tensor) -> torch.Tensor:
    """Do `grouped` with one product per expert."""
    groups = rows_MX.split(counts_e.tolist())
    return torch.cat([functional.linear(rows, weight) for rows, weight in zip(groups, weight_eYX, strict=True)])


def has_kernel(device: torch.device) -> bool:
    """Return whether the grouped operation is one kernel on the device; on a CPU it is a loop."""
    return device.type == "cuda"


def fits_kernel(rows_MX: torch.Tensor, weight_eYX: torch.Tensor) -> bool:
    """Return whether the grouped operation accepts the tensors: bfloat16, not empty, aligned to 16 bytes."""
    is_even = all(size * weight_eYX.element_size() % 16 == 0 for size in weight_eYX.shape[1:])
    return rows_MX.dtype == weight_eYX.dtype == torch.bfloat16 and is_even and len(rows_MX) > 0


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's experts of a parameter as gathered by FSDP."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
