"""What no field of any request may hold, checked before its handler: the handlers check what their fields mean.

Refused are numbers that are not finite, enum values that this release does not know, and names (every string that is
not free text) that are longer than any name or hold control characters, which would end up in keys, paths and logs.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from millrace.errors import InvalidSpecError, Violation

MAX_NAME_CHARS = 2048
MAX_TEXT_CHARS = 64 * 1024
"""Longest free text; JSON documents have bounds of their own."""
MAX_ITEMS = 10_000
"""Most entries of one list or map."""
_MAX_REPORTED = 20
_FREE_TEXT = ("reason", "message", "error", "_json")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_FLOATS = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def check_request(request: Any) -> None:
    """InvalidSpecError with the fields of a message that hold what none may; anything else passes."""
    if not isinstance(request, Message):
        return
    found: list[Violation] = []
    for violation in _violations(request, ""):
        found.append(violation)
        if len(found) == _MAX_REPORTED:
            break
    if found:
        raise InvalidSpecError(found, reason="REQUEST_INVALID")


def _violations(message: Message, prefix: str) -> Iterator[Violation]:
    for field, value in message.ListFields():
        where = f"{prefix}{field.name}"
        if not field.is_repeated:
            yield from _of_value(field, value, where)
        elif len(value) > MAX_ITEMS:
            yield Violation(field=where, value=f"{len(value)} entries", message=f"at most {MAX_ITEMS} are taken")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            for key in value:
                yield from _of_value(key_field, key, f"{where} (a key)")
                yield from _of_value(value_field, value[key], f"{where}[{str(key)[:80]!r}]")
        else:
            for index, item in enumerate(value):
                yield from _of_value(field, item, f"{where}[{index}]")


def _of_value(field: FieldDescriptor, value: Any, where: str) -> Iterator[Violation]:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_MESSAGE:
            yield from _violations(value, f"{where}.")
        case FieldDescriptor.CPPTYPE_ENUM if (enum := field.enum_type) and value not in enum.values_by_number:
            yield Violation(field=where, value=str(value), message=f"is no {enum.name} of this release")
        case FieldDescriptor.CPPTYPE_STRING if isinstance(value, str):
            yield from _of_text(field.name, value, where)
        case kind if kind in _FLOATS and not math.isfinite(value):
            yield Violation(field=where, value=str(value), message="must be a finite number")


def _of_text(name: str, text: str, where: str) -> Iterator[Violation]:
    if name.endswith("_json"):
        return
    is_name = not name.endswith(_FREE_TEXT)
    limit = MAX_NAME_CHARS if is_name else MAX_TEXT_CHARS
    if len(text) > limit:
        yield Violation(field=where, value=f"{len(text)} characters", message=f"must have at most {limit}")
    elif is_name and _CONTROL.search(text):
        yield Violation(field=where, value=repr(text[:80]), message="must hold no control characters")
