"""The rows of a fine-tuning: reading and checking them, and which conversation each one is.

A row has `messages`, or `prompt` and `completion`, both text or both lists of messages. `tools`
(or `tool_defs`) and `chat_template_kwargs` may stand beside them, as they are or as JSON text.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.sections.sft import DataSourceConfig
from millrace.errors import InvalidSpecError, NotFoundError, Violation
from millrace.trainer.sft.rendering import Conversation, Message

Row = Mapping[str, Any]


class JsonRow(dict[str, Any]):
    """A row that its writer wrote as JSON: its nulls are meant, as in a schema's `"default": null`."""


_TOOLS = ("tools", "tool_defs")
"""Columns of tools, of which the first one that has any counts."""
_REMEDY = 'write lines like {"prompt": …, "completion": …} or {"messages": […]}'


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one file, subset or split, in order; `places[i]` is where row i stands: the file, then the line."""

    rows: list[Row]
    places: list[tuple[str, int]]

    def place(self, index: int) -> str:
        """Where a row stands, for people."""
        return "{}{}".format(*self.places[index])


def load_sources(config: DataSourceConfig) -> list[Source]:
    """The sources that are mixed: one for each subset or split, each with at least one row."""
    if not (config.subsets or config.splits):
        return [_load_source(config, subset=None, split=None)]
    count = config.num_sources
    subsets: Sequence[str | None] = config.subsets or [None] * count
    splits: Sequence[str | None] = config.splits or [None] * count
    return [_load_source(config, subset=subset, split=split) for subset, split in zip(subsets, splits, strict=True)]


def load_rows(config: DataSourceConfig) -> Source:
    """The rows of all sources, one source after the other."""
    sources = load_sources(config)
    return Source(
        rows=[row for source in sources for row in source.rows],
        places=[place for source in sources for place in source.places],
    )


def digest_rows(rows: Sequence[Row]) -> str:
    """SHA-256 (hex) of rows, in order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
    return digest.hexdigest()


def conversation_of(row: Row) -> Conversation:
    """The conversation of a row, whose texts are a user's and an assistant's message.

    A null in a row that was not written as JSON is no value: tables have every key in every row, and fill them in.
    """
    row = row if isinstance(row, JsonRow) else without_nulls(row)
    if row.get("messages") is not None:
        messages = row["messages"]
    else:
        messages = [*_turn(row["prompt"], role="user"), *_turn(row["completion"], role="assistant")]
    return Conversation(
        messages=[_without_none(message) for message in messages],
        tools=next((tools for name in _TOOLS if (tools := _decoded(row.get(name)))), None),
        template_arguments=_without_none(_decoded(row.get("chat_template_kwargs")) or {}),
    )


def _turn(content: Any, *, role: str) -> list[Message]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def without_nulls(value: Any) -> Any:
    """A value without the keys that have none, at every depth; an item of a list that is null stays."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value: to templates, a message's key without one is there."""
    return {key: value for key, value in table.items() if value is not None}


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _load_source(config: DataSourceConfig, *, subset: str | None, split: str | None) -> Source:
    """One subset or split of a local path or a Hub data set; NotFoundError says what is not there."""
    path = Path(config.name).expanduser()
    is_local = path.is_absolute() or bool(path.suffix) or config.name.count("/") > 1
    if path.exists() or is_local:
        source = _read_files(config.name, _files(config.name, path, subset=subset, split=split))
    else:
        source = _load_hub(config.name, subset=subset, split=split or config.split)
    if not source.rows:
        raise _not_found(config.name, f"{_called(subset, split)} holds no rows")
    return source


def _called(subset: str | None, split: str | None) -> str:
    names = [f"subset {subset!r}" if subset else "", f"split {split!r}" if split else ""]
    return ", ".join(filter(None, names)) or "it"


