"""The files in which adapters are stored, without torch: names of tensors, and what PEFT reads.

A full state has `adapter/{name}`, `grad/{name}`, `exp_avg/{name}` and `exp_avg_sq/{name}`, a sampler's weights have
PEFT's names.
"""

from safetensors.numpy import load, save

from millrace.policies.peft.config import LOW, AdapterSpec, model_name, published_name

ALPHA = 32.0
"""Of every adapter: the SDK does not say one."""
OWN = "adapter/"
"""Begins the names of an adapter's weights in a full state."""


def peft_files(weights: bytes, *, is_full: bool, rank: int, base: str) -> dict[str, bytes]:
    """Return an adapter as PEFT's files, by name, from the bytes of a full state or of a sampler's weights.

    `base` is the name of the base model.
    """
    tensors = load(weights)
    if is_full:
        tensors = {published_name(n.removeprefix(OWN)): each for n, each in tensors.items() if n.startswith(OWN)}
        weights = save(tensors)
    layers = sorted(model_name(name, source="a state").removesuffix(LOW) for name in tensors if name.endswith(LOW))
    spec = AdapterSpec(rank=rank, alpha=ALPHA, target_modules=tuple(layers))
    return {"adapter_config.json": spec.to_config(base_model=base), "adapter_model.safetensors": weights}
