"""Models with the shapes of published ones and random weights, for tests on GPUs."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from millrace_testing.inference.tiny import tiny_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""Those of Qwen3."""


def config_of(size: str) -> Qwen3Config:
    """Return the config of a size."""
    shared = {"vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128}
    return Qwen3Config(**shared, **SHAPES[size], tie_word_embeddings=size != "8B")


def write_model(size: str, directory: Path) -> Path:
    """Write a model with random weights in bfloat16 and a small tokenizer, unless it exists; return its directory."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16).save_pretrained(directory)
        tiny_tokenizer().save_pretrained(directory)
    return directory
