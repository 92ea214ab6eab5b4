"""Tiny models in FP8 and MXFP4, and the numbers that they represent."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import FP4_VALUES

from millrace_testing.model_files import Change, Tensors, rewrite

E4M3_MAX = 448.0


def say_quantized(directory: Path, said: object) -> Path:
    """Set the quantization in config.json to `said`."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": said}))
    return directory


def in_fp8(block: tuple[int, int] | None, *, scale_dtype: torch.dtype = torch.float32) -> Change:
    """Return a change that converts every projection to FP8, with a factor for each block of rows and columns, or one
    for the whole.
    """

    def change(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if not name.endswith("proj.weight"):
                found[name] = tensor
                continue
            high, wide = block or tuple(tensor.shape)
            parts = [[each.abs().max() / E4M3_MAX for each in row.split(wide, 1)] for row in tensor.split(high, 0)]
            scale = torch.tensor(parts).exp2().log2() if scale_dtype == torch.float32 else torch.tensor(parts)
            if scale_dtype != torch.float32:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            spread = scale.repeat_interleave(high, 0)[: tensor.shape[0]].repeat_interleave(wide, 1)
            found[name] = (tensor / spread[:, : tensor.shape[1]]).to(torch.float8_e4m3fn)
            found[f"{name}_scale_inv"] = (scale if block else scale[0, 0]).to(scale_dtype)
        return found

    return change


def write_mxfp4(directory: Path) -> Tensors:
    """Write a gpt-oss model with experts in MXFP4; return the numbers that they represent, by name."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 48,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "head_dim": 16,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    GptOssForCausalLM(GptOssConfig(**sizes, **heads, pad_token_id=None, eos_token_id=2)).save_pretrained(directory)
    expected: Tensors = {}

    def pack(tensors: Tensors) -> Tensors:
        found: Tensors = {}
        for name, tensor in tensors.items():
            if not name.endswith(("gate_up_proj", "down_proj")):
                found[name] = tensor
                continue
            experts, fan_in, fan_out = tensor.shape
            blocks = torch.randint(0, 256, (experts, fan_out, fan_in // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 126, blocks.shape[:-1], dtype=torch.uint8)
            nibbles = torch.stack([blocks & 15, blocks >> 4], -1).reshape(experts, fan_out, fan_in // 32, 32)
            numbers = torch.tensor(FP4_VALUES)[nibbles.long()] * torch.exp2(scales.float() - 127)[..., None]
            expected[name] = numbers.reshape(experts, fan_out, fan_in).transpose(1, 2)
            found |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        return found

    rewrite(directory, pack)
    say_quantized(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return expected
