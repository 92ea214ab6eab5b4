"""Models with the weights of their directory, FP8 and MXFP4 included: every tensor of the class, or a typed error.

    empty_model ─▶ (adapters, checkpointing, compile, sharding) ─▶ fill_model

In between parameters are on the meta device: they have shapes and placements, and no values. The placements decide what
is read of a file, so that one process reads all of it and a rank of a gang its shares. transformers renames and fuses
tensors while it loads them, and its classes say which tensors of older files are to be ignored.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from millrace.errors import InvalidStateError, NotFoundError
from millrace.models.configs import read_config, restore_older_rope
from millrace.models.files import (
    QUANTIZATION,
    StoredTensor,
    WeightFiles,
    first_names,
    model_corrupt,
    model_not_found,
    model_quantized,
    quantization_of,
    read_object,
)
from millrace.models.torch_support import is_shortage
from millrace.telemetry import progress
from millrace.telemetry.progress import Activity, loading_counts

_PLAIN = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Noted:
    """A slice of safetensors that notes its tensor's format in `read` as soon as the tensor is read.

    With `shapes_alone` nothing is read from the file, and the tensors are on the meta device.
    """

    name: str
    slice: Any
    read: dict[str, str]
    shapes_alone: bool

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.slice.get_shape()

    def get_dtype(self) -> str:
        """Return safetensors' name of the tensor's format."""
        return self.slice.get_dtype()

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part of the tensor at an index, and note the tensor's format in `read`.

        With `shapes_alone` the part is on the meta device, and the file is not read.
        """
        self.read[self.name] = dtype = self.slice.get_dtype()
        if self.shapes_alone:
            return torch.empty(self.slice.get_shape(), dtype=_PLAIN.get(dtype, torch.uint8), device="meta")[index]
        return self.slice[index]


def load_config(directory: Path) -> Any:
    """Return transformers' config of a directory, without the quantization of its weight files.

    Raises NotFoundError (MODEL_NOT_FOUND) if there is none or transformers does not know it, CorruptObjectError
    (MODEL_FILE_UNUSABLE) if it is no JSON object, and InvalidStateError (MODEL_QUANTIZED) for an unsupported
    quantization.
    """
    if not (directory / "config.json").exists():
        raise model_not_found(str(directory), "it has no config.json")
    raw = read_object(directory / "config.json")
    require_known(directory, raw)
    try:
        config = read_config(directory)
    except Exception as error:  # foreign code on a foreign file: each class of configs checks it with errors of its own
        raise model_not_found(str(directory), f"its config.json does not load: {error}") from error
    restore_older_rope(config, raw)
    # Weights are decoded while they are read, so that transformers must make a plain model of the config.
    for each in (config, config.get_text_config(decoder=True)):
        if hasattr(each, QUANTIZATION):
            delattr(each, QUANTIZATION)
    return config


