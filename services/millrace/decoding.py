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
    """Decode a JSON document in UTF-8 and return its value.

    `CorruptObjectError` with `reason` and `remedy` if `data` is no JSON, is longer than `max_bytes` (a string: than so
    many characters), is nested too deeply, or has what JSON must not have: NaN, infinities, a key twice in one object,
    half of a surrogate pair (which could not be encoded again). `what` names the document in the error ("event 1-7",
    "s3://…/manifest.json"). `allows_infinity` admits the NaN and `Infinity` that Python programs write.
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
    """Decode a JSON document in UTF-8 and return the object that it holds; any other JSON value is an error.

    `CorruptObjectError` with `reason` and `remedy` if `data` is no JSON object, is longer than `max_bytes`, is nested
    too deeply, or has a key twice, a number that is not finite (unless `allows_infinity`) or half of a surrogate pair.
    `what` names the document in the error.
    """
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
    """Parse `data` as a protobuf message of the class `message_type` and return it.

    `CorruptObjectError` with `reason` and `remedy` if it cannot be parsed, has more than `max_bytes`, or has so many
    nested messages that they would take too much memory. `what` names the bytes in the error.
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
    """Parse the bytes of a gRPC request with `parse`, the deserializer of its generated code, and return the message.

    InvalidSpecError if they cannot be parsed, or have so many nested messages that they would take too much memory.
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
    """Parse the message packed in `detail` into `message`, and return True if it is of the type of `message`.

    Returns False for another type, which leaves `message` as it is, and for malformed bytes, which clear it.
    """
    if detail.TypeName() != message.DESCRIPTOR.full_name:
        return False
    try:
        message.ParseFromString(detail.value)
    except _decode_errors():
        message.Clear()
        return False
    return True


def decompress(data: bytes | memoryview, *, what: str, reason: str, max_bytes: int, remedy: str | None = None) -> bytes:
    """Decompress one zstd frame and return its content, of at most `max_bytes`.

    The frame must state the size of its content, as all frames written here do: nothing is allocated before it is
    checked. `CorruptObjectError` with `reason` and `remedy` if the frame is damaged, larger, or followed by other
    bytes; `what` names it in the error.
    """
    import zstandard  # not installed with the command line alone

    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= max_bytes:
            raise ValueError(f"it says that it holds {size} bytes, which is not from 0 to {max_bytes}")
        if not size:
            return _decompress_nothing(data)
        # The window, and so the decompressor's memory, is bound to the stated size, not to what the frame asks for.
        decompressor = zstandard.ZstdDecompressor(max_window_size=max(1 << 10, 1 << (size - 1).bit_length()))
        return decompressor.decompress(data, max_output_size=size, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError, MemoryError) as error:
        raise _corrupt(what, _cause(error), reason, remedy) from error


def unpacked(file: BinaryIO, *, what: str, reason: str, remedy: str | None = None) -> Iterator[bytes]:
    """Yield the content of an open file in pieces, from its beginning.

    Gzip and zstd, known by their first bytes, are decompressed.

    All members or frames of a compressed file are read. `CorruptObjectError` with `reason` and `remedy` if it is
    damaged or ends within a member; the pieces before that have been yielded. `what` names the file in the error.
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
    """Yield the decompressed content of a compressed file in pieces, from where the file stands to its end.

    `begin` returns a new decompressor (with `decompress`, `eof` and `unused_data`) for each member or frame. ValueError
    if the bytes are damaged or end within a member.
    """
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
    """Return the exceptions that protobuf raises for malformed bytes; none is a subclass of another.

    A function, because protobuf is imported only where it is used.
    """
    from google.protobuf.message import DecodeError

    return DecodeError, ValueError, RecursionError


