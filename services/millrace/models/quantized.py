"""Weights that are stored in FP8 or MXFP4, as the numbers that they stand for: the same on every device and rank.

Only what is written here is read, each format as its own files define it; every other one is refused by name. The
numbers are float32: of FP8 each is a product that is rounded once, and of MXFP4 each is exact.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from millrace.models.files import StoredTensor, first_names, model_quantized, quantization_of

_FP8_SCALE, _FP8_ACTIVATIONS = "_scale_inv", "activation_scale"
_MXFP4_BLOCKS, _MXFP4_SCALES = "_blocks", "_scales"
_FP8 = {"F8_E4M3"}
_SCALES = {"F32", "BF16", "F16", "F8_E8M0"}


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix in FP8 with one factor for each block of `block` rows and columns; None is one factor for all.

    It takes the place of a slice of safetensors. All of it is computed wherever a part is asked for.
    """

    weight: Any
    scale: Any
    block: tuple[int, int] | None

    def get_shape(self) -> list[int]:
        """The shape of the weight."""
        return self.weight.get_shape()

    def get_dtype(self) -> str:
        """The format of what is given, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers at an index of the whole."""
        numbers, factors = self.weight[...].float(), self.scale[...].float()
        if self.block is None:
            return (numbers * factors)[index]
        rows, columns = numbers.shape[-2:]
        high, wide = self.block
        spread = factors.repeat_interleave(high, dim=-2)[..., :rows, :].repeat_interleave(wide, dim=-1)[..., :columns]
        return (numbers * spread)[index]


@dataclass(frozen=True, slots=True)
class Mxfp4Weight:
    """Experts of gpt-oss [E, in, out], stored as blocks of 32 numbers of 4 bits, [E, out, blocks, 16], and scales."""

    blocks: Any
    scales: Any

    def get_shape(self) -> list[int]:
        """The shape of the parameter."""
        experts, rows, blocks, width = self.blocks.get_shape()
        return [experts, blocks * width * 2, rows]

    def get_dtype(self) -> str:
        """The format of what is given, as safetensors names it."""
        return "F32"

    def __getitem__(self, index: Any) -> torch.Tensor:
        """The numbers at an index of the whole."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        return convert_moe_packed_tensors(self.blocks[...], self.scales[...], dtype=torch.float32)[index]


def require_known(directory: Path, config: Mapping[str, Any]) -> None:
    """InvalidStateError (MODEL_QUANTIZED) if config.json names a format that is not read here, or a kind of it."""
    said = quantization_of(config)
    if said is None:
        return
    method = said.get("quant_method") if isinstance(said, dict) else None
    if method == "fp8":
        _fp8_block(directory, said)
        if said.get("fmt", "e4m3") != "e4m3":
            raise model_quantized(directory, f"in FP8 of the format {said['fmt']}, and e4m3 alone is read")
    elif method != "mxfp4":
        raise model_quantized(directory, f"by {method or said}, and of such files only fp8 and mxfp4 are read")


def dequantized(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]
) -> dict[str, Any]:
    """The slices under the names of the parameters, those of quantized tensors as what they stand for.

    InvalidStateError (MODEL_QUANTIZED) for what `require_known` refuses, and for tensors that do not fit together.
    """
    require_known(directory, config)
    said = quantization_of(config)
    if said is None:
        return dict(slices)
    if said["quant_method"] == "mxfp4":
        return _mxfp4(directory, tensors, slices)
    return _fp8(directory, _fp8_block(directory, said), tensors, slices)


def _fp8_block(directory: Path, said: Mapping[str, Any]) -> tuple[int, int] | None:
    match said.get("weight_block_size"):
        case None:
            return None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            return high, wide
        case other:
            raise model_quantized(directory, f"in FP8 with weight_block_size {other!r}, which is no pair of sizes")


def _fp8(
    directory: Path, block: tuple[int, int] | None, tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]
) -> dict[str, Any]:
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
        found.pop(f"{name.rpartition('.')[0]}.{_FP8_ACTIVATIONS}", None)  # says nothing of the weights
    if wrong:
        raise model_quantized(
            directory,
            f"in FP8, and {len(wrong)} weights have no {_FP8_SCALE.removeprefix('_')} that fits blocks of "
            f"{block or 'the whole weight'}: {first_names(wrong)}",
        )
    return found


def _fits(shape: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether a weight's factors are one for each block; without blocks one for all of it."""
    if block is None:
        return scale in ((), (1,), (1, 1)) or (len(scale) == len(shape) == 3 and scale == (shape[0], 1, 1))
    if len(shape) < 2:
        return False
    return scale == (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def _mxfp4(directory: Path, tensors: Mapping[str, StoredTensor], slices: Mapping[str, Any]) -> dict[str, Any]:
    found, wrong = dict(slices), []
    for name, stored in tensors.items():
        if not name.endswith(_MXFP4_BLOCKS):
            continue
        whole = name.removesuffix(_MXFP4_BLOCKS)
        scales = tensors.get(whole + _MXFP4_SCALES)
        is_packed = stored.dtype == "U8" and len(stored.shape) == 4 and stored.shape[-1] == 16
        if scales is None or scales.dtype != "U8" or not is_packed or scales.shape != stored.shape[:-1]:
            wrong.append(name)
            continue
        found[whole] = Mxfp4Weight(slices[name], slices[whole + _MXFP4_SCALES])
        del found[name], found[whole + _MXFP4_SCALES]
    if wrong:
        raise model_quantized(directory, f"in MXFP4, and its blocks and scales do not fit: {first_names(wrong)}")
    return found
