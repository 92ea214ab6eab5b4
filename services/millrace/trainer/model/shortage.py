"""Memory that does not suffice, told as what it is: with the rank, the place and the keys that take less of it."""

import contextlib
from collections.abc import Iterator

from millrace.errors import InvalidStateError
from millrace.models.shortage import is_shortage


@contextlib.contextmanager
def shortage_named(doing: str) -> Iterator[None]:
    """In this block a lack of memory, of a GPU or of the host, becomes InvalidStateError (OUT_OF_MEMORY)."""
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