def empty_model(directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Return the causal language model in `directory` in eval mode, its parameters in `dtype` and on the meta device.

    Buffers have their values. Raises as `load_config`.
    """
    return _empty(directory, load_config(directory), dtype)


def _empty(directory: Path, config: Any, dtype: torch.dtype, *, own: Any = None) -> Any:
    """Return a causal language model for a config, in eval mode, with parameters in `dtype` on the meta device.

    It is of the class `own`; None means the class for causal language models. Raises NotFoundError (MODEL_NOT_FOUND),
    naming `directory`, if transformers makes no model of the config.
    """
    from transformers import AutoModelForCausalLM

    try:
        with _parameters_on_meta():
            if own is not None:
                return own._from_config(config, dtype=dtype).eval()
            return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()
    # A shortage of memory is one of these, and no fault of the config.
    except (RuntimeError, MemoryError):
        raise
    except Exception as error:  # foreign code, which asserts and looks up what a config may lack
        problem = f"transformers makes no model of its config.json: {type(error).__name__}: {error}"
        raise model_not_found(str(directory), problem) from error


def check_weights(directory: Path) -> None:
    """Compare names, formats and shapes in the weight files of a directory with its config.json, without reading
    numbers.

    Raises as `empty_model` and `fill_model`, except for errors that only the numbers show.
    """
    model = _empty(directory, load_config(directory), torch.float32)
    fill_model(model, directory, device=torch.device("meta"))


def check_stored(directory: Path) -> str:
    """Compare the weight files with the class that config.json names, for files that another program loads as they are.

    Returns why nothing was compared, if transformers lacks that class or the format of the files is unknown; else "".
    Raises as `fill_model` does without reading numbers.
    """
    import transformers

    raw = read_object(directory / "config.json")
    try:
        config = load_config(directory)
        named, own = config.architectures, None
        if named:
            own = getattr(transformers, str(named[0]), None)
            if not (isinstance(own, type) and issubclass(own, transformers.PreTrainedModel)):
                return f"the names of its tensors were not compared: transformers has no {named[0]}"
        fill_model(_empty(directory, config, torch.float32, own=own), directory, device=torch.device("meta"))
    except (NotFoundError, InvalidStateError) as error:
        if isinstance(error, InvalidStateError) and quantization_of(raw) is None:
            raise  # weights in a format that config.json does not state
        return f"the names of its tensors were not compared: {error.message}"
    return ""


@torch.no_grad()
def fill_model(model: Any, directory: Path, *, device: torch.device) -> None:
    """Read the weights in `directory` into an `empty_model`, or this rank's shares into a sharded one, on `device`.

    On the meta device names, formats and shapes are compared, and no number is read. Raises NotFoundError
    (MODEL_NOT_FOUND) without *.safetensors; CorruptObjectError (MODEL_CORRUPT), naming tensors, if the files are
    damaged or ambiguous, or if a tensor is missing, unexpected, of another shape or not finite; and InvalidStateError
    (MODEL_QUANTIZED).
    """
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    raw = read_object(directory / "config.json")
    weights = WeightFiles.find(directory, raw)
    is_trial, read = device.type == "meta", dict[str, str]()
    if not is_trial:
        weights.warn_of_beside()
    dtype = next(model.parameters()).dtype
    how = LoadStateDictConfig(
        device_map={"": device},
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=_conversions(model),
    )
    try:
        with contextlib.ExitStack() as opened:
            work = opened.enter_context(progress.work(Activity.LOAD, f"model {directory.name}", unit="tensors"))
            opened.enter_context(loading_counts(work))
            slices = dequantized(directory, raw, weights.tensors, opened.enter_context(weights.open()))
            noted = {name: _Noted(name, each, read, shapes_alone=is_trial) for name, each in slices.items()}
            info, _ = convert_and_load_state_dict_in_model(model, noted, how)
    except (OSError, SafetensorError, RuntimeError) as error:
        # Too little memory says nothing about the files.
        if is_shortage(error):
            raise
        raise model_corrupt(directory, error) from error
    _require_plain(model, directory, read)
    nothing = set() if is_trial else _fill_nothing(model, device=device)
    faults = _faults(model, info, nothing=nothing, is_trial=is_trial)
    if faults:
        raise model_corrupt(directory, "; ".join(faults))


def _require_plain(model: Any, directory: Path, read: Mapping[str, str]) -> None:
    """Raise InvalidStateError (MODEL_QUANTIZED) if a weight was read in another format than F64, F32, F16 or BF16.

    `read` has safetensors' name of the format of each tensor that was read. Weights that are no floating-point numbers
    in the model may have other formats.
    """
    held = model.state_dict()
    odd = {
        f"{name} ({dtype})"
        for name, dtype in read.items()
        if dtype not in _PLAIN and (name not in held or held[name].is_floating_point())
    }
    if odd:
        raise model_quantized(directory, f"its config.json does not say how weights are stored: {first_names(odd)}")


def _faults(model: Any, info: Any, *, nothing: set[str], is_trial: bool) -> list[str]:
    """Return what is wrong with the loaded weights, a text for each kind, after tying those that the class ties.

    `info` is transformers' report of the loading, `nothing` the parameters that this rank has no row of. With
    `is_trial` numbers are not compared.
    """
    found: list[str] = []

    def note(what: str, names: Collection[str]) -> None:
        """Add to what is found that the tensors of these names are `what`, if there are any."""
        if names:
            found.append(f"{len(names)} tensor{'s' if len(names) > 1 else ''} {what}: {first_names(names)}")

    # Of tied weights the files may have one, which both then have, or both, which then must be equal.
    tied = {each: source for each, source in model.all_tied_weights_keys.items() if each not in info.missing_keys}
    both = {each: source for each, source in tied.items() if source not in info.missing_keys}
    apart = [] if is_trial else [each for each, source in both.items() if not _is_same(model, each, source)]
    info.missing_keys.update(both)  # they are what their source is, which is compared above
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    parameters = {name: _local(each) for name, each in model.named_parameters(remove_duplicate=False)}
    absent = {name for name in info.missing_keys if name in parameters}
    model._adjust_missing_and_unexpected_keys(info)  # by what the class declares
    failed = {name: error for name, error in info.conversion_errors.items() if name not in nothing}
    sizes = {f"{name} ({list(got)} instead of {list(wanted)})" for name, got, wanted in info.mismatched_keys}
    if not is_trial:
        # After a real load, what has no numbers is still on the meta device.
        absent = {name for name, each in parameters.items() if each.is_meta}
    absent |= {name for name in info.missing_keys if name not in parameters}
    note("missing", absent - failed.keys() - {name for name, *_ in info.mismatched_keys})
    note("unexpected", info.unexpected_keys)
    note("of another shape", sizes)
    note("not convertible", [f"{name} ({error.strip().splitlines()[-1]})" for name, error in failed.items()])
    note("tied by config.json (tie_word_embeddings) but of numbers of their own", apart)
    if not is_trial:
        held = {name: _local(each) for name, each in model.state_dict().items()}
        note("not finite", [name for name, each in held.items() if not _is_finite(each)])
    return found


def _is_same(model: Any, name: str, other: str) -> bool:
    """Return whether this rank's shares of two parameters of a model, by name, are equal.

    True if one is on the meta device.
    """
    first, second = _local(model.get_parameter(name)), _local(model.get_parameter(other))
    return first is second or first.is_meta or second.is_meta or torch.equal(first, second)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all numbers of a tensor are finite, without copying it; True for tensors without such numbers."""
    if tensor.is_meta or not tensor.numel() or not tensor.is_floating_point():
        return True
    # A NaN becomes both the least and the most, so that two numbers say whether all are finite.
    least, most = torch.aminmax(tensor)
    return bool(least.isfinite() & most.isfinite())


def stored_dtype(directory: Path, config: Any) -> torch.dtype:
    """Return the dtype of the weights in a directory: that of its config, else of the first floating-point tensor,
    else float32.
    """
    stated = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    if isinstance(stated, torch.dtype):
        return stated
    weights = WeightFiles.find(directory, read_object(directory / "config.json"))
    return next((_PLAIN[each.dtype] for each in weights.tensors.values() if each.dtype in _PLAIN), torch.float32)


def _conversions(model: Any) -> Any:
    """Return transformers' conversions from tensors in files to those of the model.

    Some are found by the name of the model's class, which FSDP changes and which is restored for the call.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    sharded = type(model)
    model.__class__ = next(each for each in sharded.__mro__ if not issubclass(each, FSDPModule))
    try:
        return get_model_conversion_mapping(model)
    finally:
        model.__class__ = sharded


def _fill_nothing(model: nn.Module, *, device: torch.device) -> set[str]:
    """Return the names of the parameters of which this rank has no element; replace those on the meta device.

    They become empty parameters on `device`. Transformers fails at filling them.
    """
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
    """Move every parameter to the meta device when a module registers it, during the block; buffers are not moved."""
    # Not `torch.device("meta")`, under which buffers, such as rotary frequencies, would have no values either.
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter of a module, moved to the meta device."""
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a sharded tensor; another tensor is returned as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Weights that are stored in FP8 or MXFP4, as the numbers that they represent: the same on every device and rank.
#
# These formats are read as their own files define them; every other one is refused by name. The numbers are float32:
# of FP8 each is a product that is rounded once, and of MXFP4 each is exact.

_FP8_SCALE, _FP8_ACTIVATIONS = "_scale_inv", "activation_scale"
_MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"
_FP8 = {"F8_E4M3"}
_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix in FP8 with one factor for each block of `block` rows and columns; None is one factor for all.

    It replaces a slice of safetensors. The whole matrix is computed also for a part of it.
    """

    weight: Any
    scale: Any
    block: tuple[int, int] | None

    def get_shape(self) -> list[int]:
        """Return the shape of the whole weight."""
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        """Return safetensors' name of the format of the decoded numbers, "F32"."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the decoded numbers at an index of the matrix, float32."""
        numbers, factors = self.weight[...].float(), self.scale[...].float()
        if self.block is None:
            return (numbers * factors)[index]
        rows, columns = numbers.shape[-2:]
        high, wide = self.block
        # [blocks of rows, blocks of columns] → [rows, columns]; the last block of either may be cut.
        spread = factors.repeat_interleave(high, dim=-2)[..., :rows, :].repeat_interleave(wide, dim=-1)[..., :columns]
        return (numbers * spread)[index]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Experts of gpt-oss [E, in, out], stored as blocks of 32 numbers of 4 bits, [E, out, blocks, 16], and scales."""

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """Return the shape of the parameter that the blocks decode to, [E, in, out]."""
        experts, rows, blocks, width = self.blocks.get_shape()
        return [experts, blocks * width * 2, rows]

    def get_dtype(self) -> str:
        """Return safetensors' name of the format of the decoded numbers, "F32"."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the decoded numbers at an index of the parameter, float32."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(self.blocks[...], self.scales[...], dtype=torch.float32)[index]


def require_known(directory: Path, config: Mapping[str, Any]) -> None:
    """Raise InvalidStateError (MODEL_QUANTIZED) if the config.json of a directory has a quantization that is not
    supported.
    """
    quantization = quantization_of(config)
    if quantization is None:
        return
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "fp8":
        _fp8_block(directory, quantization)
        if quantization.get("fmt", "e4m3") != "e4m3":
            raise model_quantized(directory, f"in FP8 of the format {quantization['fmt']}, and e4m3 alone is read")
    elif method != "mxfp4":
        raise model_quantized(directory, f"by {method or quantization}, and of such files only fp8 and mxfp4 are read")


def dequantized(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the slices by the names of parameters, those of quantized tensors as objects that decode them.

    `config` is the config.json of `directory`, `tensors` describes the tensors in its files, and `slices` has them by
    name. Raises InvalidStateError (MODEL_QUANTIZED) as `require_known`, and for weights and scales that do not fit
    together.
    """
    require_known(directory, config)
    quantization = quantization_of(config)
    if quantization is None:
        return dict(slices)
    if quantization["quant_method"] == "mxfp4":
        return _mxfp4(directory, tensors, slices)
    return _fp8(directory, _fp8_block(directory, quantization), tensors, slices)


def _fp8_block(directory: Path, quantization: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks of an FP8 quantization; None if each weight is one block.

    `quantization` is that of the config.json of `directory`. Raises InvalidStateError (MODEL_QUANTIZED) if its sizes
    are malformed.
    """
    match quantization.get("weight_block_size"):
        case None:
            return None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
        case other:
            raise model_quantized(directory, f"in FP8 with weight_block_size {other!r}, which is no pair of sizes")


def _fp8(
    directory: Path, block: tuple[int, int] | None, tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the slices by name, with each FP8 weight and its scale replaced by one object that decodes them.

    `block` is the rows and columns to which one factor of a scale applies; None means one factor for a whole weight.
    `tensors` describes the tensors in the files. Raises InvalidStateError (MODEL_QUANTIZED) if a scale is missing or
    does not fit.
    """
    found, wrong = dict(slices), []
    for name, stored in tensors.items():
        if stored.dtype not in _FP8:
            continue
        scale = tensors.get(name + _FP8_SCALE)
        if scale is None or scale.dtype not in _SCALES or not _fits(stored.shape, scale.shape, block):
            wrong.append(name)
            continue
        found[name] = Fp8Weight(slices[name], slices[name + _FP8_SCALE], block)
        del found[name + _FP8_SCALE]
        found.pop(f"{name.rpartition('.')[0]}.{_FP8_ACTIVATIONS}", None)  # a scale of activations, not of weights
    if wrong:
        raise model_quantized(
            directory,
            f"in FP8, and {len(wrong)} weights have no {_FP8_SCALE.removeprefix('_')} that fits blocks of "
            f"{block or 'the whole weight'}: {first_names(wrong)}",
        )
    return found


def _fits(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Return whether a scale's shape fits a weight's: one factor for each block, or without `block` one for all."""
    if block is None:
        return scale in ((), (1,), (1, 1)) or (len(scale) == len(shape) == 3 and scale == (shape[0], 1, 1))
    if len(shape) < 2:
        return False
    # Each block begins at a multiple of its size; the last one of a row or column may be cut, hence the ceiling.
    return scale == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _mxfp4(directory: Path, tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the slices with each pair of MXFP4 blocks and scales replaced by one object that decodes them.

    `tensors` describes the tensors in the files. Raises InvalidStateError (MODEL_QUANTIZED) if scales are missing or do
    not fit.
    """
    found, wrong = dict(slices), []
    for name, stored in tensors.items():
        if not name.endswith(_MXFP4_BLOCKS):
            continue
        whole = name.removesuffix(_MXFP4_BLOCKS)
        scales = tensors.get(whole + _MXFP4_SCALES)
        # 16 bytes hold the 32 numbers of 4 bits that share one scale.
        is_packed = stored.dtype == "U8" and len(stored.shape) == 4 and stored.shape[-1] == 16
        if scales is None or scales.dtype != "U8" or not is_packed or scales.shape != stored.shape[:-1]:
            wrong.append(name)
            continue
        found[whole] = Mxfp4Weight(slices[name], slices[whole + _MXFP4_SCALES])
        del found[name], found[whole + _MXFP4_SCALES]
    if wrong:
        raise model_quantized(directory, f"in MXFP4, and its blocks and scales do not fit: {first_names(wrong)}")
    return found
