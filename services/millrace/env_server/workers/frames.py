"""Frames between the env-server and its workers: 4 bytes little-endian length, then the encoded message."""

import asyncio
import struct
from typing import TypeVar

from google.protobuf.message import Message

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError

_LENGTH = struct.Struct("<I")
# A group of 64 rollouts of 128k tokens is 75 MiB; a longer frame is a broken stream, not a message.
MAX_FRAME_BYTES = 256 * 2**20
HEAD_BYTES = _LENGTH.size
_REMEDY = "something else wrote to the worker's socket; restart the env-server"

MessageT = TypeVar("MessageT", bound=Message)


def encode_frame(message: Message) -> bytes:
    """The bytes of one frame."""
    data = message.SerializeToString()
    if len(data) > MAX_FRAME_BYTES:
        raise CorruptObjectError(
            f"env worker frame {message.DESCRIPTOR.name} has {len(data)} bytes, the most is {MAX_FRAME_BYTES}",
            reason="FRAME_TOO_LONG",
            remedy="play fewer or shorter rollouts in one group",
        )
    return _LENGTH.pack(len(data)) + data


def frame_length(head: bytes) -> int:
    """The length that the first `HEAD_BYTES` of a frame announce; CorruptObjectError if it is above the limit."""
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise CorruptObjectError(
            f"env worker frame announces {length} bytes, the most is {MAX_FRAME_BYTES}",
            reason="FRAME_TOO_LONG",
            remedy=_REMEDY,
        )
    return length


def decode_frame(kind: type[MessageT], data: bytes) -> MessageT:
    """The message of a frame's bytes; CorruptObjectError if they hold none."""
    what = f"env worker frame of {len(data)} bytes ({kind.DESCRIPTOR.name})"
    return decode_message(kind, data, what=what, reason="FRAME_UNREADABLE", remedy=_REMEDY, max_bytes=MAX_FRAME_BYTES)


async def read_frame(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT | None:
    """Read one frame; None when the other side closed. Waits as long as the other side lives."""
    try:
        data = await reader.readexactly(frame_length(await reader.readexactly(HEAD_BYTES)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode_frame(message_type, data)
