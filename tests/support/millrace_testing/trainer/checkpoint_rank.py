"""One rank of a gang, forked in test_checkpoint_gang.py: a checkpoint saved, loaded, and damaged."""

import json
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from millrace.errors import MillraceError
from millrace.runlog import Names
from millrace.storage.local import LocalStore
from millrace.trainer.checkpoint.manifest import Author
from millrace.trainer.checkpoint.store import CheckpointStore
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.memory import Sharding
from millrace.trainer.model.published import described_tensors, merged_tensors
from millrace.trainer.sft.checkpoints import write_directory


class CountedStore(LocalStore):
    """Notes what is read as files."""

    read: list[str]

    def get_file(self, key: str, path: Path) -> Any:
        """Get the file as the store does."""
        self.read.append(path.name)
        return super().get_file(key, path)


def _save_whole(layers: nn.Module, target: Path, *, gang: Gang) -> None:
    """Save the whole model as SFT does at its end."""
    write_directory(
        target,
        {"config.json": b"{}"},
        weights="model.safetensors",
        described=described_tensors(layers, dtype=torch.float32),
        tensors=merged_tensors(layers, dtype=torch.float32),
        gang=gang,
    )


def main(directory: Path) -> None:
    """Write what this rank saw as JSON."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    gang = Gang.join()
    store = CountedStore(directory / "store")
    store.read = []
    checkpoints = CheckpointStore(store, Names("p", "u"), gang=gang)
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
    gang.shard(layers, Sharding(compute_dtype=torch.float32))
    state: dict[str, torch.Tensor] = {f"model.{name}": weight.detach() for name, weight in layers.named_parameters()}
    state |= {f"optim.{name}.step": torch.tensor(3.0) for name, _ in layers.named_parameters()}
    wanted = {name: weight.clone() for name, weight in state.items()}
    facts: dict[str, Any] = {}
    author = Author(run_hash="r", epoch=1, determinism="strict")
    written = checkpoints.write(state, step=1, lineage=0, chain_hash=b"c" * 32, author=author)
    manifest = checkpoints.commit(written, gang=gang)
    for weight in state.values():
        weight.zero_()
    checkpoints.load(manifest, state)
    facts["read"] = sorted(store.read)
    facts["is_equal"] = all(_local(state[name]).equal(_local(weight)) for name, weight in wanted.items())
    gang.barrier()
    if gang.is_leader:  # rank 0 does not read the file of rank 1
        (damaged,) = [item for item in manifest.objects if item.name == "rank-00001.bin"]
        path = directory / "store" / damaged.key
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    gang.barrier()
    try:
        checkpoints.load(manifest, state)
    except MillraceError as error:
        facts["error"] = [type(error).__name__, error.reason, error.message]
    try:
        checkpoints.load(replace(manifest, objects=manifest.objects[: 1 if gang.is_leader else 0]), state)
    except MillraceError as error:
        facts["differing"] = error.message
    if not gang.is_leader:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))  # as a disk that is full
    try:
        written = checkpoints.write(state, step=2, lineage=0, chain_hash=b"c" * 32, author=author)
        checkpoints.commit(written, gang=gang)
    except MillraceError as error:
        facts["refused"] = [type(error).__name__, error.reason, error.message]
    if gang.is_leader:  # room for the header and some of the tensors
        resource.setrlimit(resource.RLIMIT_FSIZE, (6000, resource.RLIM_INFINITY))
    try:
        _save_whole(layers, directory / "saved", gang=gang)
    except MillraceError as error:
        facts["unsaved"] = [type(error).__name__, str(error)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _save_whole(layers, directory / "saved", gang=gang)
    (directory / f"rank-{gang.rank}.json").write_text(json.dumps(facts))
    gang.leave()


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
