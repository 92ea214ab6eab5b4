"""Frames between the env-server and its workers, and the echo by which a worker shows that it runs."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

from millrace.decoding import decode_message
from millrace.errors import CorruptObjectError
from millrace.processes import channel

# A group of 64 rollouts of 128k tokens is 75 MiB; a longer frame is a broken stream, not a message.
MAX_FRAME_BYTES = 256 * 2**20
_REMEDY = "something else wrote to the worker's socket; restart the env-server"

MessageT = TypeVar("MessageT", bound=Message)


def encode_frame(message: Message) -> bytes:
    """Return the message's bytes after their length, as one frame; raise CorruptObjectError above MAX_FRAME_BYTES."""
    data = message.SerializeToString()
    if len(data) > MAX_FRAME_BYTES:
        raise CorruptObjectError(
            f"env worker frame {message.DESCRIPTOR.name} has {len(data)} bytes, the most is {MAX_FRAME_BYTES}",
            reason="FRAME_TOO_LONG",
            remedy="play fewer or shorter rollouts in one group",
        )
    return channel.pack_frame(data)


def decode_frame(kind: type[MessageT], data: bytes) -> MessageT:
    """Decode the message of a frame, without its length; raise CorruptObjectError if it is no message of that kind."""
    what = f"env worker frame of {len(data)} bytes ({kind.DESCRIPTOR.name})"
    return decode_message(kind, data, what=what, reason="FRAME_UNREADABLE", remedy=_REMEDY, max_bytes=MAX_FRAME_BYTES)


async def read_frame(reader: asyncio.StreamReader, message_type: type[MessageT]) -> MessageT | None:
    """Read one frame and return its message; None when the other side has closed.

    Waits as long as the other side lives. Raises CorruptObjectError.
    """
    data = await channel.read_frame(reader, most=MAX_FRAME_BYTES)
    return None if data is None else decode_frame(message_type, data)


# Whether an environment's worker process still runs at all, however busy its event loop is.
#
# Environment code may block the worker's event loop for minutes, which only a rollout's deadline ends. A process that
# is stopped (SIGSTOP, a debugger, a hanging disk) is another matter: it will not come back by itself, and everything
# that it plays waits with it. So a thread of the worker answers every byte on a socket of its own, which needs the
# interpreter for a moment but not the loop. The answer also has the line where the loop is, if it runs the same
# callback as at the last question.

_CHUNK_BYTES = 4096
_STUCK, _MOVES, _END = b"!", b".", b"\n"
_MAX_PLACE_CHARS = 300


def start_answering(end: socket.socket, stuck_at: Callable[[], str | None] = lambda: None) -> None:
    """Start a thread that answers each read on the socket with what `stuck_at` returns, until the other side closes.

    `stuck_at` returns the line in which the event loop is stuck, None while it makes progress.
    """

    def answer() -> None:
        """Answer each read on the socket with where the loop is stuck, until the other side closes."""
        with contextlib.suppress(OSError):
            while end.recv(_CHUNK_BYTES):
                place = stuck_at()
                known = _STUCK + (place or "").replace("\n", " ")[:_MAX_PLACE_CHARS].encode(errors="replace")
                end.sendall((_MOVES if place is None else known) + _END)

    threading.Thread(target=answer, name="echo", daemon=True).start()


class EchoProbe:
    """The env-server's side of the echo; `ask` must be called regularly."""

    def __init__(self, end: socket.socket, *, stood_still_s: float) -> None:
        """Take the env-server's end of a worker's echo socket.

        A pause longer than `stood_still_s` between two calls of `ask` means that this process itself did not run.
        """
        end.setblocking(False)
        self._end = end
        self._stood_still_s = stood_still_s
        self._heard = self._asked = self._moved = time.monotonic()
        self.place = ""
        """The line in which the loop is stuck; "" if it is not, or the line is unknown."""

    @property
    def stuck_s(self) -> float:
        """Return the seconds since the worker's event loop last reported progress, as the answers to `ask` have it."""
        return time.monotonic() - self._moved

    def ask(self) -> float:
        """Return the seconds since the worker's last answer, and send the next question; must be called regularly.

        Sets `place`, where the worker's loop is stuck. A pause in which this process did not run does not count.
        """
        now = time.monotonic()
        if now - self._asked > self._stood_still_s:
            self._heard = self._moved = now
        self._asked = now
        with contextlib.suppress(OSError):  # nothing there yet, or the worker ended: others notice that
            if data := self._end.recv(_CHUNK_BYTES):
                self._heard = now
                # Several answers may have come since the last look; the newest counts.
                last = data.rstrip(_END).rpartition(_END)[2]
                if last.startswith(_STUCK):
                    self.place = last.removeprefix(_STUCK).decode(errors="replace")
                else:
                    self._moved, self.place = now, ""
        with contextlib.suppress(OSError):
            self._end.send(b".")
        return now - self._heard

    def close(self) -> None:
        """Close the socket."""
        self._end.close()
