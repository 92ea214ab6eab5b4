"""Tiny model directories, and what changes their tensors."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]


def make_qwen3(directory: Path, *, is_tied: bool, seed: int = 0, shard: str | None = None) -> Path:
    """Write a model of two layers; `shard` is the most that one file holds."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=is_tied,
        max_position_embeddings=64,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(directory, **({} if shard is None else {"max_shard_size": shard}))
    return directory


def rewrite(directory: Path, change: Change) -> Path:
    """Write the tensors of the one file anew, as `change` gives them."""
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return directory
