"""The rows of one file: JSON Lines or one JSON array, plain or packed with gzip or zstd, Parquet, or Arrow.

The first bytes of a file decide its format. A file that cannot be read to its end is refused, with the place and a
remedy.
"""

import collections
import datetime
import importlib
import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

from millrace.decoding import MAX_JSON_BYTES, decode_json, unpacked
from millrace.errors import CorruptObjectError, InvalidSpecError, InvalidStateError, NotFoundError, Violation

_REASON = "DATA_INVALID"
_MOST_ARRAY_BYTES = 1 << 30
_BATCH_ROWS = 256
_SHOWN = 80  # characters of a row in a message
_BLANK = b" \t\r\n"
_BOM = b"\xef\xbb\xbf"
_PARQUET, _ARROW, _ARROW_STREAM = b"PAR1", b"ARROW1", b"\xff\xff\xff\xff"
_TABLES = (_PARQUET, _ARROW, _ARROW_STREAM)
_ROW = 'write lines like {"prompt": …, "completion": …} or {"messages": […]}'
_PAIR = _ROW.partition('"completion"')[0] + '"chosen": …, "rejected": …}'
_ONE_A_LINE = "write each row in one line (jq -c . FILE > rows.jsonl), or all rows in one JSON array"
_PLAIN_JSON = "write what every reader of JSON takes: null for NaN, each key once, numbers of at most 4,000 digits"
_AGAIN = "fetch or write the file once more; no row of it is taken"
_UTF = "write it as UTF-8: iconv -f UTF-{} -t UTF-8 FILE > rows.jsonl"
_TABLE = "write its rows as JSON Lines or as Parquet"
_FOREIGN: Mapping[bytes, tuple[str, str]] = {
    b"PK\x03\x04": ("is a zip archive", "unpack it, and name the file with the rows"),
    b"BZh": ("is packed with bzip2", "pack it with gzip: bzcat FILE | gzip > rows.jsonl.gz"),
    b"\xfd7zXZ": ("is packed with xz", "pack it with gzip: xzcat FILE | gzip > rows.jsonl.gz"),
    b"\x04\x22\x4d\x18": ("is packed with lz4", "pack it with gzip: lz4cat FILE | gzip > rows.jsonl.gz"),
    b"version https://git-lfs": ("is a pointer of Git LFS instead of the data", "fetch the data: git lfs pull"),
    **dict.fromkeys((b"\xff\xfe\0\0", b"\0\0\xfe\xff"), ("is UTF-32 text", _UTF.format("32"))),
    **dict.fromkeys((b"{\0\0\0", b"[\0\0\0"), ("is UTF-32 text", _UTF.format("32LE"))),
    **dict.fromkeys((b"\0\0\0{", b"\0\0\0["), ("is UTF-32 text", _UTF.format("32BE"))),
    **dict.fromkeys((b"\xff\xfe", b"\xfe\xff"), ("is UTF-16 text", _UTF.format("16"))),
    **dict.fromkeys((b"{\0", b"[\0"), ("is UTF-16 text", _UTF.format("16LE"))),
    **dict.fromkeys((b"\0{", b"\0["), ("is UTF-16 text", _UTF.format("16BE"))),
    b"SQLite format 3": ("is an SQLite database", _TABLE),
    b"\x80\x04": ("is a pickle", _TABLE),
}
"""First bytes of files that are not supported: what they are, and the remedy. The first match counts."""
# Possessive, so that a string that never ends is not tried again from each of its characters.
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[][{},]', re.DOTALL)
_LONGEST_SIGN = max(map(len, _FOREIGN))


class Place(NamedTuple):
    """The place of a row: `file` is the path with the text before the number, `number` the line or row."""

    file: str
    number: int

    def __str__(self) -> str:
        return f"{self.file}{self.number}"


# The columns of a row, each converted to the one form that the rest of fine-tuning uses.
#
# Tables and exports write the same conversation in several forms: a list as JSON text, a list of objects as an object
# of lists (Arrow's form of a sequence of structs), every key in every row with null for missing values.

