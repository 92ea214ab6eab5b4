"""The rows of a fine-tuning: their sources, and rows as conversations.

A row has `messages`, or `prompt` and `completion`, both text or both lists of messages. It may also have `tools` (or
`tool_defs`) and `chat_template_kwargs`, as objects or as JSON text. A preference pair has `chosen` and `rejected`
instead, and a `prompt` unless they are whole conversations.
"""

import hashlib
import itertools
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from millrace.config.sections.data import DataSourceConfig
from millrace.rollouts.types import TrainSample
from millrace.trainer.sft.readers import TOOLS, JsonRow, Place, Row, RowReader, without_nulls
from millrace.trainer.sft.rendering import BadRowError, Conversation, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one data set, subset or split, in order, and the place of each."""

    rows: list[Row]
    places: list[Place]

    def place(self, index: int) -> str:
        """Return in words where the row with this index is (file and line)."""
        return str(self.places[index])


def load_sources(
    config: DataSourceConfig, *, key: str = "data", most: int | None = None, is_paired: bool = False
) -> list[Source]:
    """Load the sources to mix: one for each subset or split, each with at least one row.

    Of each local file at most the first `most` rows are read; None: all. `key` is the table of `config`, for messages.
    With `is_paired` rows are preference pairs. Raises NotFoundError (DATA_NOT_FOUND) for data, a subset or a split that
    is missing, and InvalidSpecError (DATA_INVALID) with the place of a wrong row.
    """
    count = config.num_sources
    subsets: Sequence[str | None] = config.subsets or [None] * count
    splits: Sequence[str | None] = config.splits or [None] * count
    reader = RowReader(config.columns.model_dump(), key=key, is_paired=is_paired)
    sources = [
        _load_source(config, subset, split, reader=reader, most=most)
        for subset, split in zip(subsets, splits, strict=True)
    ]
    if most is None or sum(len(source.rows) for source in sources) < most:  # all rows were read
        reader.require_seen(config.name)
    return sources


def load_rows(
    config: DataSourceConfig, *, key: str = "data", most: int | None = None, is_paired: bool = False
) -> Source:
    """Load the rows of all sources into one, one after the other.

    Of each local file at most the first `most` rows are read; None: all. `key` is the table of `config`, for messages.
    With `is_paired` rows are preference pairs. Raises as `load_sources`.
    """
    return joined(load_sources(config, key=key, most=most, is_paired=is_paired))


def joined(sources: Sequence[Source]) -> Source:
    """Return one source with the rows of all, in their order."""
    return Source(
        rows=[row for source in sources for row in source.rows],
        places=[place for source in sources for place in source.places],
    )


def digest_rows(rows: Sequence[Row]) -> str:
    """Return the SHA-256 (hex) of rows in their order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def is_conversation(row: Row) -> bool:
    """Return whether a row has messages rather than texts; False for a row with neither."""
    return row.get("messages") is not None or any(
        isinstance(row.get(key), list) for key in ("prompt", "completion", "chosen")
    )


def conversation_of(row: Row) -> Conversation:
    """Return the row as a conversation; a text prompt and completion become a user's and an assistant's message.

    Keys of null in a row that is not from JSON are removed: tables have every key in every row, and fill in nulls.
    """
    row = row if isinstance(row, JsonRow) else without_nulls(row)
    if row.get("messages") is not None:
        messages = row["messages"]
    else:
        messages = [*_turn(row["prompt"], role="user"), *_turn(row["completion"], role="assistant")]
    return Conversation(
        messages=[_message(message) for message in messages],
        tools=next((tools for name in TOOLS if (tools := _decoded(row.get(name)))), None),
        template_arguments=_without_none(_decoded(row.get("chat_template_kwargs")) or {}),
    )


