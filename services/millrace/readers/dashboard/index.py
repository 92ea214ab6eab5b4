"""One row per rollout in files of fixed-size records: a million of them are filtered without being read into memory."""

import fcntl
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.storage.clean_up import remove
from millrace.storage.scratch import scratch_errors

FORMAT = 3
ROW = np.dtype(
    [
        ("step", "<i4"), ("place", "<i4"), ("ordinal", "<i8"), ("member", "<i4"), ("attempt", "<i4"),
        ("env", "<i2"), ("purpose", "<i2"), ("status", "<i2"), ("stop", "<i2"), ("reason", "<i2"), ("server", "<i2"),
        ("evaluation", "<i2"),
        ("reward", "<f4"), ("advantage", "<f4"), ("tokens", "<i4"), ("sampled", "<i4"), ("turns", "<i4"),
        ("version_min", "<i4"), ("version_max", "<i4"), ("truncated", "u1"), ("trained", "u1"), ("revision", "<u2"),
        ("seconds", "<f4"), ("model_seconds", "<f4"), ("finished", "<f8"),
    ]
)  # fmt: skip
"""What pages filter and sort by. Names are in it as numbers of a table (`Segment.names`); -1 is none."""
TEXT_SIZES = (120, 200, 64, 128)
"""Bytes that are kept of each field of `Texts`."""
TEXT_BYTES = sum(TEXT_SIZES)
_SCANNED_ROWS = 1 << 15
MAX_NAMES = 1 << 12
"""Names that are kept of one kind; all further ones are shown as `(other)`."""
MAX_RUNS, MAX_BYTES = 64, 4 << 30
"""Of the indexes that one process keeps on disk; the oldest go first."""
OTHER = "(other)"
_ROWS, _TEXTS, _STEPS, _LOCK = "rows.bin", "texts.bin", "steps.jsonl", "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The rows of one header: `[first, first + count)`."""

    step: int
    revision: int
    key: str
    first: int
    count: int
    names: dict[str, list[str]]
    """Names that it is the first to use, by kind, in the order of their numbers."""
    problem: str = ""
    """Why its archive could not be read; it has no rows then."""

    @classmethod
    def parse(cls, line: bytes) -> "Segment":
        """Return the segment in a line of the file of steps; `CorruptObjectError` if it is malformed."""
        raw = decode_object(line, what="a line of an index", reason="INDEX_CORRUPT")
        try:
            return cls(**raw)
        except TypeError as error:
            raise CorruptObjectError(f"a line of an index has other fields: {error}", reason="INDEX_CORRUPT") from error

    def line(self) -> bytes:
        """Return the segment as a line of the file of steps: JSON with a line end."""
        fields = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


class Texts(NamedTuple):
    """What is kept of a rollout's texts."""

    prompt: str = ""
    """Its end."""
    completion: str = ""
    answer: str = ""
    """What the task is scored with."""
    error: str = ""
    """Of a rollout that failed."""


class NameTable:
    """Numbers for names of a few kinds (environment, status, …), in the order in which they come."""

    def __init__(self) -> None:
        self.by_kind: dict[str, list[str]] = {}
        self._numbers: dict[tuple[str, str], int] = {}
        self.fresh: dict[str, list[str]] = {}
        """Those that no committed segment has."""

    def number(self, kind: str, name: str) -> int:
        """Return the number of a name of a kind ("env", "status", …), a new one if it has none.

        -1 for the empty name; that of `(other)` if the kind has too many names.
        """
        if not name:
            return -1
        found = self._numbers.get((kind, name))
        if found is None:
            known = self.by_kind.setdefault(kind, [])
            if len(known) >= MAX_NAMES:
                name = OTHER
                if (kind, OTHER) in self._numbers:
                    return self._numbers[kind, OTHER]
            found = self._numbers[kind, name] = len(known)
            known.append(name)
            self.fresh.setdefault(kind, []).append(name)
        return found

    def find(self, kind: str, name: str) -> int | None:
        """Return the number of a name of a kind; None if it has none."""
        return self._numbers.get((kind, name))

    def name(self, kind: str, number: int) -> str:
        """Return the name that has this number within its kind; empty if none has."""
        known = self.by_kind.get(kind, [])
        return known[number] if 0 <= number < len(known) else ""

    def restore(self, names: dict[str, list[str]]) -> None:
        """Give the names of a stored segment, by kind, the numbers that they had when it was written."""
        for kind, found in names.items():
            for name in found:
                self._numbers[kind, name] = len(self.by_kind.setdefault(kind, []))
                self.by_kind[kind].append(name)


