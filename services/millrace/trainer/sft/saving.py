"""Writes what was trained as Hugging Face directories."""

import contextlib
import math
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from millrace.errors import CapacityError, InvalidStateError
from millrace.models.adapter_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_small_files
from millrace.policies.adapter import AdapterSpec, base_model_name
from millrace.policies.tensors import TensorBytes, plan_safetensors
from millrace.storage.clean_up import remove
from millrace.storage.disk import io_errors
from millrace.trainer.gang.agreement import agreed
from millrace.trainer.gang.distributed import Gang
from millrace.trainer.model.lora import adapted_layers, weight_tensors
from millrace.trainer.model.published import described_tensors, merged_tensors, policy_tensors

_WHAT = "directory of a model"


def save_model(model: nn.Module, *, files: Mapping[str, bytes], target: Path, dtype: torch.dtype, gang: Gang) -> Path:
    """Write the model, adapters merged into it, with its small files; whole or not at all. Collective."""
    return write_directory(
        target,
        files,
        weights="model.safetensors",
        described=described_tensors(model, dtype=dtype),
        tensors=merged_tensors(model, dtype=dtype),
        gang=gang,
    )


def save_adapter(
    model: nn.Module,
    adapter: AdapterSpec,
    *,
    base: str,
    files: Mapping[str, bytes],
    target: Path,
    dtype: torch.dtype,
    gang: Gang,
) -> Path:
    """Write the adapters alone, as PEFT reads them; whole or not at all. Collective.

    `files` are the small files of the whole model. What says how to use it stays, such as what ends a turn.
    """
    config = adapter.to_config(base_model=base_model_name(base))
    return write_directory(
        target,
        {**adapter_small_files(files), ADAPTER_CONFIG: config},
        weights=ADAPTER_WEIGHTS,
        described=described_tensors(model, dtype=dtype, version=1),
        tensors=policy_tensors(model, dtype=dtype, version=1),
        gang=gang,
    )


def require_mergeable(model: nn.Module) -> None:
    """InvalidStateError if an adapter is on a weight that another layer has, too: merged, it would change both."""
    names = weight_tensors(model)
    parameters = [id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False)]
    for name, layer in adapted_layers(model).items():
        if f"{name}.weight" not in names or parameters.count(id(layer.weight)) > 1:
            raise InvalidStateError(
                f"model.lora.target_modules names {name}, whose weight is tied to another layer's",
                reason="LORA_TARGET_TIED",
                remedy="leave it out: the adapter cannot be merged into the saved model",
            )


def try_to_save(files: Mapping[str, bytes], *, target: Path, num_bytes: int) -> None:
    """Write the small files of a model beside where it will lie, and take them away: what saves it must not fail.

    UnavailableError (DIRECTORY_UNUSABLE) if they cannot be written; CapacityError (DISK_FULL) if the disk has no room
    for the weights, which take `num_bytes`.
    """
    fresh = target.with_name(f".{target.name}.new")
    with io_errors(target, "write", setting=None):
        try:
            _write_small(fresh, files)
        finally:
            remove(fresh, what=_WHAT)
    require_room(target.parent, num_bytes, what="the model takes")


def require_room(directory: Path, num_bytes: int, *, what: str) -> None:
    """CapacityError (DISK_FULL) if the disk of `directory` has no room for so many bytes, which `what` takes."""
    with io_errors(directory, "look at", setting="output_dir"):
        free_bytes = shutil.disk_usage(directory).free
    if free_bytes < num_bytes:
        raise CapacityError(
            f"{directory} has {free_bytes} bytes free, and {what} {num_bytes}",
            reason="DISK_FULL",
            remedy="free disk space, or name a directory on another disk with output_dir",
        )


def num_bytes_of(described: Iterable[tuple[str, str, tuple[int, ...]]]) -> int:
    """Return how many bytes tensors take that are described by name, number format and shape."""
    return sum(math.prod(shape) * getattr(torch, tag).itemsize for _, tag, shape in described)


def write_directory(
    target: Path,
    files: Mapping[str, bytes],
    *,
    weights: str,
    described: Iterable[tuple[str, str, tuple[int, ...]]],
    tensors: Iterable[tuple[str, TensorBytes]],
    gang: Gang,
) -> Path:
    """Write files, and tensors as (name, format, shape) describe them, by rank 0; whole or not at all. Collective.

    Each tensor is written before the next one is brought together: no rank ever holds more than one whole.
    """
    fresh = target.with_name(f".{target.name}.new")
    with contextlib.ExitStack() as opened:
        file, failure = None, None
        with agreed(gang), io_errors(target, "write", setting=None):
            if gang.is_leader:
                _write_small(fresh, files)
                file = opened.enter_context((fresh / weights).open("wb"))
                file.write(plan_safetensors(described)[0])
        for _, tensor in tensors:
            if file is not None and failure is None:
                try:
                    file.write(tensor.data)
                except OSError as error:  # the others wait for this rank at the next tensor, and hear of it at the end
                    failure = error
            del tensor
        with agreed(gang), io_errors(target, "write", setting=None):
            if failure is not None:
                raise failure
            if file is not None:
                file.close()
                replace_directory(fresh, target)
    return target


def replace_directory(fresh: Path, target: Path) -> None:
    """Put `fresh` in the place of `target`; the old one is deleted last, and stays if the new one cannot be moved."""
    aside = target.with_name(f".{target.name}.old")
    if remove(aside, what=_WHAT) is not None:  # of an earlier save, whose like must not be in the way of this one
        aside = aside.with_name(f"{aside.name}-{secrets.token_hex(4)}")
    if target.exists():
        target.rename(aside)
    try:
        fresh.rename(target)
    except OSError:
        if aside.exists():
            aside.rename(target)
        raise
    remove(aside, what=_WHAT)


def _write_small(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a new directory, which takes the place of one that an earlier attempt left."""
    if (left := remove(directory, what=_WHAT)) is not None:
        raise InvalidStateError(
            str(left),
            reason="DIRECTORY_UNUSABLE",
            remedy="remove it, or name another directory with output_dir",
        )
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