def sample_of(token_ids: Sequence[int], trained: Sequence[bool], *, length: int) -> TrainSample:
    """Return a sample of the first `length` tokens, with a cross-entropy weight of 1 on the `trained` ones.

    The first token has weight 0 in any case, because it has no log-prob.
    """
    weights = np.array(trained[:length], np.float32)
    weights[:1] = 0.0  # nothing precedes the first token, so it has no log-prob
    zeros = np.zeros(length, np.float32)
    return TrainSample(
        token_ids=np.array(token_ids[:length], np.int32),
        # No token was sampled by a policy, so that none is in the policy loss.
        loss_mask=np.zeros(length, np.uint8),
        inference_logprobs=zeros,
        advantages=zeros,
        ce_weights=weights,
        ordinal=0,
        member=0,
        attempt=0,
        env="sft",
        reward=0.0,
        temperature=1.0,
        min_version=0,
        max_version=0,
        lineage=0,
    )


def sides_of(row: Row) -> tuple[JsonRow, JsonRow]:
    """Return a preference pair as two rows with `prompt` and `completion`: the chosen one, and the rejected one.

    Without a `prompt` the messages with which both begin are the prompt. Raises BadRowError if there are none, if a
    response is empty or begins with the messages of `prompt` once more, or if both are the same.
    """
    sides = {name: row[name] for name in ("chosen", "rejected")}
    given = {name: value for name, value in row.items() if name not in sides}
    if row.get("prompt") is None:
        # The messages with which both begin.
        together = zip(sides["chosen"], sides["rejected"], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda both: both[0] == both[1], together))
        if not shared:
            raise BadRowError("`chosen` and `rejected` begin with no common message, and the row has no `prompt`")
        if sides["chosen"] == sides["rejected"]:
            raise BadRowError("`chosen` and `rejected` are the same")
        given["prompt"] = sides["chosen"][:shared]
        sides = {name: messages[shared:] for name, messages in sides.items()}
    for name, response in sides.items():
        if isinstance(row.get("prompt"), list) and row["prompt"] and response[: len(row["prompt"])] == row["prompt"]:
            raise BadRowError(f"`{name}` begins with the messages of `prompt` once more: leave one of the two out")
        if not _says_something(response):
            raise BadRowError(f"`{name}` is empty: it has no text or call of the assistant's")
    if sides["chosen"] == sides["rejected"]:
        raise BadRowError("`chosen` and `rejected` are the same")
    chosen, rejected = ({**given, "completion": response} for response in sides.values())
    return JsonRow(chosen), JsonRow(rejected)


def _says_something(response: Any) -> bool:
    """Return whether a response, text or messages, has a text or a call of the assistant's."""
    if isinstance(response, str):
        return bool(response.strip())
    own = [message for message in response if message.get("role") == "assistant"]
    return any(message.get(key) for message in own for key in ("content", "tool_calls", "reasoning_content"))


def num_prompt_messages(row: Row) -> int:
    """Return how many messages of `conversation_of(row)` are of the row's `prompt`."""
    return len(_turn(row["prompt"], role="user"))