class Columns:
    """The files of one run's index. One thread appends, any may read; a line of steps commits the rows before it."""

    def __init__(self, directory: Path) -> None:
        """Open the index of a run in a directory, or make an empty one there.

        A damaged index is deleted and begun anew, as the archives have it all.
        """
        self.directory = directory
        self.names = NameTable()
        self.segments: list[Segment] = []
        self.num_rows = 0
        self._steps_size = 0
        self._kept: dict[str, np.ndarray] = {}
        with scratch_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            os.utime(directory)  # used now: see `IndexDirectory.place`
            try:
                self._load()
            except CorruptObjectError:
                self.clear()
            for name in (_ROWS, _TEXTS, _STEPS):
                (directory / name).touch()

    def clear(self) -> None:
        """Delete the files of the index, and begin an empty one."""
        for name in (_ROWS, _TEXTS, _STEPS):
            (self.directory / name).unlink(missing_ok=True)
        self.names, self.segments, self.num_rows, self._steps_size = NameTable(), [], 0, 0

    def _load(self) -> None:
        """Read the segments and names of the index; CorruptObjectError if it is damaged or of another format."""
        steps = self.directory / _STEPS
        if not steps.exists():
            self.clear()
            return
        committed = 0
        head, *lines = steps.read_bytes().splitlines(keepends=True) or [b""]
        if head != _head():
            raise CorruptObjectError("an index of another format", reason="INDEX_CORRUPT")
        for line in lines:
            if not line.endswith(b"\n"):
                break  # its writer was killed
            segment = Segment.parse(line)
            if segment.first != self.num_rows:
                raise CorruptObjectError("an index with a gap", reason="INDEX_CORRUPT")
            self.segments.append(segment)
            self.names.restore(segment.names)
            self.num_rows += segment.count
            committed += len(line)
        self._steps_size = len(head) + committed
        for name, size in ((_ROWS, ROW.itemsize), (_TEXTS, TEXT_BYTES)):
            path = self.directory / name
            # More is what a killed append has left, which the next one writes over.
            if (path.stat().st_size if path.exists() else 0) < self.num_rows * size:
                raise CorruptObjectError("an index that is cut off", reason="INDEX_CORRUPT")

    def append(self, *, step: int, revision: int, key: str, rows: np.ndarray, texts: bytes, problem: str = "") -> None:
        """Commit the rows of a header, with their packed texts and the names that are new.

        `key` is the header's; `problem` says why its archive could not be read, then there are no rows. What a failed
        append left, as on a full disk, is written over.
        """
        segment = Segment(
            step=step, revision=revision, key=key, first=self.num_rows, count=len(rows), names=dict(self.names.fresh),
            problem=problem,
        )  # fmt: skip
        line = segment.line() if self._steps_size else _head() + segment.line()
        with scratch_errors(self.directory):
            self._write(_ROWS, self.num_rows * ROW.itemsize, rows.tobytes())
            self._write(_TEXTS, self.num_rows * TEXT_BYTES, texts)
            # Last: this line commits the rows and texts before it.
            self._write(_STEPS, self._steps_size, line)
        self._steps_size += len(line)
        self.names.fresh = {}
        self.segments.append(segment)
        self.num_rows += len(rows)

    def _write(self, name: str, at: int, data: bytes) -> None:
        """Write bytes to a file of the index at an offset, where the committed ones end; what follows is cut off."""
        with (self.directory / name).open("r+b") as file:
            file.truncate(at)
            file.seek(at)
            file.write(data)

    def rows(self) -> np.ndarray:
        """Return every committed row as an array of `ROW`, a view of the file."""
        if not self.num_rows:
            return np.zeros(0, ROW)
        return np.memmap(self.directory / _ROWS, ROW, "r", shape=(self.num_rows,))

    def column(self, name: str) -> np.ndarray:
        """Return one field of every committed row, by its name in `ROW`, as a contiguous array that is kept."""
        kept, num_rows = self._kept.get(name), self.num_rows
        if kept is None or len(kept) != num_rows:
            # Another thread may have added rows since `num_rows` was read.
            kept = self._kept[name] = np.ascontiguousarray(self.rows()[name][:num_rows])
        return kept

    def texts(self, rows: Sequence[int]) -> Iterator[Texts]:
        """Yield the texts of the rows with these numbers, in their order."""
        with (self.directory / _TEXTS).open("rb") as file:
            for row in rows:
                file.seek(int(row) * TEXT_BYTES)
                data = file.read(TEXT_BYTES)
                ends = np.cumsum(TEXT_SIZES)
                yield Texts(*(_text(data[end - size : end]) for end, size in zip(ends, TEXT_SIZES, strict=True)))

    def containing(self, words: str, rows: np.ndarray) -> np.ndarray:
        """Return those of the ascending row numbers `rows` of which a kept text contains the words, ASCII letters in
        either case.

        All rows if there are no words.
        """
        wanted = _flat(words).encode(errors="replace").lower()
        if not (wanted and len(rows)):
            return rows
        ends = np.cumsum(TEXT_SIZES)
        found: list[int] = []
        with (self.directory / _TEXTS).open("rb") as file:
            for first in range(int(rows[0]), int(rows[-1]) + 1, _SCANNED_ROWS):
                file.seek(first * TEXT_BYTES)
                data = file.read(_SCANNED_ROWS * TEXT_BYTES).lower()
                at = data.find(wanted)
                while at >= 0:
                    row, place = divmod(at, TEXT_BYTES)
                    # Fields of full length touch each other: a hit must end in the field that it begins in.
                    if np.searchsorted(ends, place, "right") == np.searchsorted(ends, place + len(wanted) - 1, "right"):
                        found.append(first + row)
                        at = data.find(wanted, (row + 1) * TEXT_BYTES)
                    else:
                        at = data.find(wanted, at + 1)
        return np.intersect1d(rows, np.asarray(found, rows.dtype), assume_unique=True)


