"""The rows of a fine-tuning: where they come from, and which conversation each one is.

A row has `messages`, or `prompt` and `completion`, both text or both lists of messages. `tools`
(or `tool_defs`) and `chat_template_kwargs` may stand beside them, as they are or as JSON text.
"""

import hashlib
import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.config.sections.sft import DataSourceConfig
from millrace.trainer.sft.columns import TOOLS, JsonRow, Row, without_nulls
from millrace.trainer.sft.local_files import NoFilesError, choose_files, is_local
from millrace.trainer.sft.readers import Place, RowReader
from millrace.trainer.sft.rendering import Conversation, Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one data set, subset or split, in order, and the place of each."""

    rows: list[Row]
    places: list[Place]

    def place(self, index: int) -> str:
        """Where a row stands, for people."""
        return str(self.places[index])


def load_sources(config: DataSourceConfig, *, key: str = "data", most: int | None = None) -> list[Source]:
    """The sources that are mixed: one for each subset or split, each with at least one row.

    Of each local file at most the first `most` rows are read. `key` is the table of `config`, for messages.
    NotFoundError (DATA_NOT_FOUND) and InvalidSpecError (DATA_INVALID) say what is not there, or wrong, and where.
    """
    count = config.num_sources
    subsets: Sequence[str | None] = config.subsets or [None] * count
    splits: Sequence[str | None] = config.splits or [None] * count
    reader = RowReader(config.columns.model_dump(), key=key)
    sources = [
        _load_source(config, subset, split, reader=reader, most=most)
        for subset, split in zip(subsets, splits, strict=True)
    ]
    if most is None or sum(len(source.rows) for source in sources) < most:  # all rows were read
        reader.require_seen(config.name)
    return sources


def load_rows(config: DataSourceConfig, *, key: str = "data", most: int | None = None) -> Source:
    """Return the rows of all sources, one source after the other; `most` as in `load_sources`."""
    return joined(load_sources(config, key=key, most=most))


def joined(sources: Sequence[Source]) -> Source:
    """Return the rows of sources as those of one, in their order."""
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


def is_conversation(row: Row) -> bool:
    """Whether a row has messages rather than texts; what is neither is refused when it is encoded."""
    return row.get("messages") is not None or any(isinstance(row.get(key), list) for key in ("prompt", "completion"))


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
        messages=[_message(message) for message in messages],
        tools=next((tools for name in TOOLS if (tools := _decoded(row.get(name)))), None),
        template_arguments=_without_none(_decoded(row.get("chat_template_kwargs")) or {}),
    )


def _turn(content: Any, *, role: str) -> list[Message]:
    return [{"role": role, "content": content}] if isinstance(content, str) else content


def _message(message: Message) -> Message:
    """A message as engines give it to templates: with a content, and without keys that have no value."""
    given = {"content": ""} | _without_none(message)
    return given if given.get("tool_calls") != [] else {key: given[key] for key in given if key != "tool_calls"}


def _without_none(table: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that have a value: to templates, a message's key without one is there."""
    return {key: value for key, value in table.items() if value is not None}


def _decoded(value: Any) -> Any:
    return json.loads(value) if isinstance(value, str) and value.strip() else value or None


def _load_source(
    config: DataSourceConfig, subset: str | None, split: str | None, *, reader: RowReader, most: int | None
) -> Source:
    """One subset or split of a local path or a Hub data set; NotFoundError says what is not there."""
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
    names = [f"subset {subset!r}" if subset else "", f"split {split!r}" if split else ""]
    return ", ".join(filter(None, names)) or "it"


def _read_local(
    name: str, reader: RowReader, *, subset: str | None, split: str | None, most: int | None
) -> Iterator[tuple[Place, Row]]:
    """The rows of local files, of each at most `most`."""
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
    """The rows of a Hub data set's subset and split, read with `datasets` if that is installed."""
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
