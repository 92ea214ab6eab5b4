"""Bytes that others wrote: JSON, protobuf and zstd are decoded here, within bounds and with one typed error.

Whatever is read from Redis, from the store, from a file or from a request may be damaged, foreign or hostile. A decoder
of the libraries answers that with an error of its own class (protobuf's `DecodeError` is no `ValueError`), with
`RecursionError`, or with gigabytes of memory. These functions raise `CorruptObjectError` with the caller's reason, and
look at the size before they allocate. Who reads a request turns that into `InvalidSpecError`.
"""

import json
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

if TYPE_CHECKING:  # the command line reads configs without protobuf
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.message import Message

MAX_JSON_BYTES = 64 << 20
"""Largest JSON document that is read; parsed it takes up to 25 times as much memory."""
MAX_MESSAGE_BYTES = 1 << 30
"""Largest protobuf message that is read; parsed it takes up to 8 times as much, `bytes` fields no more than before."""
MAX_DEPTH = 64
"""Deepest nesting of arrays and objects in a JSON document; ours have at most 12."""

M = TypeVar("M", bound="Message")

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")


def decode_json(
    data: bytes | str, *, what: str, reason: str, remedy: str | None = None, max_bytes: int = MAX_JSON_BYTES
) -> Any:
    """The value of a JSON document in UTF-8; `what` names it in the error ("event 1-7", "s3://…/manifest.json").

    `CorruptObjectError` with `reason` if it is none, too large, nested too deeply, or holds what no JSON may hold: NaN,
    infinities, a key twice in one object, half of a surrogate pair (which could not be encoded again).
    """
    if len(data) > max_bytes:
        raise _corrupt(what, f"it has {len(data)} bytes, and at most {max_bytes} are read", reason, remedy)
    try:
        text = data if isinstance(data, str) else data.decode()
        _check_depth(text)
        value = json.loads(text, parse_constant=_refuse, parse_float=_float, object_pairs_hook=_object)
        if "\\u" in text:  # only an escape can make half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        raise _corrupt(what, _cause(error), reason, remedy) from error
    return value


def decode_object(
    data: bytes | str, *, what: str, reason: str, remedy: str | None = None, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any]:
    """As `decode_json`, for a document that must be an object."""
    value = decode_json(data, what=what, reason=reason, remedy=remedy, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise _corrupt(what, f"it is a JSON {type(value).__name__} instead of an object", reason, remedy)
    return value


def decode_message(
    message_type: type[M],
    data: bytes | memoryview,
    *,
    what: str,
    reason: str,
    remedy: str | None = None,
    max_bytes: int = MAX_MESSAGE_BYTES,
) -> M:
    """The protobuf message that `data` holds; `CorruptObjectError` with `reason` if it holds none or is too large."""
    if len(data) > max_bytes:
        raise _corrupt(what, f"it has {len(data)} bytes, and at most {max_bytes} are read", reason, remedy)
    message = message_type()
    try:
        message.ParseFromString(bytes(data))
    except _decode_errors() as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error
    return message


def decode_request(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """The message of a call as `parse`, the deserializer of its generated code, makes it.

    InvalidSpecError if the bytes are none.
    """
    try:
        return parse(data)
    except _decode_errors() as error:
        wrong = Violation(field="request", message=f"{len(data)} bytes that are not the call's message")
        raise InvalidSpecError(
            [wrong], reason="REQUEST_MALFORMED", remedy="use the release of Millrace that the server has"
        ) from error


def unpack(detail: "AnyMessage", message: "Message") -> bool:
    """Put what `detail` holds into `message`; False, and nothing done, if that is another type or no message."""
    if detail.TypeName() != message.DESCRIPTOR.full_name:
        return False
    try:
        message.ParseFromString(detail.value)
    except _decode_errors():
        message.Clear()
        return False
    return True


def decompress(data: bytes, *, what: str, reason: str, max_bytes: int, remedy: str | None = None) -> bytes:
    """What a zstd frame holds; `CorruptObjectError` with `reason` if it is damaged or holds more than `max_bytes`.

    The frame must say how much it holds, as all of ours do: nothing is allocated before that is known. Bytes behind
    the frame are damage, too.
    """
    import zstandard  # not installed with the command line alone

    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise ValueError(f"it says that it holds {size} bytes, which is not from 0 to {max_bytes}")
        if not size:
            return b""
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(1 << 10, 1 << (size - 1).bit_length()))
        return decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error


def _decode_errors() -> tuple[type[Exception], ...]:
    """What protobuf raises for bytes that are no message; none is a subclass of another."""
    from google.protobuf.message import DecodeError

    return DecodeError, ValueError, RecursionError


def _corrupt(what: str, cause: str, reason: str, remedy: str | None) -> CorruptObjectError:
    return CorruptObjectError(f"{what} cannot be read: {cause}", reason=reason, remedy=remedy)


def _cause(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:300]


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


def _float(text: str) -> float:
    return value if math.isfinite(value := float(text)) else _refuse(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a key twice")
    return found


def _check_depth(text: str) -> None:
    """ValueError if arrays and objects nest deeper than `MAX_DEPTH`; one pass, what strings hold does not count."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if match[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")