def _turn(content: Any, *, role: str) -> list[Message]:
    """Return a prompt or completion as messages: text as one message of `role`, messages as they are."""
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _message(message: Message) -> Message:
    """Return a message as engines pass it to templates: with a content, without null keys and empty `tool_calls`."""
    given = {"content": ""} | _without_none(message)
    return given if given.get("tool_calls") != [] else {key: given[key] for key in given if key != "tool_calls"}


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table without keys whose value is null, which templates would treat as present."""
    return {key: value for key, value in table.items() if value is not None}


def _decoded(value: Any) -> Any:
    """Return the value of JSON text, None for an empty value, and other values as they are."""
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _load_source(
    config: DataSourceConfig, subset: str | None, split: str | None, *, reader: RowReader, most: int | None
) -> Source:
    """Load one subset or split of a local path or Hub dataset; raise NotFoundError if it is missing or empty.

    None is the whole of it. At most the first `most` rows of each local file are read; None: all.
    """
    if is_local(config.name):
        found = _read_local(config.name, reader, subset=subset, split=split, most=most)
    else:
        found = _read_hub(config.name, reader, subset=subset, split=split or config.split)
    source = Source([], [])
    for place, row in found:
        source.rows.append(row)
        source.places.append(place)
    if not source.rows:
        raise reader.missing(config.name, f"{_called(subset, split)} holds no rows")
    return source


def _called(subset: str | None, split: str | None) -> str:
    """Return words that name a subset and a split in messages."""
    names = [f"subset {subset!r}" if subset else "", f"split {split!r}" if split else ""]
    return ", ".join(filter(None, names)) or "it"


def _read_local(
    name: str, reader: RowReader, *, subset: str | None, split: str | None, most: int | None
) -> Iterator[tuple[Place, Row]]:
    """Yield the rows of local files with their places, at most `most` of each.

    Log warnings about the choice of files.
    """
    try:
        chosen = choose_files(name, subset=subset, split=split)
    except NoFilesError as error:
        raise reader.missing(name, str(error)) from error
    for note in chosen.notes:
        logger.warning(note)
    for file in chosen.files:
        rows = itertools.islice(reader.read(file), most)
        if (first := next(rows, None)) is not None:
            yield first
            yield from rows
        elif len(chosen.files) > 1:
            logger.warning(f"{file}: holds no rows")


def _read_hub(name: str, reader: RowReader, *, subset: str | None, split: str) -> Iterator[tuple[Place, Row]]:
    """Download a Hub dataset's subset and split with the package `datasets`, and yield its rows with their places.

    Raises NotFoundError if the package is not installed or cannot load them.
    """
    local = f"there is no file or directory {name} in {Path.cwd()}"
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise reader.missing(
            name, f"{local}, and a Hub dataset needs the package `datasets`, which is not installed"
        ) from error
    try:
        found = [dict(row) for row in load_dataset(name, subset, split=split)]
    except Exception as error:  # an edge to foreign code, which raises errors of its own, of HTTP and of its decoders
        why = f"{local}, and the Hub did not give {_called(subset, split)}: {str(error) or type(error).__name__}"
        raise reader.missing(name, why) from error
    for number, row in enumerate(found):
        yield (place := Place(f"{name}, {_called(subset, split)}, row ", number)), reader.take(row, place)


# The files below a local path that have the rows of a data set, of a subset or of a split.

_LINES, _PACKED, _TABLES = (".jsonl", ".ndjson", ".jsonlines", ".json"), ("", ".gz", ".zst"), (".parquet", ".arrow")
SUFFIXES = (*(line + packed for line in _LINES for packed in _PACKED), *_TABLES)
"""Ends of the names of files that are read in a directory; a file that the config names may have any name."""
_ENDS = f"{', '.join(_LINES)} (then {' or '.join(_PACKED[1:])}), {' or '.join(_TABLES)}"
_ABOUT = {"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"}
"""Files that the library `datasets` writes beside the data, which have no rows."""
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
    """No file has the rows; the message says what is missing, and what there is instead."""


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Files in the order in which they are read, and notes for the user about the choice."""

    files: list[Path]
    notes: list[str]


def is_local(name: str) -> bool:
    """Return whether the name of a dataset is a path rather than an id of the Hub (`owner/name`, also with dots)."""
    return is_there(name) or name.startswith((".", "/", "~")) or name.lower().endswith(SUFFIXES) or name.count("/") > 1


def is_there(name: str) -> bool:
    """Return whether a file or directory with this path exists; False for a path that is not valid."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, the home of nobody
        return False


def choose_files(name: str, *, subset: str | None, split: str | None) -> LocalFiles:
    """Choose the files of the path `name` that have a subset and a split; None: all.

    Raises NoFilesError if there are none.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file() and not (subset or split):
            return LocalFiles([path], [])
        return _choose(path, subset=subset, split=split)
    except (OSError, ValueError, RuntimeError) as error:
        raise NoFilesError(getattr(error, "strerror", None) or str(error)) from error


