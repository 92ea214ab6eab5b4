"""Writes what was trained as Hugging Face directories."""

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from millrace.errors import InvalidStateError
from millrace.policies.adapter import ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterSpec
from millrace.policies.tensors import TensorBytes, pack_safetensors
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.lora import adapted_layers, published_tensors
from millrace.trainer.model.pretrained import merged_tensors, policy_files, policy_tensors


def save_model(model: nn.Module, *, source: Path, target: Path, dtype: torch.dtype, gang: Gang) -> Path:
    """Write the model, adapters merged into it, with the small files of `source`; whole or not at all. Collective."""
    tensors = merged_tensors(model, dtype=dtype)
    return _write(tensors, policy_files(source, dtype=dtype), target, weights="model.safetensors", gang=gang)


def save_adapter(
    model: nn.Module, adapter: AdapterSpec, *, base: str, target: Path, dtype: torch.dtype, gang: Gang
) -> Path:
    """Write the adapters alone, as PEFT reads them; whole or not at all. Collective."""
    files = {ADAPTER_CONFIG: adapter.to_config(base_model=base)}
    return _write(policy_tensors(model, dtype=dtype, version=1), files, target, weights=ADAPTER_WEIGHTS, gang=gang)


def require_mergeable(model: nn.Module) -> None:
    """InvalidStateError if an adapter is on a weight that another layer has, too: merged, it would change both."""
    names = published_tensors(model, version=0)
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name, layer in adapted_layers(model).items():
        if f"{name}.weight" not in names or parameters.count(id(layer.weight)) > 1:
            raise InvalidStateError(
                f"model.lora.target_modules names {name}, whose weight is tied to another layer's",
                reason="LORA_TARGET_TIED",
                remedy="leave it out: the adapter cannot be merged into the saved model",
            )


def _write(
    tensors: Iterable[tuple[str, TensorBytes]], files: Mapping[str, bytes], target: Path, *, weights: str, gang: Gang
) -> Path:
    gathered = list(tensors)  # gathering is collective
    if gang.is_leader:
        fresh = target.with_name(f".{target.name}.new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        data, _ = pack_safetensors(gathered)
        (fresh / weights).write_bytes(data)
        for name, content in files.items():
            (fresh / name).write_bytes(content)
        replace_directory(fresh, target)
    gang.barrier()
    return target


def replace_directory(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`; the old one is deleted last, and stays if the new one cannot be moved."""
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    shutil.rmtree(aside, ignore_errors=True)
