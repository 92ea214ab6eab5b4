"""Weights that each rank reads for itself, its shares only: no rank of a gang ever holds the whole model.

    empty_model ─▶ (adapters, checkpointing, compile) ─▶ Gang.shard ─▶ fill_model

In between parameters are on the meta device: they have shapes and placements, and no values. What is read of a file
follows from the placements; transformers renames and fuses tensors on their way as `from_pretrained` does.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from millrace.telemetry import progress
from millrace.telemetry.progress import Doing
from millrace.telemetry.progress_bars import loading_counts
from millrace.trainer.model.pretrained import model_corrupt, model_not_found
from millrace.trainer.model.shortage import shortage_named


def empty_model(directory: Path) -> nn.Module:
    """The causal language model in `directory` in eval mode, its parameters float32 and on the meta device.

    NotFoundError (MODEL_NOT_FOUND) if config.json is missing or unknown. Buffers have their values.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with _parameters_on_meta():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, ValueError, KeyError) as error:
        raise model_not_found(str(directory), f"the files there do not load: {error}") from error
    return model.eval()


@torch.no_grad()
def fill_model(model: Any, directory: Path, *, device: torch.device) -> None:
    """Read this rank's shares of the weights in `directory` into a sharded `empty_model`, on `device`.

    NotFoundError (MODEL_NOT_FOUND) without *.safetensors; CorruptObjectError (MODEL_CORRUPT) if they are damaged,
    incomplete, or of other sizes than `config.json` says; InvalidStateError (OUT_OF_MEMORY).
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        raise model_not_found(str(directory), "it has no *.safetensors")
    how = LoadStateDictConfig(device_map={"": device}, dtype=torch.float32, weight_mapping=_conversions(model))
    try:
        with contextlib.ExitStack() as opened:
            opened.enter_context(shortage_named(f"load model {directory.name}"))
            work = opened.enter_context(progress.work(Doing.LOAD, f"model {directory.name}", unit="tensors"))
            opened.enter_context(loading_counts(work))
            files = [opened.enter_context(safe_open(path, framework="pt")) for path in paths]
            slices = {name: file.get_slice(name) for file in files for name in file.keys()}  # noqa: SIM118 - no mapping
            info, _ = convert_and_load_state_dict_in_model(model, slices, how)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise model_corrupt(directory, error) from error
    nothing = _fill_nothing(model, device=device)
    model.tie_weights()
    failed = {name: error for name, error in info.conversion_errors.items() if name not in nothing}
    bad = [f"{name}: {error.strip().splitlines()[-1]}" for name, error in failed.items()]
    bad += [f"{name} has other sizes" for name, *_ in info.mismatched_keys]
    bad += [f"{name} is missing" for name, parameter in model.named_parameters() if _local(parameter).is_meta]
    if bad:
        raise model_corrupt(directory, bad[0])


def _conversions(model: Any) -> Any:
    """How names and shapes in files become the model's; some go by the name of a class, which FSDP changes."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    sharded = type(model)
    model.__class__ = next(each for each in sharded.__mro__ if not issubclass(each, FSDPModule))
    try:
        return get_model_conversion_mapping(model)
    finally:
        model.__class__ = sharded


def _fill_nothing(model: nn.Module, *, device: torch.device) -> set[str]:
    """Give a place to parameters of which this rank has no row, which the conversion fails at; their names."""
    names = {name for name, parameter in model.named_parameters() if not _local(parameter).numel()}
    for name in names:
        parameter = model.get_parameter(name)
        if _local(parameter).is_meta:
            path, _, attribute = name.rpartition(".")
            filled = nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)
            setattr(model.get_submodule(path), attribute, filled)
    return names


@contextlib.contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """In this block every new parameter moves to the meta device as soon as a module has it; buffers stay."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