Row = Mapping[str, Any]


class JsonRow(dict[str, Any]):
    """A row whose nulls are values, as in a schema's `"default": null`; in tables null may also be a missing key."""


TOOLS = ("tools", "tool_defs")
"""Columns of tools; the first one that is not empty counts."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
COLUMNS = ("messages", "prompt", "completion", *TOOLS, TEMPLATE_ARGUMENTS)
PAIR_COLUMNS = ("prompt", "chosen", "rejected", *COLUMNS[3:])
"""Columns that are read, and those of preference pairs; a row may have any others."""

_RESERVED = {
    "conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message", "return_dict",
    "return_tensors", "return_assistant_tokens_mask", "padding", "truncation", "max_length",
}  # fmt: skip
"""Arguments of `apply_chat_template` that a row's `chat_template_kwargs` may not set."""
_KINDS = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
_PLAIN = (str, bool, int, float, type(None))
_MOST_NAMED = 12


class WrongColumnsError(ValueError):
    """A row without the columns that make a conversation; renaming some may help."""


def take_row(found: Any, columns: Mapping[str, str]) -> JsonRow:
    """Return the known columns of a row of data, checked and in one form, by our names.

    `columns` maps each of `COLUMNS`, or of `PAIR_COLUMNS` for a pair, to its name in the data. `messages` take
    precedence over `prompt` and `completion`. Raises ValueError with what is wrong with the row.
    """
    if not isinstance(found, dict):
        raise ValueError(f"is {_kind(found)} instead of a JSON object")
    row = {name: value for name in columns if (value := found.get(columns[name])) is not None}
    if "chosen" in columns:  # the data are preference pairs
        row |= _pair(row, found)
    elif "messages" in row:
        row = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        row["messages"] = _messages(row["messages"], name="messages")
    elif not {"prompt", "completion"} <= row.keys():
        raise WrongColumnsError(f"{wanted(columns)}; {_it_has(found)}")
    elif not all(isinstance(row[name], str) for name in ("prompt", "completion")):
        _require_lists(row, ("prompt", "completion"), COLUMNS)
        row |= {name: _messages(row[name], name=name) for name in ("prompt", "completion")}
    for name in TOOLS:
        if name in row:
            row[name] = _tools(row[name], name=name)
    if TEMPLATE_ARGUMENTS in row:
        row[TEMPLATE_ARGUMENTS] = _template_arguments(row[TEMPLATE_ARGUMENTS])
    return JsonRow(row)


