"""Keeps the logs of a stack's processes bounded: a file that has grown too large becomes `NAME.log.1`.

The processes keep their files open to append, foreign programs among them, so a file is copied and then emptied; what
is written between the last read and that moment is lost. Who follows a file (`millrace.cli.log_files`) sees by a
new `NAME.log.1` that it was rotated.
"""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NoReturn

from millrace.storage.clean_up import remove

MAX_BYTES = 64 << 20
"""Of one file; with the one before it, a process keeps twice as much."""
PERIOD_S = 5.0
_CHUNK_BYTES = 1 << 20
_LOOKS, _LOOK_AGAIN_S = 10, 0.001
"""How often a copy that ends within a line is looked at again: the write is done, or the line is a prompt."""


def old_of(path: Path) -> Path:
    """Where the lines before those of a log are."""
    return path.with_name(f"{path.name}.1")


def rotate(path: Path, *, max_bytes: int = MAX_BYTES) -> bool:
    """Make the file the old one if it is larger than `max_bytes`; whether it was. OSError where the disk is full."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
    except FileNotFoundError:
        return False
    fresh = path.with_name(f"{path.name}.new")
    try:
        with path.open("rb") as source, fresh.open("wb") as target:
            _copy_lines(source, target)
    except OSError:  # raised on: half a copy takes the last room of a disk
        remove(fresh, what="log file")
        raise
    os.truncate(path, 0)
    fresh.replace(old_of(path))
    return True


def _copy_lines(source: BinaryIO, target: BinaryIO) -> None:
    """Copy to the end of a line: a reader can see the first half of a write that crosses a page, before the second."""
    last = b"\n"
    # unregistered wait: 10 ms at most, for a write that is under way
    for _ in range(_LOOKS):
        while chunk := source.read(_CHUNK_BYTES):
            target.write(chunk)
            last = chunk[-1:]
        if last == b"\n":
            return
        time.sleep(_LOOK_AGAIN_S)


async def keep_bounded(
    directory: Path, *, note: Callable[[str], None], max_bytes: int = MAX_BYTES, period_s: float = PERIOD_S
) -> NoReturn:
    """Rotate the logs of a directory as they grow, until cancelled. `note` is told once of what cannot be rotated."""
    told: set[str] = set()
    # unregistered wait: a periodic look at files of this machine
    while True:
        for path in await asyncio.to_thread(_logs, directory):
            try:
                await asyncio.to_thread(rotate, path, max_bytes=max_bytes)
                told.discard(path.name)
            except OSError as error:
                if path.name not in told:
                    told.add(path.name)
                    note(f"{path} cannot be rotated and goes on growing: {error}")
        await asyncio.sleep(period_s)


def _logs(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.log"))
