"""Builds models and tokenizers from a directory of Hugging Face files, without a network."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from millrace.errors import InvalidStateError
from millrace.inference.weights import check_tensors, copy_tensors, float_dtype
from millrace.policies.tensors import TensorBytes

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model")


def write_files(files: Mapping[str, bytes]) -> tempfile.TemporaryDirectory[str]:
    """Writes a policy's files into a fresh directory that lives as long as the returned object."""
    directory = tempfile.TemporaryDirectory(prefix="millrace-model-")
    for name, data in files.items():
        (Path(directory.name) / name).write_bytes(data)  # names are plain: the manifest checks it
    return directory


def load_config(model_dir: Path) -> Any:
    """The model's config; InvalidStateError if there is none, or the embedded engine cannot run such a model."""
    if not (model_dir / "config.json").is_file():
        raise InvalidStateError(
            f"the model has no config.json (files: {', '.join(sorted(p.name for p in model_dir.iterdir())) or 'none'})",
            reason="MODEL_CONFIG_MISSING",
            remedy="publish the policy with its config.json and tokenizer files",
        )
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if layer_types - {"full_attention"} or (window and not getattr(config, "layer_types", None)):
        raise InvalidStateError(
            f"model {config.model_type} has layers that are not full attention ({', '.join(sorted(layer_types))}"
            f", sliding window {window}), which the embedded engine cannot run",
            reason="MODEL_NOT_SUPPORTED",
            remedy="use a model with full attention in every layer",
        )
    return config


def max_positions(config: Any) -> int:
    """Longest sequence that the model's positions allow."""
    return int(getattr(config, "max_position_embeddings", 0) or 2048)


def cache_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of KV cache per token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize


def load_model(model_dir: Path, tensors: Mapping[str, TensorBytes] | None) -> torch.nn.Module:
    """The model in evaluation mode, with weights from `tensors`, or from the directory if that is None."""
    config = load_config(model_dir)
    if tensors is None:
        model = AutoModelForCausalLM.from_pretrained(model_dir, config=config, dtype="auto", local_files_only=True)
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=float_dtype(tensors))
        check_tensors(model, tensors)
        copy_tensors(model, tensors)
    return model.eval().requires_grad_(False)


def load_tokenizer(model_dir: Path) -> PreTrainedTokenizerBase | None:
    """The tokenizer, or None if the directory has none (tokens in, tokens out still works)."""
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def eos_token_ids(model_dir: Path, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> tuple[int, ...]:
    """Tokens that end a completion: those of the generation config, of the model's config and of the tokenizer."""
    found: list[int] = []
    sources: list[Any] = [config.eos_token_id if hasattr(config, "eos_token_id") else None]
    if (model_dir / "generation_config.json").is_file():
        sources.append(GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id)
    sources.append(tokenizer.eos_token_id if tokenizer is not None else None)
    for source in sources:
        match source:
            case int():
                found.append(source)
            case list() | tuple():
                found.extend(source)
    return tuple(dict.fromkeys(found))
