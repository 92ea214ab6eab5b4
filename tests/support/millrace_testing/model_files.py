"""Tiny model directories, and what changes their tensors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], Tensors]
TEMPLATE = "{% for message in messages %}{{ message.content + ' ' + eos_token + ' ' }}{% endfor %}"


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
    model.save_pretrained(directory, max_shard_size=shard or "50GB")
    return directory


def rewrite(directory: Path, change: Change) -> Path:
    """Write the tensors of the one file anew, as `change` gives them."""
    path = directory / "model.safetensors"
    tensors = change(load_file(path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    return directory


def write_tokenizer(directory: Path, *, num_tokens: int, template: str | None = TEMPLATE, **changes: Any) -> Path:
    """Write a tokenizer of `num_tokens` words `t0`, `t1`, …; the last word ends a turn."""
    words = WordLevel({f"t{index}": index for index in range(num_tokens)}, unk_token="t0")
    core = Tokenizer(words)
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=f"t{num_tokens - 1}", **changes)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(directory)
    return directory
