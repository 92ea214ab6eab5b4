"""Which files below a local path hold the rows of a data set, of a subset or of a split."""

import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LINES, _PACKED, _TABLES = (".jsonl", ".ndjson", ".jsonlines", ".json"), ("", ".gz", ".zst"), (".parquet", ".arrow")
SUFFIXES = (*(line + packed for line in _LINES for packed in _PACKED), *_TABLES)
"""Ends of the names of files that are read in a directory; one that is named itself may have any name."""
_ENDS = f"{', '.join(_LINES)} (then {' or '.join(_PACKED[1:])}), {' or '.join(_TABLES)}"
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files of the library `datasets` beside the data."""
_TEXTS = {"readme", "license", "notice", "changelog", "citation"}
_SHARD = re.compile(r"-\d+(-of-\d+)?$")
_HELD_OUT = {"test", "validation", "valid", "val", "dev", "eval", "evaluation", "heldout"}
_NOT_ONE = {
    (True, True): "is no directory",
    (False, True): "is neither a file nor a directory",
    (False, False): "does not exist",
}
_MOST_NAMED = 5


class NoFilesError(Exception):
    """There is nothing to read; the message says what is missing, and what there is instead."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files in the order in which they are read, and what the user should know about the choice."""

    files: list[Path]
    notes: list[str]


def is_local(name: str) -> bool:
    """Whether the name of a data set means a path rather than an id of the Hub (`owner/name`, dots and all)."""
    return is_there(name) or name.startswith((".", "/", "~")) or name.lower().endswith(SUFFIXES) or name.count("/") > 1


def is_there(name: str) -> bool:
    """Whether there is such a path."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, the home of nobody
        return False


def choose_files(name: str, *, subset: str | None, split: str | None) -> LocalFiles:
    """The files of a subset and a split, or all of them; NoFilesError if there are none."""
    try:
        path = Path(name).expanduser()
        if path.is_file() and not (subset or split):
            return LocalFiles([path], [])
        return _choose(path, subset=subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoFilesError(getattr(error, "strerror", None) or str(error)) from error


def _choose(path: Path, *, subset: str | None, split: str | None) -> LocalFiles:
    _require_directory(path)
    if not (subset or split):
        return _all(path)
    if subset and split:
        _require_directory(path / subset)
        return LocalFiles(_named(path / subset, split), [])
    return LocalFiles(_named(path, subset or split or ""), [])


def _require_directory(path: Path) -> None:
    if not path.is_dir():
        raise NoFilesError(f"{path.absolute()} {_NOT_ONE[path.is_file(), path.exists()]}")


def _all(directory: Path) -> LocalFiles:
    """All files below a directory."""
    found = list(_below(directory))
    files = [file for file in found if _stem(file) is not None]
    others = [file.relative_to(directory).as_posix() for file in found if _stem(file) is None and not _is_about(file)]
    if not files:
        there = f"there are {_shown(others)}" if others else "it is empty"
        raise NoFilesError(f"{directory.absolute()} holds no rows, which end in {_ENDS}; {there}")
    return LocalFiles(files, list(_notes(directory, files, others)))


def _notes(directory: Path, files: list[Path], others: list[str]) -> Iterator[str]:
    if others:
        yield f"{directory}: not read, because of what their names end in: {_shown(others)}"
    twice = [stem for stem, count in Counter(file.with_name(_stem(file) or "") for file in files).items() if count > 1]
    if twice:
        yield f"{directory}: several files are called {_shown([each.name for each in twice])}, and all are read"
    splits = {_split(part) for file in files for part in (*file.relative_to(directory).parts[:-1], _stem(file) or "")}
    if "train" in splits and (held_out := sorted(splits & _HELD_OUT)):
        yield f'{directory}: {", ".join(held_out)} is read beside train; `splits = ["train"]` leaves it out'


def _named(directory: Path, name: str) -> list[Path]:
    """The files called `name`, or its shards, or else those below the directory of that name."""
    found = [file for file in _below(directory, is_deep=False) if _stem(file) is not None]
    if (directory / "data").is_dir():
        found += [file for file in _below(directory / "data", is_deep=False) if _stem(file) is not None]
    whole = [file for file in found if _stem(file) == name]
    if len(whole) > 1:
        raise NoFilesError(f"{directory.absolute()} has several files called {name}: {_shown([f.name for f in whole])}")
    if files := whole or [file for file in found if _split(_stem(file) or "") == name]:
        return files
    if (directory / name).is_dir():
        return _all(directory / name).files
    there = sorted({_split(_stem(file) or "") for file in found})
    hint = f"; there are {_shown(there)}" if there else ""
    raise NoFilesError(f"{(directory / name).absolute()} does not exist, nor {name}.jsonl or the like{hint}")


def _below(directory: Path, *, is_deep: bool = True) -> Iterator[Path]:
    """The files of a directory, sorted by their paths; what begins with a dot or an underscore is left out."""
    if (directory / "_delta_log").is_dir():
        raise NoFilesError(
            f"{directory.absolute()} is a table of Delta Lake, whose files hold rows that are deleted, too: export it"
        )
    for entry in sorted(directory.iterdir(), key=lambda entry: entry.name):
        if entry.name.startswith((".", "_")):
            continue
        if not entry.exists() and _stem(entry) is not None:
            raise NoFilesError(f"{entry.absolute()} is a link to nothing")
        if entry.is_file():
            yield entry
        elif not entry.is_dir() and _stem(entry) is not None:
            raise NoFilesError(f"{entry.absolute()} {_NOT_ONE[False, True]}")
        elif is_deep and entry.is_dir() and not _is_above(entry):
            yield from _below(entry)


def _is_above(entry: Path) -> bool:
    """Whether a directory is a link to one that it lies in."""
    return entry.is_symlink() and any(os.path.samefile(entry, parent) for parent in entry.absolute().parents)


def _stem(file: Path) -> str | None:
    """The name without the end that says that it holds rows; None if it has none."""
    name = file.name
    end = max((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), key=len, default=None)
    return None if end is None or name in _ABOUT else name[: -len(end)]


def _split(stem: str) -> str:
    """A name without the number of its shard."""
    return _SHARD.sub("", stem)


def _is_about(file: Path) -> bool:
    return file.name in _ABOUT or file.name.partition(".")[0].lower() in _TEXTS or file.suffix in (".md", ".py")


def _shown(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(itertools.islice(names, _MOST_NAMED)) + (f" and {rest} others" if rest > 0 else "")
