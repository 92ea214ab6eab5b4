"""Hostile inputs out of valid ones: bytes, JSON documents and protobuf messages are damaged each in its own way."""

import copy
import hashlib
import json
import random
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zstandard
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from millrace.storage.base import with_checksum

Mutate = Callable[[random.Random, bytes], bytes]

MAX_BYTES = 1 << 20
NUMBERS = [0, 1, 2, 7, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]
TOKENS = [b"\x00", b"\xff" * 4, b"\xff" * 8, b"\x0a\xff\xff\xff\xff\x0f", b"[" * 1000, b'{"a":' * 1000, b"NaN", b"-1"]
TOKENS += [
    b"\xed\xa0\x80",
    b'"\\ud800"',
    b"1e999",
    b"9" * 5000,
    b"\xc3",
    b"../" * 8,
    b"\n",
    b"\r\n\r\n",
    b"%s%n",
    b"\x1b[",
]
VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    2**31,
    2**63,
    2**64,
    -(2**70),
    1.5,
    -0.0,
    "",
    "x",
    "\x00",
    "\n",
    "é😀",
    [],
    {},
]
VALUES += [[[]], {"": {}}, "../../x", "a" * 3000, "9" * 400, 1e308, [None] * 300, {"type": "x"}, ["a", 1], "NaN"]


