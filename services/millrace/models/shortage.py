"""Errors by which torch says that memory does not suffice."""

import torch

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In what torch raises on a host without memory: a plain RuntimeError, where a GPU's has a class of its own."""


def is_shortage(error: BaseException) -> bool:
    """Whether an error says that there is no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )
