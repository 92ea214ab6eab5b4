"""A directory in Hugging Face format, written from tensors and small files."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from millrace.policies.publish import DEFAULT_SHARD_BYTES, group_by_bytes
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.storage.scratch import io_errors, make_parent


def write_hf(
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorBytes],
    directory: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write files and tensors into a directory: as `model.safetensors`, or as shards of `shard_bytes` with an index."""
    target = Path(directory)
    for name, data in files.items():
        write_file(target / name, data)
    groups = list(group_by_bytes((((name, t), t.size_bytes) for name, t in tensors.items()), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(target / name, pack_safetensors(group)[0])
        weight_map |= {tensor: name for tensor, _ in group}
    if len(groups) > 1:
        total = sum(tensor.size_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_file(target / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
    return target


def write_file(path: Path, data: bytes) -> None:
    """Write one local file; CapacityError if the disk is full."""
    make_parent(path, setting=None)
    with io_errors(path, "write", needed_bytes=len(data), setting=None):
        path.write_bytes(data)
