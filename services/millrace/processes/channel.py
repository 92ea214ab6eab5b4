"""What a process and one that it has started say to each other: JSON objects over a pair of sockets, and open files.

Each message is one datagram of at most `MAX_MESSAGE_BYTES`. The end of the other side is the end of the channel. Only
Linux has such sockets.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Self

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.processes import sessions

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
        """Return the channel end with the file number that a process got at its start.

        Its children do not inherit it.
        """
        end = socket.socket(fileno=number)
        end.set_inheritable(False)
        return cls(end)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends; raise OSError on systems without such sockets."""
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    @contextlib.contextmanager
    def to_child(cls) -> Iterator[tuple[Self, int]]:
        """Provide our end, and the file number of the other one, which a child started in this block may inherit.

        The other end is closed here at the end of the block, and ours as well if the block raises. Raises OSError on
        systems without such sockets.
        """
        ours, theirs = cls.pair()
        try:
            yield ours, theirs.fileno()
        except BaseException:  # raised on
            ours.close()
            raise
        finally:
            theirs.close()

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end, and stop listening. Idempotent."""
        if self._loop is not None and self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
        self._end.close()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send one message and these open files.

        Raises OSError if the other side is gone, or has not read for long, and ValueError if the message is too long.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"the message has {len(data)} bytes, the most is {MAX_MESSAGE_BYTES}")
        socket.send_fds(self._end, [data], list(files))

    def receive(self, *, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for the next message, and return it with its open files; None if the other side is gone.

        Raises TimeoutError after `timeout_s` (None: no limit), and CorruptObjectError for a malformed message.
        """
        self._end.settimeout(timeout_s)
        try:
            data, files, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_FILES)
        finally:
            self._end.settimeout(None)
        return (_decode(data), files) if data else None

    def listen(self, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        """Call `on_message` with every message, on the running event loop, until `close` or the channel's end.

        At its end, or at a malformed message, the channel is closed and `on_end` called once with the reason as text.
        """
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


# A process that works for the one that started it, question by question, and for nobody else.
#
#     HelperProcess.start(module) ──▶ serve(answer)
#     ask(question) ────────────────▶ answers one question at a time
#             ◀─ {beat}, {beat}, … ── that it lives, and what it waits for
#             ◀─ {answer} ───────────
#
# It leads a session of its own, so that a Ctrl-C is its parent's business, and dies with the parent: the end of the
# channel ends it at once, whatever it does. (For the kernel's `parent_death` the parent is the thread that started
# it, which may end before.) The parent notices its end by the same channel, and a process that is stopped by missing
# beats: it is killed then. Both raise `HelperDiedError`; whether another one is started is the caller's to say.
#
# Questions and answers of any length go as an open file beside a message of the channel (`_send`).

_BEAT_S = 2.0
_EXIT_S = 2.0  # from the end of its channel to its exit code
_KILL_WAIT_S = 5.0

Answer = Callable[[Message, list[int]], Message]


class HelperDiedError(Exception):
    """The process ended, or was ended because it was silent; the message says how."""


class HelperProcess:
    """A started helper process. Call `ask` from one thread at a time; `end` may be called from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], channel: Channel) -> None:
        self._process = process
        self._channel = channel

    @classmethod
    def start(cls, module: str, *, env: Mapping[str, str]) -> Self:
        """Start `python -m module` with the environment `env` alone; its output is ours. OSError."""
        with Channel.to_child() as (ours, theirs):
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs), str(os.getpid())],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                pass_fds=(theirs,),
            )
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def ask(
        self,
        question: Mapping[str, Any],
        files: Sequence[int] = (),
        *,
        silent_s: float,
        on_beat: Callable[[Message], None] = lambda beat: None,
    ) -> Message:
        """Send a question with open files, and return the answer; `on_beat` is called with each heartbeat meanwhile.

        Raises HelperDiedError if the process ends first, or sends nothing for `silent_s` seconds or something
        malformed: it is killed then.
        """
        try:
            _send(self._channel, question, files)
            while True:
                received = self._channel.receive(timeout_s=silent_s)
                if received is None:
                    break
                message, answered = received
                if answered:
                    return _letter(message, answered)
                on_beat(message)
        except TimeoutError:
            self.end()
            raise HelperDiedError(f"it said nothing for {silent_s:g} s and was killed") from None
        except CorruptObjectError as error:
            self.end()
            raise HelperDiedError(f"it said what is no message ({error.message}) and was killed") from error
        except (BrokenPipeError, ConnectionResetError):
            pass  # reported below
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_S)
        self.end()
        raise HelperDiedError(sessions.describe_exit(self._process.returncode))

    def end(self) -> None:
        """Kill the process and wait some seconds for its end; a pending `ask` raises HelperDiedError. Idempotent."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk keeps what is killed
            self._process.wait(_KILL_WAIT_S)

    def close(self) -> None:
        """Kill the process as `end` does, and close the channel; no `ask` may follow. Idempotent."""
        self.end()
        self._channel.close()


def serve(answer: Answer, *, beat: Callable[[], Message] = dict) -> NoReturn:
    """Answer every question until the parent is gone. The process was started by `HelperProcess.start`.

    `answer` gets a question and its open files, which it has to close; `beat` makes the heartbeats that are sent
    meanwhile.
    """
    channel, parent = Channel.inherited(int(sys.argv[1])), int(sys.argv[2])
    is_busy = threading.Event()
    threading.Thread(target=_watch, args=(channel, parent, is_busy, beat), name="parent", daemon=True).start()
    while (received := channel.receive()) is not None:
        message, files = received
        is_busy.set()
        answered = answer(_letter(message, files[:1]), files[1:])
        is_busy.clear()
        _send(channel, answered)
    os._exit(0)


def _watch(channel: Channel, parent: int, is_busy: threading.Event, beat: Callable[[], Message]) -> None:
    """End this process when its parent is gone, and send heartbeats while `is_busy` is set; does not return."""
    poll = select.poll()
    poll.register(channel.fileno(), 0)  # the end of the channel is always reported
    while not poll.poll(_BEAT_S * 1000) and os.getppid() == parent:
        if is_busy.is_set():
            with contextlib.suppress(OSError):  # it is gone, which the next look sees
                channel.send(beat())
    os._exit(0)  # nothing here is worth an orderly end


def _send(channel: Channel, content: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send content of any length: it is in an open file, the first of the message's files."""
    data = json.dumps(content).encode()
    with open(os.memfd_create("millrace-letter"), "wb") as letter:
        letter.write(data)
        letter.flush()
        channel.send({"bytes": len(data)}, [letter.fileno(), *files])


def _letter(message: Message, files: Sequence[int]) -> Message:
    """Return the content that `_send` put into the first file, and close that file."""
    with open(files[0], "rb") as letter:
        letter.seek(0)
        return decode_object(
            letter.read(message["bytes"]), what="a message between processes of Millrace", reason="FRAME_UNREADABLE"
        )
