"""What ranks exchange within forward and backward, as functions with a gradient."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed as dist

Group = dist.ProcessGroup
Splits = Sequence[int] | None


def all_to_all(rows: torch.Tensor, group: Group, *, sends: Splits = None, receives: Splits = None) -> torch.Tensor:
    """Exchange rows for every rank, in order of rank, for those from every rank.

    `sends` and `receives` count them by rank; equally many if left out.
    """
    return _AllToAll.apply(rows, group, sends, receives)  # pyright: ignore[reportReturnType]


def gather_sequence(piece: torch.Tensor, group: Group) -> torch.Tensor:
    """Join the pieces [R, heads, l, D] of all ranks to [R, heads, L, D], of which every rank computes something else.

    The gradient of a piece is the sum of what all ranks have for it.
    """
    return _GatherSequence.apply(piece, group)  # pyright: ignore[reportReturnType]


def gather_shares(own: torch.Tensor, group: Group, counts: Sequence[int]) -> torch.Tensor:
    """Join the rows of all ranks, `counts` of each, of which every rank computes the same.

    The gradient of a rank's rows is its own: that of the others is equal.
    """
    return _GatherShares.apply(own, group, counts)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Group, sends: Splits, receives: Splits) -> torch.Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return _exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grads[0], ctx.group, ctx.receives, ctx.sends), None, None, None


def _exchange(rows: torch.Tensor, group: Group, sends: Splits, receives: Splits) -> torch.Tensor:
    rows = rows.contiguous()
    received = rows.new_empty((len(rows) if receives is None else sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows, _listed(receives), _listed(sends), group=group)
    return received


def _listed(splits: Splits) -> list[int] | None:
    return None if splits is None else list(splits)


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        piece = piece.contiguous()
        size = dist.get_world_size(group)
        pieces = piece.new_empty((size * len(piece), *piece.shape[1:]))
        dist.all_gather_into_tensor(pieces, piece, group=group)
        return pieces.unflatten(0, (size, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        size = dist.get_world_size(ctx.group)
        pieces = grads[0].unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter_tensor(own, pieces.flatten(0, 1), group=ctx.group)
        return own, None


class _GatherShares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group, counts: Sequence[int]) -> torch.Tensor:
        rank = dist.get_rank(group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        padded = own.new_zeros((max(*counts, 1), *own.shape[1:]))
        padded[: len(own)] = own
        shares = padded.new_empty((len(counts) * len(padded), *own.shape[1:]))
        dist.all_gather_into_tensor(shares, padded, group=group)
        parts = shares.unflatten(0, (len(counts), -1))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.own].contiguous(), None, None
