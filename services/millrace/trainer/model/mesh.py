"""How the ranks of a gang are laid out (dp_replicate × dp_shard × cp × tp), and what they exchange with gradients.

    rank = ((replica · dp_shard + shard) · cp + piece) · tp + part

Ranks that differ only in `part` hold parts of the same layers, those that differ in `piece` compute pieces of the same
rows: both work on the same samples, all others on different samples. Parameters are sharded over `dp_shard × cp` and
replicated over `dp_replicate`. Experts are first split over `ep` consecutive ranks of these `dp_shard × cp`, and then
sharded over the rest:

    dp_shard × cp = expert_shard × ep
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from millrace.config.sections.trainer import ModelLayoutConfig
from millrace.errors import InternalError, Violation

REPLICATE, SHARD, TENSOR, PIECE = "dp_replicate", "dp_shard", "tp", "cp"
EXPERT_SHARD, EXPERT = "expert_shard", "ep"

_MADE = WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]]()
"""The meshes of a gang, by its default process group, with which their groups end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """The sides of the mesh; `ep` is a part of `dp_shard × cp`."""

    dp_shard: int = 1
    dp_replicate: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: ModelLayoutConfig, *, world_size: int) -> Self:
        """Make the layout of `world_size` ranks that a config says; call it only if `violations` returns none.

        `dp_shard` is the number of ranks that the other sides leave.
        """
        return cls(
            dp_shard=world_size // (config.dp_replicate * config.cp * config.tp),
            dp_replicate=config.dp_replicate,
            cp=config.cp,
            tp=config.tp,
            ep=config.ep,
        )

    @staticmethod
    def violations(config: ModelLayoutConfig, *, world_size: int, prefix: str) -> list[Violation]:
        """Return a violation for each key of the config that does not fit `world_size` ranks; empty if all fit.

        `prefix` is the name of the keys' table, for messages.
        """

        def of_keys(message: str, *names: str) -> list[Violation]:
            """Return a violation with `message` for each of the keys `names` whose value is above 1."""
            values = {name: getattr(config, name) for name in names}
            return [
                Violation(field=f"{prefix}.{name}", value=str(value), message=message)
                for name, value in values.items()
                if value > 1
            ]

        sides = ("dp_replicate", "cp", "tp")
        if world_size % (config.dp_replicate * config.cp * config.tp):
            product = " × ".join(f"{name} {getattr(config, name)}" for name in sides)
            return of_keys(f"{world_size} ranks cannot be laid out as {product}: start a multiple of that", *sides)
        left = world_size // (config.dp_replicate * config.tp)
        if left % config.ep:
            message = f"experts are shared by the {left} ranks that dp_replicate and tp leave of {world_size}, which "
            return of_keys(f"{message}{config.ep} does not divide: set it to a divisor of {left}", "ep")
        return []

    @property
    def data_size(self) -> int:
        """Return how many groups of ranks compute on different samples."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Return which part of a batch's samples a rank computes on, an index below `data_size`.

        Ranks with the same index compute on the same samples.
        """
        return rank // (self.cp * self.tp)

    def is_first_part(self, rank: int) -> bool:
        """Return whether a rank is the first of the tensor-parallel ranks that hold parts of the same layers."""
        return rank % self.tp == 0

    def is_first_of_samples(self, rank: int) -> bool:
        """Return whether a rank is the first of those that compute on the same samples.

        Sums over samples take the values of these ranks only.
        """
        return rank % (self.cp * self.tp) == 0

    def random_stream(self, rank: int) -> int:
        """Return the index of a rank's random numbers (dropout); ranks that hold parts of the same layers share one."""
        return rank // self.tp

    def mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of all ranks, with dimensions dp_replicate, dp_shard (times cp) and tp.

        Collective at the first call; cached from then on.
        """
        sides = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        return _mesh(device, sides, (REPLICATE, SHARD, TENSOR))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the dimensions of `mesh`, the mesh of all ranks, over which FSDP shards and replicates parameters."""
        return mesh[REPLICATE, SHARD] if self.dp_replicate > 1 else mesh[SHARD]

    def piece_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the one-dimensional mesh of this rank and those that compute other pieces of the same rows.

        Collective at the first call; cached from then on.
        """
        sides = (self.data_size, self.cp, self.tp)
        return _mesh(device, sides, ("data", PIECE, TENSOR))[PIECE]

    def expert_mesh(self, device: torch.device) -> DeviceMesh:
        """Return the mesh of all ranks as experts are split: dimensions dp_replicate, expert_shard, ep and tp.

        Collective at the first call; cached from then on.
        """
        sides = (self.dp_replicate, self.dp_shard * self.cp // self.ep, self.ep, self.tp)
        return _mesh(device, sides, (REPLICATE, EXPERT_SHARD, EXPERT, TENSOR))

    def expert_data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """Return the dimensions of `mesh`, from `expert_mesh`, over which FSDP shards and replicates experts."""
        return mesh[REPLICATE, EXPERT_SHARD] if self.dp_replicate > 1 else mesh[EXPERT_SHARD]


def _mesh(device: torch.device, sides: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh with these sizes and names of dimensions, cached so that a gang keeps its connections.

    Collective at the first call with the same arguments.
    """
    world = dist.group.WORLD
    assert world is not None  # the caller has joined them
    made = _MADE.setdefault(world, {})
    key = (device.type, sides, names)
    if key not in made:
        made[key] = init_device_mesh(device.type, sides, mesh_dim_names=names)
    return made[key]


