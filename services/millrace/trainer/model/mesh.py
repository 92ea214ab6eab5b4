"""How the ranks of a gang are laid out: dp_replicate × dp_shard × cp × tp, the last one the innermost.

    rank = ((replica · dp_shard + shard) · cp + piece) · tp + part

Ranks that differ in `part` only hold parts of the same layers, those that differ in `piece` compute pieces of the same
rows: both work on the same samples, all others on samples of their own. Parameters are cut over `dp_shard × cp` and
repeated over `dp_replicate`. Experts are shared out first over `ep` of these `dp_shard × cp` ranks that follow one
another, and cut over the rest:

    dp_shard × cp = expert_shard × ep
"""

from dataclasses import dataclass
from typing import Self
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from millrace.config.sections.trainer import ModelLayoutConfig
from millrace.errors import Violation

REPLICATE, SHARD, TENSOR, PIECE = "dp_replicate", "dp_shard", "tp", "cp"
EXPERT_SHARD, EXPERT = "expert_shard", "ep"

_MADE = WeakKeyDictionary[dist.ProcessGroup, dict[object, DeviceMesh]]()
"""The meshes of a gang, by its process group: their groups end with it, also where they are still used."""


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
        """That of a config that fits (`violations`); what is left of the ranks shards."""
        return cls(
            dp_shard=world_size // (config.dp_replicate * config.cp * config.tp),
            dp_replicate=config.dp_replicate,
            cp=config.cp,
            tp=config.tp,
            ep=config.ep,
        )

    @staticmethod
    def violations(config: ModelLayoutConfig, *, world_size: int, prefix: str) -> list[Violation]:
        """Why so many ranks cannot be laid out as a config says, for each key; `prefix` is the table of the keys."""

        def of_keys(message: str, *names: str) -> list[Violation]:
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
        """How many ranks compute on samples of their own."""
        return self.dp_replicate * self.dp_shard

    def data_rank(self, rank: int) -> int:
        """Which of these a rank is."""
        return rank // (self.cp * self.tp)

    def is_first_part(self, rank: int) -> bool:
        """Whether a rank is the first of those that hold parts of the same layers."""
        return rank % self.tp == 0

    def speaks_for_samples(self, rank: int) -> bool:
        """Whether a rank is the first of those that compute on the same samples."""
        return rank % (self.cp * self.tp) == 0

    def draw(self, rank: int) -> int:
        """Which random numbers a rank draws: those that compute the same draw the same."""
        return rank // self.tp

    def mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh of all ranks, in which pieces are shards. Collective."""
        sides = (self.dp_replicate, self.dp_shard * self.cp, self.tp)
        return _mesh(device, sides, (REPLICATE, SHARD, TENSOR))

    def data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of the mesh over which FSDP cuts and repeats parameters."""
        return mesh[REPLICATE, SHARD] if self.dp_replicate > 1 else mesh[SHARD]

    def piece_mesh(self, device: torch.device) -> DeviceMesh:
        """The ranks that compute pieces of the same rows, a mesh of one dimension. Collective over all ranks."""
        sides = (self.data_size, self.cp, self.tp)
        return _mesh(device, sides, ("data", PIECE, TENSOR))[PIECE]

    def expert_mesh(self, device: torch.device) -> DeviceMesh:
        """The mesh of all ranks as experts are shared out. Collective."""
        sides = (self.dp_replicate, self.dp_shard * self.cp // self.ep, self.ep, self.tp)
        return _mesh(device, sides, (REPLICATE, EXPERT_SHARD, EXPERT, TENSOR))

    def expert_data_mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of the experts' mesh over which FSDP cuts and repeats them."""
        return mesh[REPLICATE, EXPERT_SHARD] if self.dp_replicate > 1 else mesh[EXPERT_SHARD]


def _mesh(device: torch.device, sides: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh of these sides, made once: a gang that trains one run after the other has the same connections for all.

    Collective the first time.
    """
    world = dist.group.WORLD
    assert world is not None  # the caller has joined them
    made = _MADE.setdefault(world, {})
    key = (device.type, sides, names)
    if key not in made:
        made[key] = init_device_mesh(device.type, sides, mesh_dim_names=names)
    return made[key]
