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


async def read_frame(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT | None:
    """Read one frame; None when the other side closed. Waits as long as the other side lives."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise CorruptObjectError(
                f"env worker frame announces {length} bytes, the most is {MAX_FRAME_BYTES}",
                reason="FRAME_TOO_LONG",
                remedy="something else wrote to the worker's socket; restart the env-server",
            )
        data = await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return decode_message(
        message_type,
        data,
        what=f"env worker frame of {length} bytes",
        reason="FRAME_UNREADABLE",
        remedy="something else wrote to the worker's socket; restart the env-server",
        max_bytes=MAX_FRAME_BYTES,
    )
