"""A policy version as tensors or as a directory, whatever its encodings; every byte is proved."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from millrace.policies.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, parse_adapter_config
from millrace.policies.fetch import pull_files, read_manifest
from millrace.policies.host_copy import HostCopy
from millrace.policies.manifest import PolicyManifest
from millrace.policies.merge import merge_adapter
from millrace.policies.publishing.upload import DEFAULT_SHARD_BYTES, group_by_bytes
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.storage.base import ObjectStore
from millrace.storage.disk import io_errors, make_parent

__all__ = ["download_hf", "download_merged", "pull_files", "pull_tensors", "read_manifest", "write_hf"]


def pull_tensors(store: ObjectStore, manifest: PolicyManifest) -> Mapping[str, TensorBytes]:
    """Every tensor of the version by name, verified, in memory."""
    return HostCopy(store).stage_manifest(manifest).tensors


def download_hf(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Write the version as a directory that `AutoModelForCausalLM.from_pretrained` loads; return the directory.

    An adapter becomes one that PEFT and vLLM load on top of its base.
    """
    files, tensors = dict(pull_files(store, manifest)), pull_tensors(store, manifest)
    config = files.pop(ADAPTER_CONFIG, None)  # the base of a run that trains adapters has it, too
    if manifest.adapter is None or config is None:
        return write_hf(files, tensors, directory)
    target = Path(directory)
    _write(target / ADAPTER_CONFIG, config)
    _write(target / ADAPTER_WEIGHTS, pack_safetensors(tensors.items())[0])
    return target


def download_merged(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """As `download_hf`; an adapter is merged into its base, which becomes a whole model."""
    if manifest.adapter is None:
        return download_hf(store, manifest, directory)
    config = dict(pull_files(store, manifest))[ADAPTER_CONFIG]
    source = f"version {manifest.version}"
    base = read_manifest(store, manifest.adapter.base_key)
    files = {name: data for name, data in pull_files(store, base).items() if name != ADAPTER_CONFIG}
    spec = parse_adapter_config(config, source=source)
    tensors = merge_adapter(pull_tensors(store, base), pull_tensors(store, manifest), spec, source=source)
    return write_hf(files, tensors, directory)


def write_hf(
    files: Mapping[str, bytes],
    tensors: Mapping[str, TensorBytes],
    directory: str | os.PathLike[str],
    *,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> Path:
    """Write files and tensors as one directory: `model.safetensors`, or numbered shards with an index."""
    target = Path(directory)
    for name, data in files.items():
        _write(target / name, data)
    groups = list(group_by_bytes((((name, t), t.size_bytes) for name, t in tensors.items()), shard_bytes))
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write(target / name, pack_safetensors(group)[0])
        weight_map |= {tensor: name for tensor, _ in group}
    if len(groups) > 1:
        total = sum(tensor.size_bytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write(target / "model.safetensors.index.json", json.dumps(index, indent=2, sort_keys=True).encode())
    return target


def _write(path: Path, data: bytes) -> None:
    """One local file; CapacityError if the disk is full."""
    make_parent(path)
    with io_errors(path, "write", needed_bytes=len(data)):
        path.write_bytes(data)
