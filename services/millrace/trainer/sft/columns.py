"""The columns of a row, each in the one form that the rest of fine-tuning knows.

Tables and exports write the same conversation in several forms: a list as JSON text, a list of objects as an object of
lists (what Arrow makes of a sequence of structs), every key in every row with null where there is nothing.
"""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.decoding import decode_json
from millrace.errors import CorruptObjectError

Row = Mapping[str, Any]


class JsonRow(dict[str, Any]):
    """A row whose nulls are meant, as in a schema's `"default": null`: tables fill in others."""


TOOLS = ("tools", "tool_defs")
"""Columns of tools, of which the first one that has any counts."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
COLUMNS = ("messages", "prompt", "completion", *TOOLS, TEMPLATE_ARGUMENTS)
"""Columns that are read; a row may have any others."""

_RESERVED = {"conversation", "messages", "tools", "tokenize", "add_generation_prompt", "continue_final_message"} | {
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
}
"""Arguments of `apply_chat_template` that a row's `chat_template_kwargs` may not set."""
_KINDS = {str: "text", list: "a list", dict: "an object", bool: "true or false", int: "a number", float: "a number"}
_PLAIN = (str, bool, int, float, type(None))
_MOST_NAMED = 12


class WrongColumnsError(ValueError):
    """A row without the columns that make a conversation; renaming some may mend it."""


def take_row(found: Any, columns: Mapping[str, str]) -> JsonRow:
    """The columns of a row that are read, where `columns` gives the name that each of `COLUMNS` has in the data.

    ValueError says what is wrong with the row.
    """
    if not isinstance(found, dict):
        raise ValueError(f"is {_kind(found)} instead of a JSON object")
    row = {name: value for name in COLUMNS if (value := found.get(columns[name])) is not None}
    if "messages" in row:
        row = {name: value for name, value in row.items() if name not in ("prompt", "completion")}
        row["messages"] = _messages(row["messages"], name="messages")
    elif not {"prompt", "completion"} <= row.keys():
        raise WrongColumnsError(f"{wanted()}; {_it_has(found)}")
    elif not all(isinstance(row[name], str) for name in ("prompt", "completion")):
        _require_lists(row)
        row |= {name: _messages(row[name], name=name) for name in ("prompt", "completion")}
    for name in TOOLS:
        if name in row:
            row[name] = _tools(row[name], name=name)
    if TEMPLATE_ARGUMENTS in row:
        row[TEMPLATE_ARGUMENTS] = _template_arguments(row[TEMPLATE_ARGUMENTS])
    return JsonRow(row)


def wanted() -> str:
    """What a row needs, in words."""
    return "needs `messages`, or `prompt` and `completion`, both text or both lists of messages"


def require_columns(names: Sequence[str], columns: Mapping[str, str]) -> None:
    """WrongColumnsError unless a table has the columns that make a conversation, each once."""
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise WrongColumnsError(f"has several columns called {named(twice)}")
    there = {name for name in COLUMNS if columns[name] in names}
    if not ("messages" in there or {"prompt", "completion"} <= there):
        raise WrongColumnsError(f"{wanted()}; it has {named(names)}")


def plain(value: Any, *, name: str) -> Any:
    """A value of a table as JSON would have it, without keys that are null, which tables fill in; dates are text.

    ValueError for what JSON has not: bytes, numbers that are not finite.
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
    """A value without the keys that have none, at every depth; an item of a list that is null stays."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def named(names: Sequence[str]) -> str:
    """Names of columns, in words."""
    shown = ", ".join(f"`{name[:40]}`" for name in names[:_MOST_NAMED])
    return f"{shown} and {len(names) - _MOST_NAMED} others" if len(names) > _MOST_NAMED else shown or "no columns"


def _it_has(found: Mapping[str, Any]) -> str:
    empty = [name for name, value in found.items() if value is None]
    there = f"it has {named([name for name in found if name not in empty])}"
    return f"{there}; null are {named(empty)}" if empty else there


def _kind(value: Any) -> str:
    return "null" if value is None else _KINDS.get(type(value), type(value).__name__)


def _require_lists(row: Row) -> None:
    kinds = {name: _kind(row[name]) for name in ("prompt", "completion")}
    if not all(isinstance(row[name], list | dict) for name in kinds):
        raise ValueError(f"{wanted()}; `prompt` is {kinds['prompt']}, `completion` is {kinds['completion']}")


def _messages(value: Any, *, name: str) -> list[Mapping[str, Any]]:
    """A list of messages; ValueError if it is none."""
    messages = _records(_parsed(value, name=name), key="role")
    if not isinstance(messages, list):
        raise ValueError(f"has `{name}` that are no list: it is {_kind(messages)}")
    return [_message(message, name=f"{name}[{index}]") for index, message in enumerate(messages)]


def _message(message: Any, *, name: str) -> Mapping[str, Any]:
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
    calls = _records(_parsed(value, name=name), key="function")
    if not isinstance(calls, list):
        raise ValueError(f"`{name}` must be a list of calls, and is {_kind(calls)}")
    for index, call in enumerate(calls):
        if not isinstance(call, dict) or not isinstance(call.get("function", {}), dict):
            raise ValueError(f"`{name}[{index}]` is no call: it must be an object, and its `function` one, too")
    return calls


def _tools(value: Any, *, name: str) -> list[Any] | None:
    tools = _records(_parsed(value, name=name), key="function")
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"`{name}` must be a list of tools, or one as JSON text, and is {_kind(tools)}")
    tools = [_parsed(tool, name=f"{name}[{index}]") for index, tool in enumerate(tools or [])]
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ValueError(f"`{name}[{index}]` must be an object, and is {_kind(tool)}")
    return tools or None


def _template_arguments(value: Any) -> Mapping[str, Any] | None:
    arguments = _parsed(value, name=TEMPLATE_ARGUMENTS)
    if arguments is not None and not isinstance(arguments, dict):
        raise ValueError(f"`{TEMPLATE_ARGUMENTS}` must be an object, or one as JSON text, and is {_kind(arguments)}")
    if taken := sorted((arguments or {}).keys() & _RESERVED):
        raise ValueError(f"`{TEMPLATE_ARGUMENTS}` may not set `{taken[0]}`: Millrace sets it")
    return arguments or None


def _parsed(value: Any, *, name: str) -> Any:
    """A value that may be JSON text; None for blank text."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return decode_json(value, what=f"`{name}`", reason="DATA_INVALID")
    except CorruptObjectError as error:
        raise ValueError(f"`{name}` is text that is no JSON: {error.__cause__ or error.message}") from error


def _records(value: Any, *, key: str) -> Any:
    """A list of objects for an object of equally long lists that has `key`; anything else as it is."""
    if not isinstance(value, dict) or not isinstance(value.get(key), list):
        return value
    columns = {name: column for name, column in value.items() if column is not None}
    lengths = {name: len(column) if isinstance(column, list) else None for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"an object of lists has lists of different lengths: {lengths}")
    rows = zip(*columns.values(), strict=True)
    return [{name: each for name, each in zip(columns, row, strict=True) if each is not None} for row in rows]
