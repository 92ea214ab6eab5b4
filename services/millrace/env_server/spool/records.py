"""The files of the spool: rollouts that were written together, one record after the other.

    record    "MRR1", flags uint32 (1: of an evaluation), ordinal uint64, size uint64, sha256 [32], all little-endian,
              then the bytes of the log's entry

A file appears whole, by a rename, and is never changed.
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_HEAD = struct.Struct("<4sIQQ32s")
_MARK = b"MRR1"
_IS_EVAL = 1


class Record(NamedTuple):
    """A rollout of a file; its bytes are at `offset`."""

    is_eval: bool
    ordinal: int
    h: str
    offset: int
    size_bytes: int


@dataclass(slots=True, eq=False)
class SpoolFile:
    """One file, and how many of its rollouts are kept still."""

    path: Path
    num_kept: int = 0

    def read(self, offset: int, size_bytes: int) -> bytes:
        """The bytes at `offset`, fewer where the file ends. Raises OSError."""
        with self.path.open("rb") as file:
            file.seek(offset)
            return file.read(size_bytes)


def file_name(ordinal: int, h: str) -> str:
    """Name of the file that begins with this rollout."""
    return f"{ordinal:012d}-{h}.rollouts"


def write_file(folder: str, rollouts: Sequence[tuple[bool, int, str, bytes]]) -> tuple[SpoolFile, list[int]]:
    """Write (is_eval, ordinal, h, data) of each; returns the file and where the bytes of each begin. Raises OSError."""
    parts: list[bytes] = []
    offsets: list[int] = []
    end = 0
    for is_eval, ordinal, h, data in rollouts:
        head = _HEAD.pack(_MARK, _IS_EVAL if is_eval else 0, ordinal, len(data), bytes.fromhex(h))
        parts += (head, data)
        offsets.append(end + _HEAD.size)
        end += _HEAD.size + len(data)
    _, ordinal, h, _ = rollouts[0]
    partial, path = f"{folder}/.{h}.tmp", f"{folder}/{file_name(ordinal, h)}"
    os.makedirs(folder, exist_ok=True)
    try:
        with open(partial, "wb", buffering=0) as file:
            written, whole = 0, b"".join(parts)
            while written < len(whole):  # a disk that is nearly full takes a part
                written += file.write(memoryview(whole)[written:])
        os.rename(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
    return SpoolFile(Path(path)), offsets


def scan_file(path: Path) -> tuple[list[Record], str]:
    """The records of a file, of which only the heads are read, and what is wrong with the rest in words, or ""."""
    found: list[Record] = []
    size, at = path.stat().st_size, 0
    with path.open("rb") as file:
        while at < size:
            file.seek(at)
            head = file.read(_HEAD.size)
            if len(head) < _HEAD.size or not head.startswith(_MARK):
                return found, f"no record at byte {at} of {size}"
            _, flags, ordinal, num_bytes, digest = _HEAD.unpack(head)
            if num_bytes > size - at - _HEAD.size:
                return found, f"the record at byte {at} of {size} is cut short"
            offset = at + _HEAD.size
            found.append(Record(bool(flags & _IS_EVAL), ordinal, digest.hex(), offset, num_bytes))
            at = offset + num_bytes
    return found, "" if found else "the file is empty"
