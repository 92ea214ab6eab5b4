"""The kernel of attention where a row holds samples of varying lengths; sdpa with a dense mask is everywhere.

torch brings the kernel (FlashAttention 2, `torch.nn.attention.varlen`), so that nothing else has to be installed. Its
backward adds up in a fixed order where torch is told to be deterministic.

Shape suffixes: R rows, L longest row with padding, N tokens of all rows, H heads, D size of a head, S samples.
"""

import logging
from typing import Any

import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, flash_attention_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from millrace.trainer.model.context_parallel import context_parallel_of

logger = logging.getLogger(__name__)

_NAME = "millrace_varlen"
_LARGEST_HEAD = 256
_OLDEST = (8, 0)
"""Compute capability: Ampere."""


def use_varlen_kernel(model: Any, *, compute_dtype: torch.dtype, device: torch.device) -> bool:
    """Let the model's attention be the kernel for varying lengths where it computes what the model asks; whether it is.

    Elsewhere, and where ranks share rows, which has an attention of its own, the model is left as it is.
    """
    if context_parallel_of(model) is not None:
        return False
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16):
        return False
    if torch.cuda.get_device_capability(device) < _OLDEST:
        return False
    if reason := _unsuited(model):
        logger.info("attention over packed rows takes a dense mask", extra={"reason": reason})
        return False
    ALL_ATTENTION_FUNCTIONS.register(_NAME, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, flash_attention_mask)
    model.set_attn_implementation(_NAME)  # which leaves models that know no other attention as they are
    return model.config._attn_implementation == _NAME


def lengths_of_samples(model: Any, position_ids_RL: torch.Tensor) -> dict[str, Any]:
    """What the kernel asks of rows, as arguments of the model: once for all layers. Nothing where it is not used."""
    return _lengths(position_ids_RL) if model.config._attn_implementation == _NAME else {}


def _unsuited(model: Any) -> str | None:
    """What the model's attention does that the kernel does not."""
    config = model.config.get_text_config()
    if not getattr(config, "num_attention_heads", 0):
        return "it has none"  # recurrent models
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):
        return "keys and values have heads of different sizes"
    if head > _LARGEST_HEAD or head % 8:
        return f"a head has {head} values, and the kernel takes multiples of 8 up to {_LARGEST_HEAD}"
    if getattr(config, "attn_logit_softcapping", None):
        return "its scores are capped"
    if getattr(config, "attention_chunk_size", None):
        return "it is chunked"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_pdrop", 0.0):
        return "it drops scores out"
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):
        return "it has sinks"
    return None


def _lengths(position_ids_RL: torch.Tensor) -> dict[str, Any]:
    """Where samples begin in the rows one behind the other, [S + 1], and the longest: by transformers' names."""
    starts_S = (position_ids_RL.reshape(-1) == 0).nonzero().squeeze(1)
    bounds = nn.functional.pad(starts_S, (0, 1), value=position_ids_RL.numel()).int()
    longest = int(bounds.diff().max())
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend, as transformers' interface has it: query, key, value [R, heads, L, D] → [R, L, heads, D]."""
    if attention_mask is not None:
        raise ValueError("positions say where samples begin and end, not a mask")
    if unknown := [name for name in ("dropout", "softcap", "s_aux") if kwargs.get(name)]:
        raise ValueError(f"the kernel for varying lengths knows no {', '.join(unknown)}")
    if "cu_seq_lens_q" not in kwargs:  # of a caller that has not asked for `lengths_of_samples`
        rows, length = query.shape[0], query.shape[2]
        whole = torch.arange(length, device=query.device).expand(rows, -1)
        kwargs |= _lengths(whole if position_ids is None else position_ids.expand(rows, -1))
    bounds, longest = kwargs["cu_seq_lens_q"], kwargs["max_length_q"]
    query_NHD, key_NHD, value_NHD = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    found_NHD = varlen_attn(
        query_NHD,
        key_NHD,
        value_NHD,
        bounds,
        bounds,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=True,
    )
    assert isinstance(found_NHD, torch.Tensor)  # without auxiliary outputs
    return found_NHD.unflatten(0, (query.shape[0], query.shape[2])), None
