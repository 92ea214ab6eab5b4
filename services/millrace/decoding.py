"""Bytes that others wrote: JSON, protobuf, gzip and zstd are decoded here, within bounds and with one typed error.

Whatever is read from Redis, from the store, from a file or from a request may be damaged, foreign or hostile. A decoder
of the libraries answers that with an error of its own class (protobuf's `DecodeError` is no `ValueError`), with
`RecursionError`, or with gigabytes of memory. These functions raise `CorruptObjectError` with the caller's reason, and
look at the size before they allocate. Who reads a request turns that into `InvalidSpecError`.
"""

import contextlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from millrace.errors import CorruptObjectError, InvalidSpecError, Violation

if TYPE_CHECKING:  # the command line reads configs without protobuf
    from google.protobuf.any_pb2 import Any as AnyMessage
    from google.protobuf.message import Message

MAX_JSON_BYTES = 64 << 20
"""Largest JSON document that is read; parsed it takes up to 25 times as much memory."""
MAX_MESSAGE_BYTES = 1 << 30
"""Largest protobuf message that is read; parsed it takes up to 8 times as much, `bytes` fields no more than before."""
MAX_NESTED_BYTES = 128 << 20
"""What the messages within a message may take; empty ones have 2 bytes each, and up to 300 when they are parsed."""
MAX_REQUEST_NESTED_BYTES = 8 << 20
"""The same of a request: anybody may send many at once, and ten thousand entries of a list take at most 3 MB."""
MAX_DEPTH = 64
"""Deepest nesting of arrays and objects in a JSON document; ours have at most 12."""
MAX_INTEGER = (1 << 62) - 1
"""Largest whole number in a field; sums of a few still fit into 64 bits."""
MAX_TEXT = 1 << 10
"""Most characters of a string in a field, unless it says otherwise."""
MAX_ITEMS = 1 << 22
"""Most items of an array in a field, unless it says otherwise."""
MAX_KEY_BYTES = 900
"""Longest key of an object; S3 allows 1024, and the rest is for the bucket prefix."""
_MAX_SEGMENT_BYTES = 255
KEY_RULE = (
    f"relative, no empty, '.' or '..' segment, at most {_MAX_SEGMENT_BYTES} bytes each, {MAX_KEY_BYTES} bytes in all"
)
"""What a key has to be, in words."""

M = TypeVar("M", bound="Message")

_COUNTED_FROM_BYTES = 1 << 20  # what is smaller cannot become more than some 150 MB
_REQUEST_COUNTED_FROM_BYTES = 64 << 10  # and this not more than 10 MB
_MESSAGE_BYTES, _FIELD_BYTES = 48, 8  # what a parsed message takes: measured with upb
_MAX_EMPTY_FRAME = 32
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"  # what a packed file begins with
_PIECE, _PACKED_PIECE = 1 << 20, 8 << 10  # bytes read at a time; packed ones may become many more
_LENGTH_DELIMITED, _FIXED_BYTES = 2, {1: 8, 5: 4}  # wire types

_MAX_NAME_PARTS = 4
# What some filesystem takes for more than a part of a name.
_ODD_IN_NAMES = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|]|[. ]$')

