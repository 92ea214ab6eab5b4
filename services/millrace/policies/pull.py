"""A policy version as tensors or as a directory, whatever its encodings; every byte is proved."""

import os
from collections.abc import Mapping
from pathlib import Path

from millrace.decoding import decode_object
from millrace.models.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_small_files
from millrace.policies.fetch import pull_files, read_manifest
from millrace.policies.hf_files import write_file, write_hf
from millrace.policies.host_copy import HostCopy
from millrace.policies.manifest import PolicyManifest
from millrace.policies.peft.config import parse_peft_config
from millrace.policies.peft.merging import merge_tensors
from millrace.policies.peft.plan import describe_base, plan_merge
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.storage.base import ObjectStore

__all__ = ["download_hf", "download_merged", "pull_files", "pull_tensors", "read_manifest", "write_hf"]


def pull_tensors(store: ObjectStore, manifest: PolicyManifest) -> Mapping[str, TensorBytes]:
    """Return every tensor of the version by name, verified, in memory."""
    return HostCopy(store).stage_manifest(manifest).tensors


def download_hf(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Write the version as a directory that `AutoModelForCausalLM.from_pretrained` loads; return the directory.

    An adapter becomes one that PEFT and vLLM load on top of its base, with tokenizer and generation config.
    """
    files, tensors = dict(pull_files(store, manifest)), pull_tensors(store, manifest)
    config = files.pop(ADAPTER_CONFIG, None)  # the base of a run that trains adapters has it, too
    if manifest.adapter is None or config is None:
        return write_hf(files, tensors, directory)
    target = Path(directory)
    for name, data in adapter_small_files(files).items():
        write_file(target / name, data)
    write_file(target / ADAPTER_CONFIG, config)
    write_file(target / ADAPTER_WEIGHTS, pack_safetensors(tensors.items())[0])
    return target


def download_merged(store: ObjectStore, manifest: PolicyManifest, directory: str | os.PathLike[str]) -> Path:
    """Download as `download_hf` does; an adapter is merged into its base, which becomes a whole model."""
    if manifest.adapter is None:
        return download_hf(store, manifest, directory)
    config = dict(pull_files(store, manifest))[ADAPTER_CONFIG]
    source = f"version {manifest.version}"
    base = read_manifest(store, manifest.adapter.base_key)
    files = {name: data for name, data in pull_files(store, base).items() if name != ADAPTER_CONFIG}
    peft, adapter = parse_peft_config(config, source=source), pull_tensors(store, manifest)
    tensors = pull_tensors(store, base)
    described = decode_object(
        files["config.json"], what=f"config.json of {source}", reason="MODEL_CORRUPT", allows_infinity=True
    )
    model = describe_base(described, tensors)
    plan = plan_merge(peft, adapter, model, source=source)
    return write_hf(files, merge_tensors(peft, plan, adapter, tensors, model=model, source=source), directory)