def bytes_of(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes with a few damages: flipped bits, cuts, repetitions, numbers, hostile pieces."""
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 4, 16])):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(9):
            case 0 if out:
                out[min(at, len(out) - 1)] ^= 1 << rng.randrange(8)
            case 1 if out:
                out[min(at, len(out) - 1)] = rng.randrange(256)
            case 2:
                del out[at:]
            case 3:
                del out[at : at + rng.choice([1, 2, 4, 8, 64])]
            case 4:
                out[at:at] = rng.choice(TOKENS)
            case 5:
                out[at:at] = out[at : at + rng.choice([1, 8, 64, 512])] * rng.choice([1, 2, 16])
            case 6:
                form, size = rng.choice([("<I", 4), ("<Q", 8), ("<H", 2)])
                out[at : at + size] = struct.pack(form, rng.choice(NUMBERS) % (1 << (8 * size)))
            case 7:
                out[at:at] = rng.randbytes(rng.choice([1, 4, 32]))
            case _:
                out += rng.randbytes(rng.choice([1, 16]))
    return bytes(out[:MAX_BYTES])


def json_of(rng: random.Random, data: bytes) -> bytes:
    """Return the JSON document with values replaced, dropped or repeated. Sometimes its text is damaged instead."""
    if rng.random() < 0.25:
        return bytes_of(rng, data)
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return bytes_of(rng, data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        tree = _changed(rng, tree)
    try:
        text = json.dumps(tree, ensure_ascii=rng.random() < 0.5)
    except (ValueError, RecursionError):
        return bytes_of(rng, data)
    return text.encode("utf-8", "surrogatepass")[:MAX_BYTES]


def _changed(rng: random.Random, tree: Any) -> Any:
    if not isinstance(tree, dict | list) or not tree or rng.random() < 0.1:
        return copy.deepcopy(rng.choice(VALUES))
    key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
    match rng.randrange(6):
        case 0:
            del tree[key]
        case 1 if isinstance(tree, dict):
            tree[rng.choice(["", "x", "__proto__", "\x00", "format", str(key) + "s"])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        case 1:
            tree.insert(key, copy.deepcopy(tree[key]))
        case 2:
            tree[key] = copy.deepcopy(rng.choice(VALUES))
        case _:
            tree[key] = _changed(rng, tree[key])
    return tree


def message_of(message_type: type[Message]) -> Mutate:
    """Return a mutation that sets fields of a protobuf message to extreme values.

    Sometimes it damages the bytes, too.
    """

    def mutate(rng: random.Random, data: bytes) -> bytes:
        message = message_type()
        try:
            message.ParseFromString(data)
        except (DecodeError, ValueError):
            return bytes_of(rng, data)
        for _ in range(rng.choice([1, 1, 2, 4])):
            _change_field(rng, message)
        out = message.SerializeToString()
        return bytes_of(rng, out) if rng.random() < 0.3 else out[:MAX_BYTES]

    return mutate


def _change_field(rng: random.Random, message: Message) -> None:
    field = rng.choice(list(message.DESCRIPTOR.fields) or [None])
    if field is None:
        return
    is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
    if rng.random() < 0.1:
        message.ClearField(field.name)
    elif is_map:
        return
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not field.is_repeated:
            _change_field(rng, getattr(message, field.name))
            return
        held = getattr(message, field.name)
        _change_field(rng, rng.choice(held) if held and rng.random() < 0.7 else held.add())
    else:
        value = _value(rng, field)
        if not field.is_repeated:
            setattr(message, field.name, value)
        else:
            getattr(message, field.name).extend([value] * rng.choice([1, 2, 100]))


def _value(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
            return rng.choice([b"", b"\x00", rng.randbytes(32), rng.randbytes(7), b"\xff" * 64])
        case FieldDescriptor.CPPTYPE_STRING:
            texts = [
                "",
                "\x00",
                "a\nb",
                "\x1b[2J",
                "../../etc",
                "x" * 3000,
                "runs/",
                "-",
                "é😀",
                "{}",
                "[" * 200,
                "0-1",
                "127.0.0.1:1",
            ]
            return rng.choice(texts)
        case FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice([0.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324])
        case FieldDescriptor.CPPTYPE_FLOAT:
            return rng.choice([0.0, -1.0, float("nan"), float("inf"), 1e38])
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice([0, 1, 2, 3, 99, 2**31 - 1, -1])
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice([0, -1, 1, 2**31 - 1, -(2**31)])
        case FieldDescriptor.CPPTYPE_INT64:
            return rng.choice([0, -1, 1, 2**63 - 1, -(2**63)])
        case FieldDescriptor.CPPTYPE_UINT32:
            return rng.choice([0, 1, 2**31, 2**32 - 1])
        case _:
            return rng.choice([0, 1, 2**63, 2**64 - 1])


def wrapped(inner: Mutate, unwrap: Callable[[bytes], bytes], wrap: Callable[[bytes], bytes]) -> Mutate:
    """Return a mutation that applies `inner` to the contents of an envelope (compression, a checksum) and closes it
    again. Sometimes it damages the envelope instead.
    """

    def mutate(rng: random.Random, data: bytes) -> bytes:
        if rng.random() < 0.3:
            return bytes_of(rng, data)
        try:
            return wrap(inner(rng, unwrap(data)))
        except Exception:  # noqa: BLE001 - an envelope that an earlier mutation damaged
            return bytes_of(rng, data)

    return mutate


def stored_of(message_type: type[Message] | None) -> Mutate:
    """Return a mutation for stored objects, which damages their contents inside the envelope: compression, a mark with
    a sha256, or JSON's checksum.
    """
    inner = json_of if message_type is None else message_of(message_type)

    def mutate(rng: random.Random, data: bytes) -> bytes:
        if data.startswith(zstandard.FRAME_HEADER):
            compressor = zstandard.ZstdCompressor(write_checksum=True)
            return wrapped(inner, _decompress, compressor.compress)(rng, data)
        if data[8:40] == hashlib.sha256(data[40:]).digest():
            return wrapped(inner, lambda whole: whole[40:], partial(_sealed, data[:8]))(rng, data)
        if b'"checksum"' in data:
            return wrapped(inner, lambda whole: whole, lambda text: with_checksum(json.loads(text)))(rng, data)
        return inner(rng, data)

    return mutate


def _decompress(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=1 << 24)


def _sealed(mark: bytes, body: bytes) -> bytes:
    return mark + hashlib.sha256(body).digest() + body


def spliced(rng: random.Random, seeds: Sequence[bytes], mutate: Mutate) -> bytes:
    """Return a damaged input, made of one seed, or of the beginning of one and the end of another."""
    data = rng.choice(seeds)
    if len(seeds) > 1 and rng.random() < 0.1:
        other = rng.choice(seeds)
        data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    return mutate(rng, data)