# The position of a rank's share of a sharded tensor in the whole tensor.
#
# FSDP cuts rows, over the mesh's dimension `dp_shard`, and replicates them over `dp_replicate`. Tensor parallelism,
# over `tp`, is applied first and cuts rows or columns, so that a rank holds rows of its part's rows, or rows of its
# columns.


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """What a rank holds of a tensor: rows, from row-major element `start` on.

    `local` is live. If columns are cut, it has only those from `first_column` on, and `rows` gathers them. Of several
    ranks with equal rows, one has `writes` set.
    """

    tensor: DTensor
    local: torch.Tensor
    start: int
    writes: bool
    first_column: int | None = None

    def rows(self) -> torch.Tensor:
        """Return this rank's rows with all columns.

        Live if columns are not split, else gathered in a collective call.
        """
        if self.first_column is None:
            return self.local
        # Only columns are gathered; rows stay as they are.
        columns = [Replicate() if isinstance(each, Shard) and each.dim == 1 else each for each in self.placements]
        return self.tensor.redistribute(placements=columns).to_local()

    @property
    def num_elements(self) -> int:
        """Return how many elements this rank's rows have with all columns."""
        return self.local.shape[0] * math.prod(self.tensor.shape[1:])

    @property
    def shape(self) -> torch.Size:
        """Return the shape of this rank's rows with all columns."""
        return torch.Size((self.local.shape[0], *self.tensor.shape[1:]))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """Return how the tensor is sharded or replicated, one placement for each dimension of its mesh."""
        return tuple(self.tensor.placements)

    def fill(self, rows: torch.Tensor) -> None:
        """Copy `rows`, which have all columns, into this rank's live tensor; only its own columns are taken."""
        if self.first_column is not None:
            # The last rank's columns may be fewer, so that the count comes from `local`.
            rows = rows[:, self.first_column : self.first_column + self.local.shape[1]]
        with torch.no_grad():
            self.local.copy_(rows)


