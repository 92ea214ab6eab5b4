"""An adapter merged into its base: the weights W + scaling · B·A of every adapted layer, in the base's number format.

The sum is made in float32 and rounded once, to nearest, ties to even. What is published of a run with adapters stays
unmerged; this is for programs that load whole models only.
"""

from collections.abc import Mapping

import numpy as np

from millrace.errors import InvalidStateError
from millrace.policies.adapter import HIGH, LOW, AdapterSpec, model_name
from millrace.policies.tensors import TensorBytes


def merge_adapter(
    base: Mapping[str, TensorBytes], adapter: Mapping[str, TensorBytes], spec: AdapterSpec, *, source: str
) -> dict[str, TensorBytes]:
    """The tensors of the merged model; `source` names the adapter in an error.

    InvalidStateError (LORA_TARGET_TIED) if it is on a weight that another layer has, too: merged, it would change both.
    """
    merged, own = dict(base), {model_name(name, source=source): tensor for name, tensor in adapter.items()}
    for name, tensor in own.items():
        if name.endswith(LOW):
            layer = name.removesuffix(LOW)
            if (weight := base.get(f"{layer}.weight")) is None:
                raise InvalidStateError(
                    f"{source} adapts {layer}, whose weight is another layer's, too, in the base",
                    reason="LORA_TARGET_TIED",
                    remedy="use the adapter on its base, without merging it",
                )
            change = as_float32(own[layer + HIGH]) @ as_float32(tensor)
            merged[f"{layer}.weight"] = from_float32(as_float32(weight) + spec.scaling * change, dtype=weight.dtype)
        elif not name.endswith(HIGH):  # a layer that is trained whole
            merged[name] = tensor
    return merged


def as_float32(tensor: TensorBytes) -> np.ndarray:
    """The values of a floating-point tensor."""
    if tensor.dtype == "bfloat16":
        return (tensor.numpy().astype(np.uint32) << 16).view(np.float32)
    return tensor.numpy().astype(np.float32)


def from_float32(values: np.ndarray, *, dtype: str) -> TensorBytes:
    """Finite values in a floating-point format, rounded to nearest, ties to even."""
    if dtype != "bfloat16":
        return TensorBytes.from_numpy(values.astype(dtype))
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return TensorBytes.from_numpy(rounded.astype(np.uint16), dtype=dtype)
