"""Plain data on its way out: protobuf as dictionaries, secrets masked, and JSON that no text can break."""

import json
import os
from typing import Any

from google.protobuf.message import Message

from millrace.telemetry.redact import masked, secrets_of


def to_json(value: Any, *, secrets: tuple[str, ...] | None = None) -> bytes:
    """The document, in ASCII, with every secret masked; NaN and infinities are null, and texts have an end."""
    known = secrets_of(os.environ) if secrets is None else secrets
    return json.dumps(masked(value, known), separators=(",", ":"), allow_nan=False).encode()


def of_message(message: Message) -> dict[str, Any]:
    """A protobuf message as plain data: every field that is set, whole numbers as numbers."""
    found: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = dict(value)
        elif field.is_repeated:
            found[field.name] = [_plain(item) for item in value]
        elif field.enum_type is not None:
            found[field.name] = field.enum_type.values_by_number[value].name
        else:
            found[field.name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Message):
        if value.DESCRIPTOR.full_name == "google.protobuf.Timestamp":
            return value.ToNanoseconds() / 1e9  # type: ignore[attr-defined]
        return of_message(value)
    return value.hex() if isinstance(value, bytes) else value
