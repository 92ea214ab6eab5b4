"""What vLLM derives from weights when they are loaded, and keeps beside them.

A version that is written into the parameters leaves these as they were: the model would serve them stale, while every
parameter reads back right. vLLM's layerwise reload makes anew what layers derive, so that such a model is loaded whole.
What the model itself derives behind its layers (DeepSeek-V4, Kimi K3) that reload leaves out, and it is refused.
"""

from collections.abc import Collection

import torch

from millrace.errors import InvalidStateError
from millrace.inference.vllm.workers.layout import Slot

_PLAIN = ("W_UK_T", "W_UV", "W_UK", "W_K", "W_V", "W_UK_T_dcp_qrep")
"""Tensors that a layer keeps as plain attributes: halves of `kv_b_proj`, with which latent attention decodes."""
_OF_BACKENDS = ("sinks", "_w_uk_packed", "_w_uv_packed", "_w_scale")
"""Those of an attention backend: FlashInfer's float32 copy of the sinks, what the one for AMX has packed."""


def derived_tensors(model: torch.nn.Module, loaded: Collection[Slot]) -> list[str]:
    """Names of the tensors of a loaded model that are derived from its weights, sorted; `loaded` is what loaders fill.

    A view of a weight changes with it, and is none.
    """
    own: set[int] = set()
    others: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        for each, parameter in module._parameters.items():
            if parameter is None:
                continue
            if Slot(module=name, name=each) in loaded:
                own.add(parameter.untyped_storage().data_ptr())
            else:
                others[f"{name}.{each}"] = parameter
        own |= {each.untyped_storage().data_ptr() for each in module._buffers.values() if each is not None}
        others |= _kept(name, module.__dict__, _PLAIN)
        others |= _kept(f"{name}.impl", getattr(module.__dict__.get("impl"), "__dict__", {}), _OF_BACKENDS)
    return sorted(
        name for name, each in others.items() if each.untyped_storage().data_ptr() not in own and each.numel()
    )


def require_reloadable(model: torch.nn.Module) -> None:
    """InvalidStateError if the model derives something behind its layers, which no reload makes anew."""
    if not hasattr(model, "process_weights_after_loading"):
        return
    raise InvalidStateError(
        f"{type(model).__name__} derives tensors from all of its weights once vLLM has loaded them, and vLLM's reload "
        "does not make them anew: it would serve new versions with stale tensors",
        reason="MODEL_KEEPS_STALE_TENSORS",
        remedy="train a model of another architecture, or serve this one without a run",
    )


def _kept(name: str, attributes: dict[str, object], names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    found = {f"{name}.{each}": attributes.get(each) for each in names}
    return {each: value for each, value in found.items() if isinstance(value, torch.Tensor)}
