"""torch's number formats by the names that manifests use."""

import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What an element's bits are seen as, by its width in bytes."""


def tag_of(tensor: torch.Tensor) -> str:
    """The name of a tensor's format; torch's own where manifests have none."""
    return _TAGS.get(tensor.dtype, str(tensor.dtype))


_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}
