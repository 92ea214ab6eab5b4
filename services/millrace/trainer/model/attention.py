"""The kernel of attention where a row holds samples of varying lengths; sdpa with a dense mask is everywhere."""

import logging
from typing import Any

import torch
from transformers.utils.import_utils import is_flash_attn_2_available

from millrace.trainer.model.context_parallel import context_parallel_of

logger = logging.getLogger(__name__)


def use_varlen_kernel(model: Any, *, compute_dtype: torch.dtype, device: torch.device) -> bool:
    """Let the model's attention be flash-attn's where that is installed and computes in this format; whether it is.

    Its backward adds up in no fixed order, so that strict runs do without.
    """
    if context_parallel_of(model) is not None:
        return False  # its attention is the one that shares rows
    if device.type != "cuda" or compute_dtype not in (torch.bfloat16, torch.float16) or not is_flash_attn_2_available():
        return False
    try:
        model.set_attn_implementation("flash_attention_2")
    except (ValueError, ImportError) as error:
        logger.warning("the model does not take flash-attn", extra={"error": str(error)})
        return False
    return True