def packed(texts: Texts) -> bytes:
    """Encode texts as bytes of a fixed size, as `Columns.texts` reads them; each text is cut to its size."""
    return b"".join(_cut(text, size) for text, size in zip(texts, TEXT_SIZES, strict=True))


def number_or_none(value: Any) -> float | None:
    """Return a number of a column with the seven digits that a float32 has; None if it is not finite."""
    return float(f"{value:.7g}") if math.isfinite(value) else None


@dataclass(slots=True)
class IndexDirectory:
    """The directory with the indexes of one process: kept between starts, never shared by two processes."""

    directory: Path
    _lock: IO[str]

    @classmethod
    def open(cls, parent: Path) -> "IndexDirectory":
        """Return the first directory below `parent` that no other process has, created if needed and locked."""
        number = 0
        while True:
            directory = parent / f"{number:02d}"
            with scratch_errors(directory):
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # there are samples in it
                lock = (directory / _LOCK).open("w")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                number += 1
                continue
            return cls(directory, lock)

    def place(self, name: str, *, in_use: Collection[str] = ()) -> Path:
        """Return the directory of the index called `name` (a run's uid), after removing others if they are too many or
        too large.

        Those that were opened the longest ago are removed first, but none `in_use`.
        """
        wanted = self.directory / name
        others = [path for path in self.directory.iterdir() if path.is_dir() and path != wanted]
        others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
        used = 0
        for kept, path in enumerate(others, start=1):
            used += sum(file.stat().st_size for file in path.iterdir())
            if (kept >= MAX_RUNS or used > MAX_BYTES) and path.name not in in_use:
                remove(path, what="index of a run")
        return wanted

    def close(self) -> None:
        """Release the lock of the directory, so that another process may have it."""
        self._lock.close()


def _head() -> bytes:
    """Return the first line of the file of steps: the format of the index."""
    return json.dumps({"format": FORMAT, "row": ROW.itemsize, "text": TEXT_BYTES}).encode() + b"\n"


def _flat(text: str) -> str:
    """Return a text with every run of white space as one space."""
    return " ".join(text.split())


def _cut(text: str, size: int) -> bytes:
    """Return a text in exactly `size` bytes of UTF-8: cut, or filled with zeros."""
    data = _flat(text[: 4 * size]).encode(errors="replace")
    # A character that the cut divides is left out by `_text`.
    return data[:size].ljust(size, b"\0")


def _text(data: bytes) -> str:
    """Return the text in bytes of `_cut`."""
    return data.rstrip(b"\0").decode(errors="ignore")
