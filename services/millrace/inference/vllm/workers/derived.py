"""What vLLM derives from weights when they are loaded, and keeps beside the parameters.

A version that is written into the parameters leaves these as they were: the model would serve them stale, while every
parameter reads back right. Only a whole reload makes them anew.
"""

import torch

_MLA = ("W_UK_T", "W_UV", "W_UK", "W_K", "W_V")
"""Halves of `kv_b_proj` with which multi-head latent attention decodes (DeepSeek, Kimi, MiniCPM3), by backend."""


def derived_attributes(model: torch.nn.Module) -> list[str]:
    """Names of the tensors of a loaded model that are derived from parameters and are none themselves, sorted."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    found: list[str] = []
    for name, module in model.named_modules():
        kept = {each: module.__dict__.get(each) for each in _MLA}
        # FlashInfer computes with a float32 copy of the attention sinks.
        kept["impl.sinks"] = getattr(module.__dict__.get("impl"), "sinks", None)
        found += [
            f"{name}.{each}"
            for each, value in kept.items()
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own
        ]
    return sorted(found)
