"""Values of floating-point tensors, and back, without torch: numpy has no bfloat16."""

import numpy as np

from millrace.policies.tensors import TensorBytes


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
