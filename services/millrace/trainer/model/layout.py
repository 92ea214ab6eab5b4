"""Where a rank's share of a sharded tensor lies in the whole."""

import math

import torch
from torch.distributed.tensor import DTensor, Shard

from millrace.errors import InternalError


def is_cut_by_rows(tensor: DTensor) -> bool:
    """Whether the ranks hold contiguous rows, as FSDP2 cuts them."""
    placement = tensor.placements[0]
    return tensor.device_mesh.ndim == 1 and isinstance(placement, Shard) and placement.dim == 0


def held_rows(tensor: DTensor) -> tuple[torch.Tensor, int]:
    """The rows that this rank holds, live, and the row-major index of their first element in the whole.

    FSDP2 cuts the rows into equal chunks, of which the last may be smaller or empty.
    """
    mesh = tensor.device_mesh
    if not is_cut_by_rows(tensor):
        raise _unknown(f"a tensor is cut as {tensor.placements} over a mesh of {mesh.ndim} dimensions")
    rows = tensor.shape[0]
    chunk = -(-rows // mesh.size())
    first = min(mesh.get_local_rank() * chunk, rows)
    local = tensor.to_local()
    if local.shape[0] != min(chunk, rows - first):
        raise _unknown(
            f"rank {mesh.get_local_rank()} holds {local.shape[0]} rows of a tensor of {rows}, expected were "
            f"{min(chunk, rows - first)} from row {first} on"
        )
    return local, first * math.prod(tensor.shape[1:])


def _unknown(what: str) -> InternalError:
    return InternalError(
        what,
        reason="SHARD_LAYOUT_UNKNOWN",
        remedy="this release of torch cuts tensors in another way; use the one in constraints.txt",
    )
