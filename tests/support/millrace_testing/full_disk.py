"""A disk that is full, for files of this process."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Let the kernel refuse files above that size in the block, as it does when a disk is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