def _files(name: str, path: Path, *, subset: str | None, split: str | None) -> list[Path]:
    """The JSONL files of a subset and a split below a local path."""
    if path.is_file() and not (subset or split):
        return [path]
    if subset and not split and (path / f"{subset}.jsonl").is_file():
        return [path / f"{subset}.jsonl"]
    directory = path / subset if subset else path
    if not directory.is_dir():
        raise _not_found(name, f"{directory.resolve()} {'is no directory' if directory.exists() else 'does not exist'}")
    if not split:
        return sorted(directory.glob("*.jsonl"))
    if not (directory / f"{split}.jsonl").is_file():
        raise _not_found(name, f"{(directory / f'{split}.jsonl').resolve()} does not exist")
    return [directory / f"{split}.jsonl"]


def _read_files(name: str, files: Sequence[Path]) -> Source:
    source = Source([], [])
    for file in files:
        for number, row in _read_jsonl(file):
            source.rows.append(row)
            source.places.append((f"{file}:", number))
    return source


def _read_jsonl(path: Path) -> Iterator[tuple[int, Row]]:
    """The rows of one file with their line numbers; InvalidSpecError names the line that is wrong."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                _check_row(row)
            except ValueError as error:
                violation = Violation(
                    field="data.name", value=line.strip()[:80], message=str(error), source=f"{path}:{number}"
                )
                raise InvalidSpecError([violation], remedy=_REMEDY) from error
            yield number, JsonRow(row)


_RESERVED = {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message"} | {
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
}
"""Arguments of `apply_chat_template` that a row's `chat_template_kwargs` may not set."""


def _check_row(row: Any) -> None:
    """ValueError unless the row has what a row has, each of its kind."""
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    if row.get("messages") is not None:
        kinds = {type(row["messages"])}
        if kinds != {list}:
            raise ValueError("has `messages` that are no list")
    else:
        kinds = {type(row.get(name)) for name in ("prompt", "completion")}
        if kinds not in ({str}, {list}):
            raise ValueError("needs `messages`, or `prompt` and `completion`, both text or both lists of messages")
    if kinds == {list}:
        for name in ("prompt", "completion") if row.get("messages") is None else ("messages",):
            for index, message in enumerate(row[name]):
                if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                    raise ValueError(f"`{name}[{index}]` is no message: it needs a `role`")
    for name, kind, words in (
        *((name, list, "a list of tools") for name in _TOOLS),
        ("chat_template_kwargs", dict, "an object"),
    ):
        try:
            value = _decoded(row.get(name))
        except ValueError as error:
            raise ValueError(f"`{name}` is text that is no JSON: {error}") from error
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"`{name}` must be {words}, or one as JSON text")
        if isinstance(value, dict) and (taken := sorted(value.keys() & _RESERVED)):
            raise ValueError(f"`{name}` may not set `{taken[0]}`: Millrace sets it")


def _load_hub(name: str, *, subset: str | None, split: str) -> Source:
    """The rows of a Hub data set's subset and split, read with `datasets` if that is installed."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise _not_found(
            name, "it is no local file, and a Hub dataset needs the package `datasets`, which is not installed"
        ) from error
    try:
        rows: list[Row] = [dict(row) for row in load_dataset(name, subset, split=split)]
    except (OSError, ValueError) as error:
        raise _not_found(name, f"the Hub did not give {_called(subset, split)}: {error}") from error
    place = f"{name}, {_called(subset, split)}, row "
    for number, row in enumerate(rows):
        try:
            _check_row(row)
        except ValueError as error:
            violation = Violation(field="data.name", value=str(row)[:80], message=str(error), source=f"{place}{number}")
            raise InvalidSpecError([violation], remedy=_REMEDY) from error
    return Source(rows, [(place, number) for number in range(len(rows))])


def _not_found(name: str, problem: str) -> NotFoundError:
    return NotFoundError(
        f"data {name!r} cannot be read: {problem}",
        reason="DATA_NOT_FOUND",
        remedy="set data.name to a JSONL file, a directory of JSONL files, or the id of a Hub dataset, "
        "and data.subsets and data.splits to what it has",
        metadata={"data": name},
    )