# Possessive (`++`, `*+`): a pattern that may go back keeps a hundred bytes for each character.
_STRING = re.compile(r'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_HEX = re.compile(r"[0-9a-f]*")


def decode_json(
    data: bytes | str,
    *,
    what: str,
    reason: str,
    remedy: str | None = None,
    max_bytes: int = MAX_JSON_BYTES,
    allows_infinity: bool = False,
) -> Any:
    """Return the value of a JSON document in UTF-8; `what` names it in the error ("event 1-7", "s3://…/manifest.json").

    `CorruptObjectError` with `reason` if it is none, too large, nested too deeply, or holds what no JSON may hold: NaN,
    infinities, a key twice in one object, half of a surrogate pair (which could not be encoded again).
    `allows_infinity` is for documents of Python programs, which write `Infinity` and `NaN`.
    """
    if len(data) > max_bytes:
        raise _corrupt(what, f"it has {len(data)} bytes, and at most {max_bytes} are read", reason, remedy)
    try:
        text = data if isinstance(data, str) else data.decode()
        _check_depth(text)
        numbers = (float, float) if allows_infinity else (_refuse, _float)
        value = json.loads(text, parse_constant=numbers[0], parse_float=numbers[1], object_pairs_hook=_object)
        if "\\u" in text:  # only an escape can make half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:  # UnicodeError and JSONDecodeError are ValueErrors
        raise _corrupt(what, _cause(error), reason, remedy) from error
    return value


def decode_object(
    data: bytes | str,
    *,
    what: str,
    reason: str,
    remedy: str | None = None,
    max_bytes: int = MAX_JSON_BYTES,
    allows_infinity: bool = False,
) -> dict[str, Any]:
    """Decode as `decode_json` does a document that must be an object."""
    value = decode_json(
        data, what=what, reason=reason, remedy=remedy, max_bytes=max_bytes, allows_infinity=allows_infinity
    )
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
    """Return the protobuf message that `data` holds.

    `CorruptObjectError` with `reason` if it holds none, is too large, or holds so many others that these would be.
    """
    if len(data) > max_bytes:
        raise _corrupt(what, f"it has {len(data)} bytes, and at most {max_bytes} are read", reason, remedy)
    message = message_type()
    try:
        if len(data) >= _COUNTED_FROM_BYTES:
            _check_nested(message.DESCRIPTOR, memoryview(data))
        message.ParseFromString(bytes(data))
    except _decode_errors() as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error
    return message


def decode_request(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Return the message of a call as `parse`, the deserializer of its generated code, makes it.

    InvalidSpecError if the bytes are none, or hold so many messages that these would be too large.
    """
    try:
        if len(data) >= _REQUEST_COUNTED_FROM_BYTES:
            _check_nested(parse.__self__.DESCRIPTOR, memoryview(data), most=MAX_REQUEST_NESTED_BYTES)  # type: ignore[attr-defined]
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


def decompress(data: bytes | memoryview, *, what: str, reason: str, max_bytes: int, remedy: str | None = None) -> bytes:
    """Return the content of a zstd frame.

    `CorruptObjectError` with `reason` if it is damaged or holds more than `max_bytes`.

    The frame must say how much it holds, as all of ours do: nothing is allocated before that is known. Bytes after
    the frame are damage, too.
    """
    import zstandard  # not installed with the command line alone

    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise ValueError(f"it says that it holds {size} bytes, which is not from 0 to {max_bytes}")
        if not size:
            return _decompress_nothing(data)
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(1 << 10, 1 << (size - 1).bit_length()))
        return decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error


def unpacked(file: BinaryIO, *, what: str, reason: str, remedy: str | None = None) -> Iterator[bytes]:
    """Yield what a file holds, in pieces; one that begins like gzip or zstd is decompressed, all its members or frames.

    `CorruptObjectError` with `reason` if it is damaged, or ends within a member; the pieces before that are given.
    """
    begin = file.read(len(_ZSTD))
    file.seek(0)
    try:
        if begin.startswith(_GZIP):
            yield from _decompressed(file, lambda: zlib.decompressobj(wbits=31))
        elif begin == _ZSTD:
            from zstandard import ZstdDecompressor  # not installed with the command line alone

            yield from _decompressed(file, ZstdDecompressor().decompressobj)
        else:
            yield from iter(lambda: file.read(_PIECE), b"")
    except (ValueError, MemoryError, ImportError) as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error


def _decompressed(file: BinaryIO, begin: Callable[[], Any]) -> Iterator[bytes]:
    """Yield what the members of a packed file hold, or ValueError; `begin` gives the decompressor of one."""
    member, is_within = begin(), False
    while packed := file.read(_PACKED_PIECE):
        while packed:
            try:
                piece = member.decompress(packed)
            except Exception as error:  # an edge to foreign code: zlib.error, ZstdError
                raise ValueError(f"its compressed bytes are damaged: {_cause(error)}") from error
            yield piece
            is_within = not member.eof
            packed = b"" if is_within else member.unused_data.lstrip(b"\0")  # zeros may fill up its end
            member = member if is_within else begin()
    if is_within:
        raise ValueError("it is cut off: its compressed bytes end too early")


def _decompress_nothing(data: bytes | memoryview) -> bytes:
    """Return the content of a frame that claims to be empty.

    The library's `decompress` believes the claim, whatever follows.
    """
    import zstandard

    frame = zstandard.ZstdDecompressor(max_window_size=1 << 10).decompressobj()
    if len(data) > _MAX_EMPTY_FRAME or frame.decompress(data) or not frame.eof or frame.unused_data:
        raise ValueError("it says that it holds nothing, and something follows")
    return b""


def _decode_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that protobuf raises for malformed bytes; none is a subclass of another."""
    from google.protobuf.message import DecodeError

    return DecodeError, ValueError, RecursionError


def _check_nested(kind: Any, data: memoryview, *, most: int = MAX_NESTED_BYTES) -> None:
    """Raise ValueError if the messages within one take more than `most` bytes; one pass over those that hold others.

    Looked at is what a parser would make messages of; where the bytes are malformed it says so itself.
    """
    left, todo = most, [(kind, data)]
    while todo:
        kind, data = todo.pop()
        inner = {field.number: field.message_type for field in kind.fields if field.message_type is not None}
        costs = {number: _MESSAGE_BYTES + _FIELD_BYTES * len(found.fields) for number, found in inner.items()}
        at, end = 0, len(data) if inner else 0
        with contextlib.suppress(IndexError):  # malformed: it ends within a field
            while at < end:
                tag, at = _varint(data, at) if data[at] & 0x80 else (data[at], at + 1)
                if tag & 7 == _LENGTH_DELIMITED:
                    length, at = _varint(data, at) if data[at] & 0x80 else (data[at], at + 1)
                    if tag >> 3 in costs:
                        left -= costs[tag >> 3]
                        if left < 0:
                            raise ValueError("it holds too many messages")
                        if length:
                            todo.append((inner[tag >> 3], data[at : at + length]))
                    at += length
                elif tag & 7 == 0:
                    _, at = _varint(data, at)
                else:
                    at += _FIXED_BYTES.get(tag & 7, 0)


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the number at a place and the place after it; `IndexError` if the bytes end before."""
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > 63:
            raise IndexError
    return value | byte << shift, at + 1


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
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"an object has a key twice: {twice[:80]!r}")
    return found


def _check_depth(text: str) -> None:
    """Raise ValueError if arrays and objects nest deeper than `MAX_DEPTH`; one pass, which skips the content of
    strings.
    """
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    depth = 0
    for match in _BRACKET.finditer(_STRING.sub("", text)):
        depth += 1 if match[0] in "[{" else -1
        if depth > MAX_DEPTH:
            raise ValueError(f"it nests deeper than {MAX_DEPTH} levels")


class Fields:
    """The fields of a decoded JSON object, each read with its type and within bounds.

    What breaks them is a `ValueError` that names the field: who decodes an object makes its `CorruptObjectError` of it.
    """

    def __init__(self, value: object, *, what: str = "it") -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{what} is a JSON {type(value).__name__} instead of an object")
        self._value: dict[str, Any] = value
        self._what = what

    def integer(self, name: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        """Return a whole number from `least` to `most`."""
        return require_integer(self._get(name, int), what=self._name(name), least=least, most=most)

    def number(self, name: str) -> float:
        """Return a finite number."""
        return require_number(self._get(name, int, float), what=self._name(name))

    def flag(self, name: str) -> bool:
        """Return a boolean field."""
        return self._get(name, bool)

    def text(self, name: str, *, most: int = MAX_TEXT) -> str:
        """Return a string of at most `most` characters."""
        return require_text(self._get(name, str), what=self._name(name), most=most)

    def key(self, name: str) -> str:
        """Return the key of an object."""
        return require_key(self.text(name), what=self._name(name))

    def hexadecimal(self, name: str, *, num_bytes: int) -> str:
        """Decode lower-case hexadecimal of exactly so many bytes."""
        text = self.text(name, most=2 * num_bytes)
        if len(text) != 2 * num_bytes or _HEX.fullmatch(text) is None:
            raise ValueError(f"{self._name(name)} is not {num_bytes} bytes in lower-case hexadecimal")
        return text

    def items(self, name: str, *, most: int = MAX_ITEMS) -> list[Any]:
        """Return an array of at most `most` items."""
        found: list[Any] = self._get(name, list)
        if len(found) > most:
            raise ValueError(f"{self._name(name)} has {len(found)} items, and at most {most} are read")
        return found

    def objects(self, name: str, *, most: int = MAX_ITEMS) -> "list[Fields]":
        """Return an array of at most `most` objects."""
        what = self._name(name)
        return [Fields(value, what=f"{what}[{place}]") for place, value in enumerate(self.items(name, most=most))]

    def texts(self, name: str, *, most: int = MAX_ITEMS) -> tuple[str, ...]:
        """Return an array of at most `most` strings."""
        what = self._name(name)
        return tuple(require_text(value, what=what) for value in self.items(name, most=most))

    def integers(self, name: str, *, most: int = MAX_ITEMS, largest: int = MAX_INTEGER) -> tuple[int, ...]:
        """Return an array of at most `most` whole numbers from 0 to `largest`."""
        what = self._name(name)
        return tuple(require_integer(value, what=what, most=largest) for value in self.items(name, most=most))

    def table(self, name: str, *, most: int = MAX_ITEMS) -> dict[str, str]:
        """Return an object of at most `most` strings by name."""
        return {
            key: require_text(value, what=f"{self._name(name)}.{key}")
            for key, value in self.entries(name, most=most).items()
        }

    def entries(self, name: str, *, most: int = MAX_ITEMS) -> dict[str, Any]:
        """Return an object of at most `most` values of any type by name."""
        found: dict[str, Any] = self._get(name, dict)
        if len(found) > most:
            raise ValueError(f"{self._name(name)} has {len(found)} entries, and at most {most} are read")
        return found

    def inner(self, name: str) -> "Fields | None":
        """Return an object, or None where it is null."""
        value = self._get(name, dict, type(None))
        return None if value is None else Fields(value, what=self._name(name))

    def has(self, name: str) -> bool:
        """Return whether the field is there and not null."""
        return self._value.get(name) is not None

    def _get(self, name: str, *types: type) -> Any:
        if name not in self._value:
            raise ValueError(f"{self._name(name)} is missing")
        value = self._value[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{self._name(name)} is a JSON {type(value).__name__}")
        return value

    def _name(self, name: str) -> str:
        return name if self._what == "it" else f"{self._what}.{name}"


def require_integer(value: object, *, what: str, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is a whole number from `least` to `most`, else raise ValueError naming `what`."""
    if type(value) is not int or not least <= value <= most:
        shown = value if type(value) is int and abs(value) < 1 << 64 else f"a JSON {type(value).__name__}"
        raise ValueError(f"{what} is {shown}, and must be a whole number from {least} to {most}")
    return value


def require_number(value: object, *, what: str) -> float:
    """Return `value` if it is a finite number, else raise ValueError naming `what`."""
    if type(value) not in (int, float):
        raise ValueError(f"{what} is a JSON {type(value).__name__} instead of a number")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError as error:
        raise ValueError(f"{what} is too large") from error
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, which is not finite")
    return number


def require_text(value: object, *, what: str, most: int = MAX_TEXT) -> str:
    """Return `value` if it is a string of at most `most` characters, else raise ValueError naming `what`."""
    if not isinstance(value, str) or len(value) > most:
        shown = f"{len(value)} characters" if isinstance(value, str) else f"a JSON {type(value).__name__}"
        raise ValueError(f"{what} is {shown} instead of a string of at most {most}")
    return value


def require_key(value: str, *, what: str) -> str:
    """Return `value` if it is a legal key of an object in a store, else raise ValueError naming `what`.

    Legal: relative, segments that are neither empty nor "." nor ".." and have at most 255 bytes (no file has a longer
    name), no NUL, at most 900 bytes of UTF-8.
    """
    segments = value.split("/")
    is_plain = not any(segment in ("", ".", "..") for segment in segments) and segments[0] != ".tmp"
    sizes = [len(segment.encode(errors="replace")) for segment in segments]
    is_short = max(sizes) <= _MAX_SEGMENT_BYTES and sum(sizes) + len(sizes) - 1 <= MAX_KEY_BYTES
    if not (is_plain and is_short and "\0" not in value and is_text(value)):
        raise ValueError(f"{what} {value[:200]!r} is no object key: {KEY_RULE}")
    return value


def is_text(value: str) -> bool:
    """Return whether a string can be encoded as UTF-8: the name of a file may hold any bytes."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_file_name(value: str) -> str:
    """Return the name of a file, `/` between a directory and what is in it, else raise ValueError.

    It leads nowhere but below the directory that it is written to: every part is a plain name that no system hides.
    """
    parts = value.split("/")
    is_plain = all(part and not part.startswith(".") and not _ODD_IN_NAMES.search(part) for part in parts)
    if not is_plain or len(parts) > _MAX_NAME_PARTS:
        raise ValueError(f"file name {value[:200]!r} is not a plain name, nor one in plain directories")
    value.encode()  # raises a ValueError for half a character
    return value