def _choose(path: Path, *, subset: str | None, split: str | None) -> LocalFiles:
    """Choose the files of a directory that have a subset and a split; raise NoFilesError if there are none."""
    _require_directory(path)
    if not (subset or split):
        return _all(path)
    if subset and split:
        _require_directory(path / subset)
        return LocalFiles(_named(path / subset, split), [])
    return LocalFiles(_named(path, subset or split or ""), [])


def _require_directory(path: Path) -> None:
    """Raise NoFilesError unless the path is a directory."""
    if not path.is_dir():
        raise NoFilesError(f"{path.absolute()} {_NOT_ONE[path.is_file(), path.exists()]}")


def _all(directory: Path) -> LocalFiles:
    """Return all data files below a directory, with sentences for the user; raise NoFilesError if there are none."""
    found = list(_below(directory))
    files = [file for file in found if _stem(file) is not None]
    others = [file.relative_to(directory).as_posix() for file in found if _stem(file) is None and not _is_about(file)]
    if not files:
        there = f"there are {_shown(others)}" if others else "it is empty"
        raise NoFilesError(f"{directory.absolute()} holds no rows, which end in {_ENDS}; {there}")
    return LocalFiles(files, list(_notes(directory, files, others)))


def _notes(directory: Path, files: list[Path], others: list[str]) -> Iterator[str]:
    """Yield sentences for the user: which files are not read, have equal names, or are read although held out.

    `files` are those that are read, and `others` the names of those that are not.
    """
    if others:
        yield f"{directory}: not read, because of what their names end in: {_shown(others)}"
    twice = [stem for stem, count in Counter(file.with_name(_stem(file) or "") for file in files).items() if count > 1]
    if twice:
        yield f"{directory}: several files are called {_shown([each.name for each in twice])}, and all are read"
    splits = {_split(part) for file in files for part in (*file.relative_to(directory).parts[:-1], _stem(file) or "")}
    if "train" in splits and (held_out := sorted(splits & _HELD_OUT)):
        yield f'{directory}: {", ".join(held_out)} is read beside train; `splits = ["train"]` leaves it out'


def _named(directory: Path, name: str) -> list[Path]:
    """Return the file called `name`, or else its shards, or else all data files below the directory of that name.

    Files and shards may also be in the subdirectory `data`. Raises NoFilesError if there are none, or several files of
    that name.
    """
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
    """Yield the files below a directory, sorted by path, without names that begin with a dot or an underscore.

    Without `is_deep` only the directory itself is read. Raises NoFilesError for a data file that is a broken link or no
    regular file, and for a table of Delta Lake.
    """
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
    """Return whether a directory is a link to one of its parents."""
    return entry.is_symlink() and any(os.path.samefile(entry, parent) for parent in entry.absolute().parents)


def _stem(file: Path) -> str | None:
    """Return the name without the suffix of a data file; None if it has no such suffix."""
    name = file.name
    end = max((suffix for suffix in SUFFIXES if name.lower().endswith(suffix)), key=len, default=None)
    return None if end is None or name in _ABOUT else name[: -len(end)]


def _split(stem: str) -> str:
    """Return a file's name without suffix and without its shard number ("train-00001-of-00002" → "train")."""
    return _SHARD.sub("", stem)


def _is_about(file: Path) -> bool:
    """Return whether a file describes the data, and so is not worth a warning."""
    return file.name in _ABOUT or file.name.partition(".")[0].lower() in _TEXTS or file.suffix in (".md", ".py")


def _shown(names: list[str]) -> str:
    """Return names as text for a message, shortened if there are many."""
    rest = len(names) - _MOST_NAMED
    return ", ".join(itertools.islice(names, _MOST_NAMED)) + (f" and {rest} others" if rest > 0 else "")
