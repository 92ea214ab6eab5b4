"""Builds torch models from a directory of Hugging Face files and published tensors, without a network."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from millrace.context_length import fix_context_length
from millrace.errors import InvalidStateError
from millrace.inference.embedded.weights import check_tensors, copy_tensors, float_dtype, hold_formats
from millrace.inference.model_files import load_config
from millrace.models import loading
from millrace.models.saved import recall_conversions
from millrace.policies.probe import Probe
from millrace.policies.tensors import TensorBytes
from millrace.telemetry.startup import without_gc

_DEFAULT_POSITIONS = 2048  # where a config names no longest sequence


def warm_up() -> None:
    """Import what building any model imports: half of the time from the start of a process to its first policy.

    Meant for a thread while nothing is asked of the engine yet.
    """
    with without_gc():
        importlib.import_module("transformers.modeling_utils")


def load_model(model_dir: Path, tensors: Mapping[str, TensorBytes] | None, *, context_length: int) -> torch.nn.Module:
    """The model in evaluation mode, with weights from `tensors`, or from the directory if that is None.

    Positions are those of sequences of at most `context_length` tokens.
    """
    config = load_config(model_dir) if tensors is not None else loading.load_config(model_dir)
    _require_full_attention(config, context_length=context_length)
    if tensors is None:
        model = loading.empty_model(model_dir, dtype=loading.stored_dtype(model_dir, config))
        loading.fill_model(model, model_dir, device=torch.device("cpu"))
    else:
        model = AutoModelForCausalLM.from_config(config, dtype=float_dtype(tensors))
        recall_conversions(model, tensors)
        hold_formats(model, tensors)
        check_tensors(model, tensors)
        copy_tensors(model, tensors)
    fix_context_length(model, context_length)
    return model.eval().requires_grad_(False)


def context_length(config: Any, *, most: int | None, probe: Probe | None) -> int:
    """Tokens of the longest sequence that the model's positions allow, that is wanted, and that the policy is made for.

    InvalidStateError (CONTEXT_DIFFERS) if that is too short for the positions that the policy's trainer computes.
    """
    length = int(getattr(config, "max_position_embeddings", 0) or _DEFAULT_POSITIONS)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":  # the positions that a model was trained on, which these go beyond
        length = int(length * rope.get("factor", 1))
    if rope.get("rope_type") == "longrope" and most is None and probe is None:  # as vLLM has it: short factors
        most = rope.get("original_max_position_embeddings")
    length = min(length, most or length)
    if probe is not None:
        length = min([length, *probe.contexts[1:]])
        probe.require_context(length)
    return length


def cache_token_bytes(config: Any, dtype: torch.dtype) -> int:
    """Bytes of KV cache per token."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * dtype.itemsize


def _require_full_attention(config: Any, *, context_length: int) -> None:
    """Raise InvalidStateError for layers whose masks or states the row cache does not know."""
    layer_types = set(getattr(config, "layer_types", None) or ())
    has_windows = not layer_types and hasattr(type(config), "sliding_window")  # else left over from another model
    window = config.sliding_window if has_windows else None
    if layer_types - {"full_attention"} or (window and window < context_length):
        raise InvalidStateError(
            f"model type {config.model_type} has layers that are not full attention "
            f"({', '.join(sorted(layer_types)) or f'sliding window of {window}'}); the embedded engine cannot run it",
            reason="MODEL_NOT_SUPPORTED",
            remedy="use a model with full attention in every layer",
        )