def _check_nested(kind: Any, data: memoryview, *, most: int = MAX_NESTED_BYTES) -> None:
    """Raise ValueError if the messages inside `data` would take over `most` bytes once they are parsed.

    `kind` is the descriptor of the message that `data` holds. The bytes are only scanned. Malformed ones raise nothing
    here, because the parser refuses them.
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
    """Return the protobuf varint at offset `at` and the offset after it.

    `IndexError` if it is cut off or over 64 bits long.
    """
    value = shift = 0
    while (byte := data[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if shift > 63:
            raise IndexError
    return value | byte << shift, at + 1


def _corrupt(what: str, cause: str, reason: str, remedy: str | None) -> CorruptObjectError:
    """Return the error, with `reason` and `remedy`, that `what` cannot be read because of `cause`."""
    return CorruptObjectError(f"{what} cannot be read: {cause}", reason=reason, remedy=remedy)


def _cause(error: BaseException) -> str:
    """Return the message of an error, cut to 300 characters; the name of its class if it has none."""
    return (str(error) or type(error).__name__)[:300]


def _refuse(text: str) -> Any:
    """Raise ValueError for a number that is no JSON, such as `NaN`."""
    raise ValueError(f"{text} is no JSON")


def _float(text: str) -> float:
    """Return the number that `text` writes; ValueError if it is not finite, such as 1e999."""
    return value if math.isfinite(value := float(text)) else _refuse(text)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these (key, value) pairs; ValueError if a key occurs twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for at, (name, _) in enumerate(pairs) if name in dict(pairs[:at]))
        raise ValueError(f"an object has a key twice: {twice[:80]!r}")
    return found


def _check_depth(text: str) -> None:
    """Raise ValueError if the arrays and objects of a JSON text nest deeper than `MAX_DEPTH`.

    Brackets in strings do not count.
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

    A field that is missing or breaks them is a `ValueError` that names it; the caller makes its `CorruptObjectError` of
    that.
    """

    def __init__(self, value: object, *, what: str = "it") -> None:
        """Take a decoded JSON value, which must be an object, else ValueError.

        `what` is put before the names of its fields in errors.
        """
        if not isinstance(value, dict):
            raise ValueError(f"{what} is a JSON {type(value).__name__} instead of an object")
        self._value: dict[str, Any] = value
        self._what = what

    def integer(self, name: str, *, least: int = 0, most: int = MAX_INTEGER) -> int:
        """Return the whole number in field `name`; ValueError if it is missing or not from `least` to `most`."""
        return require_integer(self._get(name, int), what=self._name(name), least=least, most=most)

    def number(self, name: str) -> float:
        """Return the number in field `name`; ValueError if it is missing, no number or not finite."""
        return require_number(self._get(name, int, float), what=self._name(name))

    def flag(self, name: str) -> bool:
        """Return the boolean in field `name`; ValueError if it is missing or another type."""
        return self._get(name, bool)

    def text(self, name: str, *, most: int = MAX_TEXT) -> str:
        """Return the string in field `name`.

        ValueError if it is missing, another type or longer than `most` characters.
        """
        return require_text(self._get(name, str), what=self._name(name), most=most)

    def key(self, name: str) -> str:
        """Return the string in field `name`, which must be a legal key of an object in a store, else ValueError."""
        return require_key(self.text(name), what=self._name(name))

    def hexadecimal(self, name: str, *, num_bytes: int) -> str:
        """Return the lower-case hexadecimal string of exactly `num_bytes` bytes in field `name`, else raise
        ValueError.
        """
        text = self.text(name, most=2 * num_bytes)
        if len(text) != 2 * num_bytes or _HEX.fullmatch(text) is None:
            raise ValueError(f"{self._name(name)} is not {num_bytes} bytes in lower-case hexadecimal")
        return text

    def items(self, name: str, *, most: int = MAX_ITEMS) -> list[Any]:
        """Return the array in field `name`; ValueError if it is missing, another type or has more than `most` items."""
        found: list[Any] = self._get(name, list)
        if len(found) > most:
            raise ValueError(f"{self._name(name)} has {len(found)} items, and at most {most} are read")
        return found

    def objects(self, name: str, *, most: int = MAX_ITEMS) -> "list[Fields]":
        """Return the array of objects in field `name`, each as `Fields`.

        ValueError for other items, or more than `most`.
        """
        what = self._name(name)
        return [Fields(value, what=f"{what}[{place}]") for place, value in enumerate(self.items(name, most=most))]

    def texts(self, name: str, *, most: int = MAX_ITEMS) -> tuple[str, ...]:
        """Return the array of strings in field `name`; ValueError for other items, or more than `most`."""
        what = self._name(name)
        return tuple(require_text(value, what=what) for value in self.items(name, most=most))

    def integers(self, name: str, *, most: int = MAX_ITEMS, largest: int = MAX_INTEGER) -> tuple[int, ...]:
        """Return the array in field `name` of whole numbers from 0 to `largest`.

        ValueError for other items, or more than `most`.
        """
        what = self._name(name)
        return tuple(require_integer(value, what=what, most=largest) for value in self.items(name, most=most))

    def table(self, name: str, *, most: int = MAX_ITEMS) -> dict[str, str]:
        """Return the object in field `name`, whose values must be strings.

        ValueError for others, or more than `most` entries.
        """
        return {
            key: require_text(value, what=f"{self._name(name)}.{key}")
            for key, value in self.entries(name, most=most).items()
        }

    def entries(self, name: str, *, most: int = MAX_ITEMS) -> dict[str, Any]:
        """Return the object in field `name`, with values of any type; ValueError if it has more than `most` entries."""
        found: dict[str, Any] = self._get(name, dict)
        if len(found) > most:
            raise ValueError(f"{self._name(name)} has {len(found)} entries, and at most {most} are read")
        return found

    def inner(self, name: str) -> "Fields | None":
        """Return the object in field `name` as `Fields`, None where it is null.

        ValueError if it is missing or another type.
        """
        value = self._get(name, dict, type(None))
        return None if value is None else Fields(value, what=self._name(name))

    def has(self, name: str) -> bool:
        """Return whether the object has field `name` and it is not null."""
        return self._value.get(name) is not None

    def _get(self, name: str, *types: type) -> Any:
        """Return the value of field `name`.

        ValueError if it is missing or of none of `types` (true and false are no `int`).
        """
        if name not in self._value:
            raise ValueError(f"{self._name(name)} is missing")
        value = self._value[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise ValueError(f"{self._name(name)} is a JSON {type(value).__name__}")
        return value

    def _name(self, name: str) -> str:
        """Return how errors name field `name`: with the name of the object before it, if it has one."""
        return name if self._what == "it" else f"{self._what}.{name}"


def require_integer(value: object, *, what: str, least: int = 0, most: int = MAX_INTEGER) -> int:
    """Return `value` if it is a whole number from `least` to `most`, else raise ValueError.

    `what` names it in the error.
    """
    if type(value) is not int or not least <= value <= most:
        shown = value if type(value) is int and abs(value) < 1 << 64 else f"a JSON {type(value).__name__}"
        raise ValueError(f"{what} is {shown}, and must be a whole number from {least} to {most}")
    return value


def require_number(value: object, *, what: str) -> float:
    """Return `value` as a float if it is a finite number, else raise ValueError; `what` names it in the error."""
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
    """Return `value` if it is a string of at most `most` characters, else raise ValueError.

    `what` names it in the error.
    """
    if not isinstance(value, str) or len(value) > most:
        shown = f"{len(value)} characters" if isinstance(value, str) else f"a JSON {type(value).__name__}"
        raise ValueError(f"{what} is {shown} instead of a string of at most {most}")
    return value


def require_key(value: str, *, what: str) -> str:
    """Return `value` if it is a legal key of an object in a store, else raise ValueError, which calls it `what`.

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
    """Return whether a string can be encoded as UTF-8.

    The name of a file, which may have any bytes, possibly cannot.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def require_file_name(value: str) -> str:
    r"""Return `value` if it is a relative path of one to four plain names, joined by `/`; else raise ValueError.

    A plain name is not empty, does not begin with a dot, does not end in a dot or a blank, and has no control character
    and none of `\ : * ? " < > |`. So the path cannot leave the directory that it is written to.
    """
    parts = value.split("/")
    is_plain = all(part and not part.startswith(".") and not _ODD_IN_NAMES.search(part) for part in parts)
    if not is_plain or len(parts) > _MAX_NAME_PARTS:
        raise ValueError(f"file name {value[:200]!r} is not a plain name, nor one in plain directories")
    value.encode()  # raises a ValueError for half a character
    return value
