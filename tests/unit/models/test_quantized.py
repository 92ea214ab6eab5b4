"""Of files in FP8 or MXFP4 the numbers that they represent are trained and saved; other formats are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from millrace.errors import InvalidStateError
from millrace.inference.embedded import loader as engine
from millrace.models.loading import check_weights
from millrace.trainer.model.pretrained import load_model, policy_files
from millrace_testing.model_files import Change, rewrite
from millrace_testing.quantized_files import E4M3_MAX, in_fp8, say_quantized, write_mxfp4

HALF_STEP = 2.0**-4
"""Largest rounding of E4M3, which has three bits after the first one, relative to the number."""


BLOCKS: dict[str, tuple[tuple[int, int] | None, torch.dtype]] = {
    "blocks that divide": ((8, 8), torch.float32),
    "blocks that do not": ((10, 7), torch.float32),
    "blocks larger than the weight": ((128, 128), torch.float32),
    "one factor": (None, torch.float32),
    "exponents": ((8, 8), torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("case", BLOCKS)
def test_fp8_is_trained_as_the_numbers_it_stands_for(sound: Path, copy: Path, case: str) -> None:
    block, scale_dtype = BLOCKS[case]
    rewrite(copy, in_fp8(block, scale_dtype=scale_dtype))
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    say_quantized(copy, {**said, **({} if block is None else {"weight_block_size": list(block)})})
    check_weights(copy)
    original = load_file(sound / "model.safetensors")
    for model in (load_model(copy), engine.load_model(copy, None, context_length=64)):
        for name, tensor in model.state_dict().items():
            is_exact = not name.endswith("proj.weight")
            limit = 0.0 if is_exact else HALF_STEP
            floor = 0.0 if is_exact else float(original[name].abs().max()) / E4M3_MAX  # below it E4M3 has no bits left
            error = (tensor.float() - original[name]).abs()
            assert bool((error <= limit * original[name].abs() + floor).all()), name
    config = json.loads(policy_files(load_model(copy), copy, dtype=torch.float32)["config.json"])
    assert "quantization_config" not in config and config["dtype"] == "float32"


@pytest.mark.long
def test_fp8_in_blocks_that_divide_is_what_transformers_makes_of_it(copy: Path) -> None:
    rewrite(copy, in_fp8((8, 8)))
    say_quantized(copy, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]})
    expected = AutoModelForCausalLM.from_pretrained(copy, dtype=torch.float32).state_dict()
    found = load_model(copy).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_mxfp4_is_trained_as_the_numbers_it_stands_for(tmp_path: Path) -> None:
    expected = write_mxfp4(tmp_path)
    check_weights(tmp_path)
    found = load_model(tmp_path).state_dict()
    assert len(expected) == 2 and all(torch.equal(found[name], numbers) for name, numbers in expected.items())
    assert "quantization_config" not in json.loads(
        policy_files(load_model(tmp_path), tmp_path, dtype=torch.bfloat16)["config.json"]
    )


UNKNOWN: dict[str, tuple[Any, str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "by bitsandbytes"),
    "bitsandbytes of older files": ({"load_in_8bit": True}, "load_in_8bit"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "by gptq"),
    "awq": ({"quant_method": "awq", "bits": 4}, "by awq"),
    "compressed-tensors": (
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
        "by compressed-tensors",
    ),
    "modelopt": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "by modelopt"),
    "text": ("fp8", "by fp8"),
    "another FP8": ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2"),
    "no sizes of blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
}


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("load", [load_model, check_weights, lambda d: engine.load_model(d, None, context_length=64)])
def test_what_is_not_known_is_refused_with_the_remedy(copy: Path, case: str, load: Callable[[Path], object]) -> None:
    said, message = UNKNOWN[case]
    say_quantized(copy, said)
    with pytest.raises(InvalidStateError, match=message) as raised:
        load(copy)
    assert raised.value.reason == "MODEL_QUANTIZED" and "dequantize()" in str(raised.value)


ODD: dict[str, tuple[Change, object]] = {
    "FP8 that no config explains": (in_fp8((8, 8)), None),
    "integers that no config explains": (
        lambda tensors: {**tensors, "lm_head.weight": tensors["lm_head.weight"].to(torch.int8)},
        None,
    ),
    "factors of other blocks": (in_fp8((8, 8)), {"quant_method": "fp8", "weight_block_size": [16, 16]}),
    "weights without factors": (
        lambda tensors: {name: each for name, each in in_fp8((8, 8))(tensors).items() if "_inv" not in name},
        {"quant_method": "fp8", "weight_block_size": [8, 8]},
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_tensors_that_their_config_does_not_explain_are_refused(copy: Path, case: str) -> None:
    change, said = ODD[case]
    say_quantized(rewrite(copy, change), said)
    for load in (load_model, check_weights):
        with pytest.raises(InvalidStateError, match="weight") as raised:
            load(copy)
        assert raised.value.reason == "MODEL_QUANTIZED"


def test_a_config_that_says_it_of_plain_files_is_saved_without_it(sound: Path, copy: Path) -> None:
    """As whoever dequantized the files by hand leaves it."""
    say_quantized(copy, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    expected = load_file(sound / "model.safetensors")
    assert all(torch.equal(each, expected[name]) for name, each in load_model(copy).state_dict().items())
    assert b"quantization_config" not in policy_files(load_model(copy), copy, dtype=torch.float32)["config.json"]