def _pair(row: Row, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return messages of a pair in one form, {} for text; raise ValueError if wrong. `row` is `found` by our names."""
    there = [name for name in ("prompt", "chosen", "rejected") if name in row]
    if not {"chosen", "rejected"} <= set(there):
        raise WrongColumnsError(f"{wanted(PAIR_COLUMNS)}; {_it_has(found)}")
    if "prompt" in there and all(isinstance(row[name], str) for name in there):
        return {}
    _require_lists(row, there, PAIR_COLUMNS)
    return {name: _messages(row[name], name=name) for name in there}


def wanted(columns: Iterable[str] = COLUMNS) -> str:
    """Return words for a message: which columns a row needs; a preference pair if `columns` has `chosen`."""
    if "chosen" in columns:
        return "needs `prompt`, `chosen` and `rejected`, all text or all messages, or two whole conversations"
    return "needs `messages`, or `prompt` and `completion`, both text or both lists of messages"


def require_columns(names: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise WrongColumnsError unless a table's columns `names` have those that make a conversation, each once.

    `columns` maps each of `COLUMNS`, or of `PAIR_COLUMNS`, to its name in the data.
    """
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongColumnsError(f"has several columns called {named(twice)}")
    there = {name for name in columns if columns[name] in names}
    if not ("messages" in there or {"prompt", "completion"} <= there or {"chosen", "rejected"} <= there):
        raise WrongColumnsError(f"{wanted(columns)}; it has {named(names)}")


def plain(value: Any, *, name: str) -> Any:
    """Return a table's value in JSON types: dates as text, and without keys whose value is null, which tables fill in.

    Raises ValueError for values that JSON lacks: bytes, numbers that are not finite. `name` is the value's, for
    messages.
    """
    if isinstance(value, dict):
        if odd := next((key for key in value if not isinstance(key, str)), None):
            raise ValueError(f"`{name}` has a key that is no text: {odd!r}")
        return {key: plain(each, name=f"{name}.{key}") for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [plain(each, name=f"{name}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if not isinstance(value, _PLAIN) or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(
            f"`{name}` is {str(value)[:40]!r} ({type(value).__name__}), and must be text, a number, true, false or null"
        )
    return value


def without_nulls(value: Any) -> Any:
    """Return a copy of the value without keys whose value is null, at every depth; null items of lists stay."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def named(names: Sequence[str]) -> str:
    """Return names of columns as text for a message, shortened if there are many."""
    shown = ", ".join(f"`{name[:40]}`" for name in names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else shown or "no columns"


def _it_has(found: Mapping[str, Any]) -> str:
    """Return words for a message: which columns a row has, and which of these are null."""
    empty = [name for name, value in found.items() if value is None]
    there = f"it has {named([name for name in found if name not in empty])}"
    return f"{there}; null are {named(empty)}" if empty else there


def _kind(value: Any) -> str:
    """Return words for the type of a JSON value ("a list")."""
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _require_lists(row: Row, names: Iterable[str], columns: Iterable[str]) -> None:
    """Raise ValueError unless columns of a row, `names`, are all lists (or objects of lists) of messages.

    `columns` says for the error whether the row is a pair, as in `wanted`.
    """
    kinds = {name: _kind(row[name]) for name in names}
    if not all(isinstance(row[name], list | dict) for name in kinds):
        raise ValueError(f"{wanted(columns)}; " + ", ".join(f"`{name}` is {kind}" for name, kind in kinds.items()))


def _messages(value: Any, *, name: str) -> list[Mapping[str, Any]]:
    """Return the messages in a column's value, parsed and checked; raise ValueError if it is not a list of messages.

    `name` is the column's, for messages of errors.
    """
    messages = _records(_parsed(value, name=name), key="role")
    if not isinstance(messages, list):
        raise ValueError(f"has `{name}` that are no list: it is {_kind(messages)}")
    return [_message(message, name=f"{name}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, *, name: str) -> Mapping[str, Any]:
    """Return a message, checked, with parts of content and tool calls as lists of objects.

    Tables may have these as an object of lists, and tool calls as JSON text. Text as content, and the arguments of
    calls, stay as they are. Raises ValueError if the message is malformed; `name` is what the error calls it.
    """
    if not isinstance(message, dict):
        raise ValueError(f"`{name}` is no message: it is {_kind(message)}, and needs a `role`")
    if not isinstance(message.get("role"), str):
        keys = named([str(key) for key in message])
        hint = "; write `role` and `content` for `from` and `value`" if {"from", "value"} <= message.keys() else ""
        raise ValueError(f"`{name}` is no message: it needs a `role`, and has {keys}{hint}")
    content = _records(message.get("content"), key="type")
    if content is not None and not isinstance(content, str | list):
        raise ValueError(f"`{name}.content` is {_kind(content)}, and must be text or a list of parts")
    taken = {**message, "content": content} if "content" in message else message
    if not message.get("tool_calls"):
        return taken
    return {**taken, "tool_calls": _tool_calls(message["tool_calls"], name=f"{name}.tool_calls")}


def _tool_calls(value: Any, *, name: str) -> list[Any]:
    """Return the tool calls of a message as a list of objects; raise ValueError if they are malformed."""
    calls = _records(_parsed(value, name=name), key="function")
    if not isinstance(calls, list):
        raise ValueError(f"`{name}` must be a list of calls, and is {_kind(calls)}")
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function", {}), dict):
            raise ValueError(f"`{name}[{index}]` is no call: it must be an object, and its `function` one, too")
    return calls


def _tools(value: Any, *, name: str) -> list[Any] | None:
    """Return the tools of a row as a list of objects, None if there are none.

    Raise ValueError if they are malformed.
    """
    tools = _records(_parsed(value, name=name), key="function")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`{name}` must be a list of tools, or one as JSON text, and is {_kind(tools)}")
    tools = [_parsed(tool, name=f"{name}[{index}]") for index, tool in enumerate(tools or [])]
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"`{name}[{index}]` must be an object, and is {_kind(tool)}")
    return tools or None


def _template_arguments(value: Any) -> Mapping[str, Any] | None:
    """Return a row's arguments for the chat template, None if there are none.

    Raises ValueError if they are no object, or set an argument that Millrace sets.
    """
    arguments = _parsed(value, name=TEMPLATE_ARGUMENTS)
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"`{TEMPLATE_ARGUMENTS}` must be an object, or one as JSON text, and is {_kind(arguments)}")
    if taken := sorted((arguments or {}).keys() & _RESERVED):
        raise ValueError(f"`{TEMPLATE_ARGUMENTS}` may not set `{taken[0]}`: Millrace sets it")
    return arguments or None


def _parsed(value: Any, *, name: str) -> Any:
    """Return what JSON text says, None for blank text, and any value that is not text as it is.

    Raises ValueError for text that is not JSON; `name` is the value's, for messages.
    """
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return decode_json(value, what=f"`{name}`", reason="DATA_INVALID")
    except CorruptObjectError as error:
        raise ValueError(f"`{name}` is text that is no JSON: {error.__cause__ or error.message}") from error


def _records(value: Any, *, key: str) -> Any:
    """Return an object of equally long lists, one of them under `key`, as a list of objects; other values as they are.

    Raises ValueError if the lists differ in length.
    """
    if not isinstance(value, dict) or not isinstance(value.get(key), list):
        return value
    columns = {name: column for name, column in value.items() if column is not None}
    lengths = {name: len(column) if isinstance(column, list) else None for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"an object of lists has lists of different lengths: {lengths}")
    rows = zip(*columns.values(), strict=True)
    return [{name: each for name, each in zip(columns, row, strict=True) if each is not None} for row in rows]


class RowReader:
    """Reads the rows of files; `columns` maps our names of columns to the data's, `key` is the config's table."""

    def __init__(self, columns: Mapping[str, str], *, key: str = "data", is_paired: bool = False) -> None:
        """Read rows whose column `columns[NAME]` is our column NAME; unnamed ones have our names.

        `key` is the name of the config's table, for messages. With `is_paired` every row is a preference pair.
        """
        self._columns = {name: columns.get(name, name) for name in (PAIR_COLUMNS if is_paired else COLUMNS)}
        self._names = set(self._columns.values())
        self._unseen = {name: column for name, column in self._columns.items() if name != column}
        self._key = key

    def read(self, path: Path) -> Iterator[tuple[Place, Row]]:
        """Yield the rows of a file, checked and in one form, each with its place.

        Raises InvalidSpecError with fault, place and remedy.
        """
        try:
            with path.open("rb") as file:
                begin = file.read(_LONGEST_SIGN)
                file.seek(0)
                self._refuse_foreign(path, begin)
                if not begin and path.suffix.lower() in (".gz", ".zst"):
                    self.refuse("has no bytes, and a packed file has some", source=str(path), remedy=_AGAIN)
                if begin.startswith(_TABLES) or path.suffix.lower() == ".parquet":
                    yield from self._table_rows(path, begin)
                else:
                    yield from self._json_rows(path, unpacked(file, what=str(path), reason=_REASON))
        except OSError as error:
            self.refuse(f"cannot be read: {error.strerror or error}", source=str(path), remedy=_AGAIN)

    def take(self, found: Any, place: Place, *, is_json: bool = False) -> Row:
        """Return the known columns of a row, checked and in one form; raise InvalidSpecError if the row is malformed.

        `place` says where it is, for the error. Without `is_json` the row is of a table, whose values are converted to
        JSON types.
        """
        if self._unseen and isinstance(found, Mapping):
            self._unseen = {name: column for name, column in self._unseen.items() if column not in found}
        try:
            if not is_json:
                found = {name: plain(each, name=name) if name in self._names else each for name, each in found.items()}
            return take_row(found, self._columns)
        except WrongColumnsError as error:
            self._refuse_columns(error, list(found), source=str(place), value=found)
        except ValueError as error:
            self.refuse(str(error), source=str(place), value=found)

    def require_seen(self, source: str) -> None:
        """Raise InvalidSpecError if the config names a column that no row taken so far has; `source` names the data."""
        if self._unseen:
            self._refuse_names(self._unseen, "has rows", source=source)

    def missing(self, name: str, problem: str) -> NotFoundError:
        """Make the error for data `name` that cannot be found; `problem` says what is missing."""
        return NotFoundError(
            f"data {name!r} cannot be read: {problem}",
            reason="DATA_NOT_FOUND",
            remedy=f"set {self._key}.name to a JSONL or Parquet file, a directory of such files, or the id of a Hub "
            f"dataset, and {self._key}.subsets and {self._key}.splits to what it has",
            metadata={"data": name},
        )

    def refuse(self, message: str, *, source: str, value: Any = None, remedy: str = _ROW) -> NoReturn:
        """Raise InvalidSpecError for a row or a file: `message` says what is wrong, `source` where it is.

        The error shows the beginning of `value`, unless it is None.
        """
        text = None if value is None else str(value).strip()[:_SHOWN]
        violation = Violation(field=f"{self._key}.name", value=text, message=message, source=source)
        raise InvalidSpecError([violation], reason=_REASON, remedy=remedy)

    def _refuse_columns(
        self, error: WrongColumnsError, names: Sequence[str], *, source: str, value: Any = None
    ) -> NoReturn:
        """Raise InvalidSpecError for a row or table whose columns `names` make no conversation, with a remedy."""
        mapped = {name: column for name, column in self._columns.items() if name != column and column not in names}
        if mapped:
            self._refuse_names(mapped, f"it has {named(names)}", source=source, value=value)
        others = [name for name in names if name not in self._columns]
        remedy = _PAIR if "chosen" in self._columns else _ROW
        name = next((name for name in ("messages", "prompt", "completion") if name not in names), None)
        if name and others and remedy == _ROW:
            remedy += f", or say what a column is called there: {self._key}.columns.{name} = {json.dumps(others[0])}"
        self.refuse(str(error), source=source, value=value, remedy=remedy)

    def _refuse_names(self, columns: Mapping[str, str], there: str, *, source: str, value: Any = None) -> NoReturn:
        """Raise InvalidSpecError because columns that the config names are not in the data; `there` says what is."""
        named = ", ".join(f"{self._key}.columns.{name} = {json.dumps(column)}" for name, column in columns.items())
        remedy = "name columns that the data has, or leave these keys out"
        self.refuse(f"{there}, and not what {named} names", source=source, value=value, remedy=remedy)

    def _refuse_foreign(self, path: Path, begin: bytes) -> None:
        """Raise InvalidSpecError if the file's first bytes, `begin`, or its name are of a format that is not read."""
        for sign, (message, remedy) in _FOREIGN.items():
            if begin.startswith(sign):
                self.refuse(message, source=str(path), remedy=remedy.replace("FILE", path.name))
        if path.suffix.lower() in (".csv", ".tsv"):
            remedy = "write it as JSON Lines: pandas.read_csv(…).to_json('rows.jsonl', orient='records', lines=True)"
            self.refuse("is a table of text, which does not say what its columns hold", source=str(path), remedy=remedy)

    def _json_rows(self, path: Path, pieces: Iterator[bytes]) -> Iterator[tuple[Place, Row]]:
        """Yield the rows of JSON Lines, or of a JSON array, from the file's unpacked bytes."""
        number = 0
        try:
            begin = next(pieces, b"")
            # A piece may be shorter than the longest sign, or blank.
            while (len(begin) < _LONGEST_SIGN or not begin.strip(_BLANK)) and (piece := next(pieces, b"")):
                begin += piece
            begin = begin.removeprefix(_BOM)
            self._refuse_foreign(path, begin)
            pieces = itertools.chain([begin], pieces)
            if begin.startswith(_TABLES):
                remedy = "unpack it: a table packs its columns itself"
                self.refuse("is a table packed once more", source=str(path), remedy=remedy)
            if begin.lstrip(_BLANK).startswith(b"["):
                yield from self._array_rows(path, pieces)
                return
            for number, line in _lines(pieces):
                if not line.strip(_BLANK):
                    continue
                place = Place(f"{path}:", number)
                try:
                    found = self._parse(line, place)
                except InvalidSpecError:
                    # Reads on to the end, which raises if a packed file is damaged: that is then the cause.
                    collections.deque(pieces, maxlen=0)
                    raise
                yield place, self.take(found, place, is_json=True)
        except CorruptObjectError as error:
            message = f"cannot be read: {error.__cause__ or error.message}"
            self.refuse(message, source=f"{path}:{number + 1}", remedy=_AGAIN)

    def _array_rows(self, path: Path, pieces: Iterator[bytes]) -> Iterator[tuple[Place, Row]]:
        """Yield the rows of a JSON array from the file's unpacked bytes, which are held in memory, at most 1 GiB."""
        parts, size = [], 0
        for piece in pieces:
            parts.append(piece)
            size += len(piece)
            if size > _MOST_ARRAY_BYTES:
                remedy = f"write its rows as lines: jq -c '.[]' {path.name} > rows.jsonl"
                self.refuse(f"is one array of more than {_MOST_ARRAY_BYTES} bytes", source=str(path), remedy=remedy)
        document = b"".join(parts)
        try:
            rows = decode_json(document, what="it", reason=_REASON, max_bytes=_MOST_ARRAY_BYTES)
        except CorruptObjectError:
            # Each element by itself, so that the error names its row; then the document, whose fault may be between
            # elements.
            for number, element in enumerate(_elements(document)):
                self._parse(element, Place(f"{path}, row ", number))
            rows = self._parse(document, Place(f"{path}:", 1))
        for number, found in enumerate(rows):
            yield (place := Place(f"{path}, row ", number)), self.take(found, place, is_json=True)

    def _parse(self, data: bytes, place: Place) -> Any:
        """Return the JSON value of a line, an element or a document.

        Raise InvalidSpecError with the place of the error. For a place that counts lines, the line of the error within
        `data` is added to it.
        """
        try:
            return decode_json(data, what="it", reason=_REASON, max_bytes=_MOST_ARRAY_BYTES)
        except CorruptObjectError as error:
            message, remedy, at = _what_is_wrong(error, data)
            before = data[:at].rpartition(b"\n")[0]
            start = len(before) + 1 if before else 0
            if place.file.endswith(":"):
                place = Place(place.file, place.number + data.count(b"\n", 0, at))
            shown = data[start : start + _SHOWN].partition(b"\n")[0].decode(errors="replace")
            self.refuse(message.format(column=at - start + 1), source=str(place), value=shown, remedy=remedy)

    def _table_rows(self, path: Path, begin: bytes) -> Iterator[tuple[Place, Row]]:
        """Yield the rows of a Parquet or Arrow file, loading only the known columns."""
        arrow = _import("pyarrow")
        number = 0
        try:
            names, batches = _open_table(path, begin)
            try:
                require_columns(names, self._columns)
            except WrongColumnsError as error:
                self._refuse_columns(error, names, source=str(path))
            for batch in batches([name for name in names if name in self._names]):
                for row in _rows_of(batch):
                    yield (place := Place(f"{path}, row ", number)), self.take(row, place)
                    number += 1
        except (OSError, ValueError, KeyError, arrow.ArrowException) as error:
            self.refuse(f"cannot be read: {error}", source=str(Place(f"{path}, row ", number)), remedy=_AGAIN)


def _lines(pieces: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file with their numbers, from 1; raise CorruptObjectError for a line that is too long."""
    number, held, size = 0, [], 0
    for piece in pieces:
        first, *others = piece.split(b"\n")
        held.append(first)
        size += len(first)
        if size > MAX_JSON_BYTES:
            raise CorruptObjectError(f"line {number + 1} has more than {MAX_JSON_BYTES} bytes", reason=_REASON)
        if others:
            for line in (b"".join(held), *others[:-1]):
                # Only the last part of a piece may go on in the next one.
                yield (number := number + 1), line
            held, size = [others[-1]], len(others[-1])
    yield number + 1, b"".join(held)


def _elements(document: bytes) -> Iterator[bytes]:
    """Yield the text of each element of a JSON array, valid or not; empty text after a last comma."""
    depth, start = 0, 0
    for token in _TOKEN.finditer(document):
        if token[0] in (b"[", b"{"):
            depth += 1
            start = token.end() if depth == 1 else start
        elif token[0] == b"," and depth == 1:
            yield document[start : token.start()].strip(_BLANK)
            start = token.end()
        elif token[0] in (b"]", b"}"):
            depth -= 1
            if depth == 0:
                yield document[start : token.start()].strip(_BLANK)
                return
    yield document[start:].strip(_BLANK)


def _what_is_wrong(error: CorruptObjectError, data: bytes) -> tuple[str, str, int]:
    """Return what is wrong with `data`, with `{column}` to fill in, a remedy, and the byte offset of the fault in it.

    `error` is the decoding error.
    """
    match error.__cause__:
        case UnicodeDecodeError(start=start):
            message = f"is no UTF-8 text: byte 0x{data[start]:02x} in column {{column}}"
            return message, "if it is Latin-1, write it as UTF-8: iconv -f LATIN1 -t UTF-8 FILE > rows.jsonl", start
        case UnicodeEncodeError():
            remedy = "take it out, or write the character that it was a half of"
            return "has half of a surrogate pair (\\ud800 to \\udfff), which is no character", remedy, 0
        case json.JSONDecodeError(msg=message, pos=position):
            at = len(data.decode()[:position].encode())
            return f"is no JSON: {_braced(message)} in column {{column}}", f"{_ROW}; {_ONE_A_LINE}", at
        case cause:
            return f"cannot be read: {_braced(str(cause or error.message))}", _PLAIN_JSON, 0


def _braced(text: str) -> str:
    """Return a text that `str.format` leaves as it was."""
    return text.replace("{", "{{").replace("}", "}}")


def _open_table(path: Path, begin: bytes) -> tuple[list[str], Callable[[list[str]], Iterator[Any]]]:
    """Open a Parquet or Arrow file; return its column names, and a function from column names to record batches.

    `begin` are the file's first bytes, which tell the format.
    """
    if begin.startswith((_ARROW, _ARROW_STREAM)):
        ipc = _import("pyarrow.ipc")
        is_stream = begin.startswith(_ARROW_STREAM)
        mapped = _import("pyarrow").memory_map(str(path))
        table = (ipc.open_stream if is_stream else ipc.open_file)(mapped)
        numbers = None if is_stream else range(table.num_record_batches)
        batches = iter(table) if numbers is None else map(table.get_batch, numbers)
        return table.schema.names, lambda names: (batch.select(names) for batch in batches)
    table = _import("pyarrow.parquet").ParquetFile(path)
    return table.schema_arrow.names, lambda names: table.iter_batches(batch_size=_BATCH_ROWS, columns=names)


def _rows_of(batch: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a record batch; if one cannot be decoded, raise ValueError after the rows before it."""
    try:
        yield from batch.to_pylist(maps_as_pydicts="strict")
    except ValueError:
        # One by one, so that the rows before the faulty one are given, and counted.
        for at in range(batch.num_rows):
            yield from batch.slice(at, 1).to_pylist(maps_as_pydicts="strict")


def _import(name: str) -> ModuleType:
    """Import a module of pyarrow; raise InvalidStateError (EXTRA_MISSING) if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InvalidStateError(
            f"reading Parquet and Arrow files needs pyarrow, which is not installed ({error})",
            reason="EXTRA_MISSING",
            remedy="pip install 'millrace[parquet]', or write the rows as JSON Lines",
        ) from error
