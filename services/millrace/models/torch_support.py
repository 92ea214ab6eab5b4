"""Number formats by the names of manifests, and errors of torch that mean too little memory."""

import contextlib
from collections.abc import Iterator

import torch

from millrace.errors import InvalidStateError

_CPU_ALLOCATOR = "DefaultCPUAllocator"
"""Part of the message of the RuntimeError that torch raises if host memory is short; GPUs' errors have a class."""


def is_shortage(error: BaseException) -> bool:
    """Return whether an error says that host or device memory is short."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)
    )


# torch's number formats by the names that manifests use.

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
"""The integer format in which an element's bits are viewed, by its width in bytes."""


def tag_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's number format in manifests, such as "bfloat16".

    Torch's name if manifests have none.
    """
    return _TAGS.get(tensor.dtype, str(tensor.dtype))


_TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


# A lack of memory as a typed error, with the keys that reduce it.


@contextlib.contextmanager
def shortage_named(doing: str) -> Iterator[None]:
    """Raise InvalidStateError (OUT_OF_MEMORY) instead of errors of the block that say that memory is short.

    `doing` completes "there is not enough memory to …". Other errors pass.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_shortage(error):
            raise
        first_line = str(error).strip().partition("\n")[0]
        raise InvalidStateError(
            f"there is not enough memory to {doing}: {first_line or type(error).__name__}",
            reason="OUT_OF_MEMORY",
            remedy="take less (a shorter seq_len, model.ac, model.fsdp_cpu_offload, model.lora), or use more GPUs; "
            "`millrace estimate` says what each of these keys brings a rank down to",
        ) from error
