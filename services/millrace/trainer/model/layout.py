"""Where a rank's share of a sharded tensor lies in the whole.

FSDP cuts rows, over the mesh's dimension `dp_shard`, and repeats them over `dp_replicate`. Tensor parallelism, over
`tp`, cuts rows first, so that a rank holds rows of its part's rows, or columns.
"""

import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from millrace.errors import InternalError
from millrace.trainer.model.mesh import TENSOR


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRows:
    """What a rank holds of a tensor: rows, from row-major element `start` on.

    `local` is live; where columns are cut it has those from `first_column` on only, and `rows` brings them together.
    Of several ranks with equal rows one `writes` them.
    """

    tensor: DTensor
    local: torch.Tensor
    start: int
    writes: bool
    first_column: int | None = None

    def rows(self) -> torch.Tensor:
        """The whole rows; live where no columns are cut. Collective where they are."""
        if self.first_column is None:
            return self.local
        columns = [Replicate() if isinstance(each, Shard) and each.dim == 1 else each for each in self.placements]
        return self.tensor.redistribute(placements=columns).to_local()

    @property
    def num_elements(self) -> int:
        """How many elements the whole rows have."""
        return self.local.shape[0] * math.prod(self.tensor.shape[1:])

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole rows."""
        return torch.Size((self.local.shape[0], *self.tensor.shape[1:]))

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How the tensor is cut."""
        return tuple(self.tensor.placements)

    def fill(self, rows: torch.Tensor) -> None:
        """Set what is held from whole rows."""
        if self.first_column is not None:
            rows = rows[:, self.first_column : self.first_column + self.local.shape[1]]
        with torch.no_grad():
            self.local.copy_(rows)


def held(tensor: DTensor, *, is_first_part: bool = True) -> HeldRows:
    """This rank's share of a tensor; `is_first_part` of the ranks that share layers (`mesh`).

    A dimension of the mesh cuts the rows into equal chunks, of which the last may be smaller or empty.
    """
    rows, first, writes, first_column = tensor.shape[0], 0, True, None
    if TENSOR not in (tensor.device_mesh.mesh_dim_names or ()):
        writes = is_first_part  # every part has it whole
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
    if local.shape[0] != rows:
        raise _unknown(
            f"a rank holds {local.shape[0]} rows of a tensor of {tensor.shape[0]}, expected were {rows} from row "
            f"{first} on"
        )
    start = first * math.prod(tensor.shape[1:])
    return HeldRows(tensor=tensor, local=local, start=start, writes=writes, first_column=first_column)


def _outermost_first(tensor: DTensor) -> list[tuple[int, Placement]]:
    """Dimensions of the mesh in the order in which they cut: strided ones cut what the others leave."""
    each = list(enumerate(tensor.placements))
    return sorted(each, key=lambda one: isinstance(one[1], _StridedShard))


def _unknown(what: str) -> InternalError:
    return InternalError(
        what,
        reason="SHARD_LAYOUT_UNKNOWN",
        remedy="this release of torch cuts tensors in another way; use the one in constraints.txt",
    )
