"""What a process and one that it has started say to each other: JSON objects over a pair of sockets, and open files.

Each message is one datagram of at most `MAX_MESSAGE_BYTES`. The end of the other side is the end of the channel. Only
Linux has such sockets.
"""

import asyncio
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError

MAX_MESSAGE_BYTES = 160 * 1024
_MAX_FILES = 8
Message = dict[str, Any]


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def inherited(cls, number: int) -> Self:
        """The end whose number a process was told when it was started; nothing that it starts inherits it."""
        end = socket.socket(fileno=number)
        end.set_inheritable(False)
        return cls(end)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Both ends; OSError where there are no such sockets."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        return cls(ends[0]), cls(ends[1])

    def fileno(self) -> int:
        """Of the socket."""
        return self._end.fileno()

    def close(self) -> None:
        """Give this end up. Idempotent."""
        if self._loop is not None and self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
        self._end.close()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send one message and these open files.

        OSError if the other side is gone, or has not read for long; ValueError if the message is too long.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"the message has {len(data)} bytes, the most is {MAX_MESSAGE_BYTES}")
        socket.send_fds(self._end, [data], list(files))

    def receive(self, *, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for the next message and its files; None if the other side is gone.

        OSError when nothing came in time, CorruptObjectError for what is no message.
        """
        self._end.settimeout(timeout_s)
        try:
            data, files, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_FILES)
        finally:
            self._end.settimeout(None)
        return (_decode(data), files) if data else None

    def listen(self, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        """Hear every message on the running event loop, and once how the channel ended, in words; `close` ends both."""
        self._loop = asyncio.get_running_loop()
        self._end.setblocking(False)

        def hear() -> None:
            try:
                while self._end.fileno() >= 0 and (data := self._end.recv(MAX_MESSAGE_BYTES)):
                    on_message(_decode(data))
                why = "it ended"
            except BlockingIOError:
                return
            except (OSError, CorruptObjectError) as error:
                why = str(error)
            if self._end.fileno() >= 0:  # else the receiver of the last message closed it
                self.close()
                on_end(why)

        self._loop.add_reader(self._end, hear)


def _decode(data: bytes) -> Message:
    return decode_object(data, what="a message between processes of Millrace", reason="FRAME_UNREADABLE")