def held(tensor: DTensor, *, is_first_part: bool = True) -> HeldRows:
    """Return which rows of a sharded tensor this rank holds, and whether it is the one that writes them.

    `is_first_part` says whether the rank is the first of those that hold parts of the same layers: only that one writes
    tensors that all of them have whole. A dimension of the mesh splits the rows into equal chunks, of which the last
    ones may be smaller or empty. Raises InternalError for placements that torch is not known to make.
    """
    rows, first, writes, first_column = tensor.shape[0], 0, True, None
    if TENSOR not in (tensor.device_mesh.mesh_dim_names or ()):
        # A tensor on a mesh without the dimension tp was not split by tensor parallelism.
        writes = is_first_part  # every part has it whole
    # Each dimension of the mesh cuts what the dimensions before it have left.
    for dimension, placement in _outermost_first(tensor):
        place, size = tensor.device_mesh.get_local_rank(dimension), tensor.device_mesh.size(dimension)
        if isinstance(placement, Replicate):
            writes &= place == 0
        elif isinstance(placement, Shard | _StridedShard) and placement.dim == 0:
            chunk = -(-rows // size)
            first, rows = first + min(place * chunk, rows), min(chunk, max(rows - place * chunk, 0))
        elif isinstance(placement, Shard) and placement.dim == 1 and tensor.ndim == 2:
            first_column = place * -(-tensor.shape[1] // size)
            writes &= place == 0
        else:
            raise _unknown(f"a tensor is cut as {tensor.placements}")
    local = tensor.to_local()
    # A release of torch that cuts in another way than computed here is noticed by the number of rows.
    if local.shape[0] != rows:
        raise _unknown(
            f"a rank holds {local.shape[0]} rows of a tensor of {tensor.shape[0]}, expected were {rows} from row "
            f"{first} on"
        )
    start = first * math.prod(tensor.shape[1:])
    return HeldRows(tensor=tensor, local=local, start=start, writes=writes, first_column=first_column)


def _outermost_first(tensor: DTensor) -> list[tuple[int, Placement]]:
    """Return each dimension of the tensor's mesh with its placement, in the order in which they split the tensor.

    A strided placement comes last, because it splits the pieces that the others made.
    """
    each = list(enumerate(tensor.placements))
    return sorted(each, key=lambda one: isinstance(one[1], _StridedShard))


def _unknown(what: str) -> InternalError:
    """Make the error that torch shards a tensor in a way that is not known here; `what` says which."""
    return InternalError(
        what,
        reason="SHARD_LAYOUT_UNKNOWN",
        remedy="this release of torch cuts tensors in another way; use the one in constraints.txt",
    )


# Exchanges among ranks within forward and backward, as functions with a gradient.

Group = dist.ProcessGroup
Splits = Sequence[int] | None


def all_to_all(rows: torch.Tensor, group: Group, *, sends: Splits = None, receives: Splits = None) -> torch.Tensor:
    """Send a slice of the rows to every rank of the group, in order of rank.

    Return the rows received, in order of rank. `sends` and `receives` have the number of rows by rank; None: equally
    many for each. Collective, in the backward, too.
    """
    return _AllToAll.apply(rows, group, sends, receives)  # pyright: ignore[reportReturnType]


def gather_sequence(piece: torch.Tensor, group: Group) -> torch.Tensor:
    """Return the pieces [R, heads, l, D] of all ranks joined to [R, heads, L, D]. Collective, in the backward, too.

    Every rank computes something different with the result: the gradient of a piece is summed over the ranks.
    """
    return _GatherSequence.apply(piece, group)  # pyright: ignore[reportReturnType]


def gather_shares(own: torch.Tensor, group: Group, counts: Sequence[int]) -> torch.Tensor:
    """Return the rows `own` of all ranks joined in order of rank; `counts` are the numbers of rows by rank. Collective.

    Every rank must compute the same with the result: the gradient of a rank's rows is taken from that rank alone.
    """
    return _GatherShares.apply(own, group, counts)  # pyright: ignore[reportReturnType]


class _AllToAll(torch.autograd.Function):
    """Exchanges slices of rows among ranks; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: Group, sends: Splits, receives: Splits) -> torch.Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return _exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _exchange(grads[0], ctx.group, ctx.receives, ctx.sends), None, None, None


def _exchange(rows: torch.Tensor, group: Group, sends: Splits, receives: Splits) -> torch.Tensor:
    """Send `sends[i]` consecutive rows to each rank i of the group, and return `receives[i]` rows of each. Collective.

    None: equally many of each.
    """
    rows = rows.contiguous()
    received = rows.new_empty((len(rows) if receives is None else sum(receives), *rows.shape[1:]))
    dist.all_to_all_single(received, rows, _listed(receives), _listed(sends), group=group)
    return received


def _listed(splits: Splits) -> list[int] | None:
    """Return the splits as a list, which torch demands; None stays None."""
    return None if splits is None else list(splits)


class _GatherSequence(torch.autograd.Function):
    """Joins pieces of sequences of all ranks; the gradient of a piece is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, group: Group) -> torch.Tensor:
        """Return the pieces of all ranks joined to whole sequences. Collective."""
        ctx.group = group
        piece = piece.contiguous()
        size = dist.get_world_size(group)
        # [size · R, heads, l, D], piece after piece.
        pieces = piece.new_empty((size * len(piece), *piece.shape[1:]))
        dist.all_gather_into_tensor(pieces, piece, group=group)
        # [size, R, heads, l, D] → [R, heads, size, l, D] → [R, heads, L, D]
        return pieces.unflatten(0, (size, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of this rank's piece, summed over all ranks. Collective."""
        size = dist.get_world_size(ctx.group)
        # [R, heads, L, D] → [size, R, heads, l, D]
        pieces = grads[0].unflatten(2, (size, -1)).permute(2, 0, 1, 3, 4).contiguous()
        own = torch.empty_like(pieces[0])
        dist.reduce_scatter_tensor(own, pieces.flatten(0, 1), group=ctx.group)
        return own, None


class _GatherShares(torch.autograd.Function):
    """Joins rows of all ranks; the gradient of a rank's rows is its slice of its own gradient."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, group: Group, counts: Sequence[int]) -> torch.Tensor:
        """Return the rows of all ranks joined; `counts` are the numbers of rows by rank. Collective."""
        rank = dist.get_rank(group)
        ctx.own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        # `all_gather_into_tensor` takes equal shares only: each is padded to the largest one, and at least to one row.
        padded = own.new_zeros((max(*counts, 1), *own.shape[1:]))
        padded[: len(own)] = own
        shares = padded.new_empty((len(counts) * len(padded), *own.shape[1:]))
        dist.all_gather_into_tensor(shares, padded, group=group)
        parts = shares.unflatten(0, (len(counts), -1))
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grads[0][ctx.own].contiguous(), None, None
