"""Memory that two processes share, without a name in any file system.

An anonymous file of the kernel (memfd): /dev/shm, which containers make small, does not bound it, and it is gone with
the last process that has it, however that ends. Only Linux has such files.
"""

import itertools
import mmap
import os
import weakref
from dataclasses import dataclass

_SEGMENT_BYTES = 64 << 20
"""What is mapped first; each later segment doubles the whole, so that they stay few. What is not allocated takes no
memory."""
_numbers = itertools.count(1)


class SharedMemory:
    """Shared memory that only grows, and is released as a whole. Its owner writes, other processes only read."""

    def __init__(self) -> None:
        """Create the memory; OSError where the kernel gives none."""
        self.number = next(_numbers)
        """Identifies it in this process."""
        self.size_bytes = 0
        """Size of the file, which another process has to map to see everything."""
        self._file = os.memfd_create("millrace")
        self._segment: mmap.mmap | None = None
        self._begin = self._next = 0
        self._finalize = weakref.finalize(self, os.close, self._file)

    def fileno(self) -> int:
        """Return the file descriptor, which another process may get."""
        return self._file

    def allocate(self, size_bytes: int) -> tuple[int, memoryview]:
        """Allocate whole pages that nobody else has.

        Return their offset in the file, and a writable view of `size_bytes`. The file grows if needed. Raises OSError
        if there is no room.
        """
        needed = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._segment is None or self._next + needed > self.size_bytes:
            # A view has to be within one mapping, so the rest of the last segment stays unused.
            self._begin = self._next = self.size_bytes
            length = max(needed, self.size_bytes, _SEGMENT_BYTES)
            os.ftruncate(self._file, self.size_bytes + length)
            self._segment = mmap.mmap(self._file, length, offset=self._begin)
            self.size_bytes += length
        offset = self._next
        if needed:
            os.posix_fallocate(self._file, offset, needed)  # no room: found now, and not by a fault later
        self._next += needed
        inside = offset - self._begin
        return offset, memoryview(self._segment)[inside : inside + size_bytes]

    def close(self) -> None:
        """Close the file of the shared memory; mapped memory stays until the last view of it is gone. Idempotent."""
        self._finalize()


@dataclass(frozen=True, slots=True)
class SharedPlace:
    """Where something is in shared memory: `offset` bytes from its beginning."""

    memory: SharedMemory
    offset: int


def map_read_only(file: int, size_bytes: int) -> memoryview:
    """Map the first `size_bytes` of a shared memory's file for reading, return a view of them, and close the
    descriptor.

    `file` is the number of the file as it was received from another process.
    """
    try:
        return memoryview(mmap.mmap(file, size_bytes, access=mmap.ACCESS_READ))
    finally:
        os.close(file)
