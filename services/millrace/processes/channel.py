"""What a process and one that it has started say to each other.

    Channel, HelperProcess    JSON objects and open files, in datagrams of a pair of sockets, which only Linux has
    ChildLink, ParentLink         frames of bytes over the standard input and output, on every system

The end of the other side is the end of the conversation.
"""

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any, NoReturn, Self

from millrace.decoding import MAX_JSON_BYTES, decode_object
from millrace.errors import CorruptObjectError
from millrace.processes import sessions

MAX_MESSAGE_BYTES = 160 * 1024
_MAX_FILES = 8
Message = dict[str, Any]


class Channel:
    """One end of a pair of sockets.

    Each message is a JSON object in one datagram of at most `MAX_MESSAGE_BYTES`, with up to `_MAX_FILES` open files.
    """

    def __init__(self, end: socket.socket) -> None:
        """Take one end of a pair of sockets; prefer `pair`, `to_child` or `inherited`."""
        self._end = end
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def inherited(cls, number: int) -> Self:
        """Return the end of a channel that a parent handed to this process as the open file `number`.

        Children of this process do not inherit it.
        """
        end = socket.socket(fileno=number)
        end.set_inheritable(False)
        return cls(end)

    @classmethod
    def pair(cls) -> tuple[Self, Self]:
        """Return both ends of a new channel in this process; raise OSError on systems without such sockets."""
        # SOCK_SEQPACKET keeps the borders of messages, as datagrams do, and shows the end of the other side, as streams
        # do.
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A datagram is sent only if it fits into the send buffer as a whole.
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        return cls(ends[0]), cls(ends[1])

    @classmethod
    @contextlib.contextmanager
    def to_child(cls) -> Iterator[tuple[Self, int]]:
        """Provide our end of a new channel, and the file number of the other end for a child that is started in this
        block.

        The child has to inherit that number (`pass_fds`). The other end is closed here at the end of the block, and
        ours as well if the block raises. Raises OSError on systems without such sockets.
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
        """Return the file number of this end; -1 once it is closed."""
        return self._end.fileno()

    def close(self) -> None:
        """Close this end of the channel, and stop listening; the other side sees its end. Idempotent."""
        if self._loop is not None and self._end.fileno() >= 0:
            self._loop.remove_reader(self._end)
        self._end.close()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send one message as JSON, with duplicates of the open files whose numbers are given; they stay open here.

        Raises OSError if the other side is gone, or has not read for long, and ValueError if the message is too long.
        """
        data = json.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise ValueError(f"the message has {len(data)} bytes, the most is {MAX_MESSAGE_BYTES}")
        socket.send_fds(self._end, [data], list(files))

    def receive(self, *, timeout_s: float | None = None) -> tuple[Message, list[int]] | None:
        """Wait for the next message, and return it with the numbers of the files that came with it, which are open
        here.

        None if the other side is gone. Raises TimeoutError after `timeout_s` (None: no limit), and CorruptObjectError
        for a malformed message.
        """
        self._end.settimeout(timeout_s)
        try:
            data, files, _, _ = socket.recv_fds(self._end, MAX_MESSAGE_BYTES, _MAX_FILES)
        finally:
            self._end.settimeout(None)
        return (_decode(data), files) if data else None

    def listen(self, on_message: Callable[[Message], None], on_end: Callable[[str], None]) -> None:
        """Call `on_message` with every message, on the running event loop, until `close` or the channel's end.

        Return at once. At the channel's end, or at a malformed message, the channel is closed and `on_end` called once
        with the reason as text. Files that come with messages are not received.
        """
        self._loop = asyncio.get_running_loop()
        self._end.setblocking(False)

        def read_all() -> None:
            """Handle every message that is there; at the end of the channel close it and call `on_end`."""
            try:
                # `on_message` may close the channel: no further message is read then.
                while self._end.fileno() >= 0 and (data := self._end.recv(MAX_MESSAGE_BYTES)):
                    on_message(_decode(data))
                why = "it ended"
            except BlockingIOError:
                return
            # The kernel reports a reset in place of an end where the other side closed its end with messages unread.
            except (OSError, CorruptObjectError) as error:
                why = str(error)
            if self._end.fileno() >= 0:  # else the receiver of the last message closed it
                self.close()
                on_end(why)

        self._loop.add_reader(self._end, read_all)


def _decode(data: bytes) -> Message:
    """Return the JSON object in a datagram; CorruptObjectError if it is none."""
    return decode_object(data, what="a message between processes of Millrace", reason="FRAME_UNREADABLE")


# A process that works for the one that started it, question by question, and for nobody else.
#
#     HelperProcess.start(module) ──▶ serve(answer)
#     ask(question) ────────────────▶ answers one question at a time
#             ◀─ {beat}, {beat}, … ── that it lives, and what it waits for
#             ◀─ {answer} ───────────
#
# It leads a session of its own, so that a Ctrl-C is its parent's business, and dies with the parent: the end of the
# channel ends it at once, whatever it does. (For the kernel's signal of `sessions.die_with_parent` the parent is the
# thread that started it, which may end before.) The parent notices its end by the same channel, and a process that is
# stopped by missing beats: it is killed then. Both raise `HelperDiedError`; whether another one is started is the
# caller's to say.
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
        """Start `python -m module`, which has to call `serve`, with the environment `env` alone.

        Its output goes where ours goes. Raises OSError if it cannot be started.
        """
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
        """Return the process id of the helper process."""
        return self._process.pid

    def ask(
        self,
        question: Mapping[str, Any],
        files: Sequence[int] = (),
        *,
        silent_s: float,
        on_beat: Callable[[Message], None] = lambda beat: None,
    ) -> Message:
        """Send a question with open files, wait for the answer and return it.

        `on_beat` is called with each heartbeat meanwhile. Raises HelperDiedError if the process ends first, or if it is
        killed here because it sent nothing for `silent_s` seconds or something malformed.
        """
        try:
            _send(self._channel, question, files)
            while True:
                # The limit is for the next message: each heartbeat begins it anew, so a long answer is no silence.
                received = self._channel.receive(timeout_s=silent_s)
                if received is None:
                    break
                message, answered = received
                # The answer comes with a file, a heartbeat without.
                if answered:
                    return _content_of(message, answered)
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


def serve(answer: Answer, *, beat: Callable[[], Message] = dict, beat_s: float = _BEAT_S) -> NoReturn:
    """Answer every question of the parent process, and exit when the parent is gone; does not return.

    `answer` gets a question and its open files, which it has to close, and returns the answer; `beat` makes the
    heartbeats that are sent meanwhile, every `beat_s` seconds. The process was started by `HelperProcess.start`, and
    its arguments are the channel's file number and the parent's process id.
    """
    channel, parent = Channel.inherited(int(sys.argv[1])), int(sys.argv[2])
    is_busy = threading.Event()
    threading.Thread(target=_watch, args=(channel, parent, is_busy, beat, beat_s), name="parent", daemon=True).start()
    while (received := channel.receive()) is not None:
        message, files = received
        is_busy.set()
        answered = answer(_content_of(message, files[:1]), files[1:])
        is_busy.clear()
        _send(channel, answered)
    os._exit(0)


def _watch(channel: Channel, parent: int, is_busy: threading.Event, beat: Callable[[], Message], beat_s: float) -> None:
    """End this process when the process `parent` is gone, and send heartbeats while `is_busy` is set.

    The parent is looked for, and a heartbeat is sent, every `beat_s` seconds.

    Does not return.
    """
    poll = select.poll()
    poll.register(channel.fileno(), 0)  # the end of the channel is always reported
    while not poll.poll(beat_s * 1000) and os.getppid() == parent:
        if is_busy.is_set():
            with contextlib.suppress(OSError):  # it is gone, which the next look sees
                channel.send(beat())
    os._exit(0)  # nothing here is worth an orderly end


def _send(channel: Channel, content: Mapping[str, Any], files: Sequence[int] = ()) -> None:
    """Send content of any length: it is written to an anonymous file, which is sent as the first of the message's
    files.
    """
    data = json.dumps(content).encode()
    with open(os.memfd_create("millrace-letter"), "wb") as letter:
        letter.write(data)
        letter.flush()
        channel.send({"bytes": len(data)}, [letter.fileno(), *files])


def _content_of(message: Message, files: Sequence[int]) -> Message:
    """Return the content that `_send` wrote to the first of the received files, and close that file."""
    with open(files[0], "rb") as letter:
        # The received descriptor shares its offset with the sender's, which is at the end of what was written.
        letter.seek(0)
        return decode_object(
            letter.read(message["bytes"]), what="a message between processes of Millrace", reason="FRAME_UNREADABLE"
        )


# Frames over a stream: for processes that get no open files, which other systems than Linux can start as well.
#
#     ChildLink.start(module, order) ──▶ ParentLink().order
#     send(data) ──────────────────▶ receive()
#     receive() ◀─────────────────── send(data)
#
# A frame is its length and that many bytes. What they mean, and which answer belongs to which question, is the
# caller's to say. The end of its standard input tells the child that its parent is gone.

_LENGTH = struct.Struct("<I")
_END_S = 3.0
"""How long the end of a process that was killed is waited for."""


def pack_frame(data: bytes) -> bytes:
    """Return `data` as one frame: its length, in four bytes, and itself."""
    return _LENGTH.pack(len(data)) + data


async def read_frame(reader: asyncio.StreamReader, *, most: int) -> bytes | None:
    """Return the bytes of the next frame of a stream; None at its end, also in the middle of a frame.

    Waits as long as the other side lives. Raises CorruptObjectError (FRAME_TOO_LONG) for a frame of over `most` bytes.
    """
    try:
        return await reader.readexactly(_length(await reader.readexactly(_LENGTH.size), most))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def receive_frame(read: Callable[[int], bytes], *, most: int) -> bytes | None:
    """Return the bytes of the next frame, without an event loop; None at the end, also in the middle of a frame.

    `read` takes a number and returns at most so many bytes, as `socket.recv` does, and b"" at the end; it may block.
    Raises CorruptObjectError (FRAME_TOO_LONG) for a frame of over `most` bytes.
    """
    head = _exactly(read, _LENGTH.size)
    return None if head is None else _exactly(read, _length(head, most))


def _length(head: bytes, most: int) -> int:
    """Return the length that the head of a frame announces; raise CorruptObjectError above `most`."""
    (length,) = _LENGTH.unpack(head)
    if length > most:
        raise CorruptObjectError(
            f"a frame announces {length} bytes, the most is {most}",
            reason="FRAME_TOO_LONG",
            remedy="something else wrote to the stream between two processes of Millrace; restart the service",
        )
    return length


def _exactly(read: Callable[[int], bytes], count: int) -> bytes | None:
    """Return exactly `count` bytes, by as many calls of `read` as that takes; None if it returns b"" before."""
    data = bytearray()
    while len(data) < count:
        part = read(count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


class ChildLink:
    """A started process of ours, which exchanges frames with this one. For an event loop."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take a process whose input and output are pipes; prefer `start`."""
        assert process.stdin is not None and process.stdout is not None
        self._process, self._input, self._output = process, process.stdin, process.stdout

    @classmethod
    async def start(cls, module: str, order: Mapping[str, Any], *, stderr: IO[bytes] | None = None) -> Self:
        """Start `python -m module`, which has to make a `ParentLink`, and send it `order` as JSON in the first frame.

        `order` says what the process shall do. The process leads a session of its own, and has the environment of this
        one. What it prints goes to `stderr`, or where our own errors go. Raises OSError if it cannot be started.
        """
        process = await sessions.start(
            [sys.executable, "-m", module], env=None, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr
        )
        child = cls(process)
        child.post(json.dumps(order).encode())
        return child

    @property
    def pid(self) -> int:
        """Return the process id of the child."""
        return self._process.pid

    @property
    def is_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._process.returncode is not None

    def post(self, data: bytes) -> None:
        """Send one frame without waiting until it is read. What is posted to a process that has ended is lost."""
        with contextlib.suppress(OSError):  # its end is seen where its frames are read
            self._input.write(pack_frame(data))

    async def send(self, data: bytes) -> None:
        """Send one frame, and wait while the process does not read; raise OSError if it has ended."""
        self._input.write(pack_frame(data))
        await self._input.drain()

    async def receive(self, *, most: int) -> bytes | None:
        """Return the next frame of the process; None once it has ended.

        Raises CorruptObjectError (FRAME_TOO_LONG) for a frame of over `most` bytes: `end` it then.
        """
        return await read_frame(self._output, most=most)

    async def end(self) -> None:
        """Kill the process and all that it has started, and wait some seconds for its end. Idempotent."""
        sessions.kill_group(self._process.pid)
        # `wait` and not a timeout: a cancellation may not lose the process before it is collected.
        await asyncio.wait((asyncio.create_task(self._process.wait()),), timeout=_END_S)


class ParentLink:
    """The other end of a `ChildLink`, in the process that it has started."""

    def __init__(self) -> None:
        """Wait for the parent's first frame, keep its JSON object as `order`, and use the standard streams for frames.

        Exit if the parent is gone already. From now on the standard input is empty, and what is printed, also by
        foreign code, goes to the standard error: neither takes a frame nor adds one.
        """
        # Descriptors of its own, which no program that this process starts inherits: what reads, closes or replaces
        # `sys.stdin` or `sys.stdout` ends no conversation.
        self._input, self._output = os.dup(0), os.fdopen(os.dup(1), "wb")
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        order = self.receive(most=MAX_JSON_BYTES)
        if order is None:
            os._exit(0)
        self.order = decode_object(order, what="the order of a process of Millrace", reason="ORDER_UNREADABLE")
        """What this process shall do, from `ChildLink.start`."""

    def receive(self, *, most: int) -> bytes | None:
        """Wait for the next frame of the parent and return it; None once the parent is gone.

        Raises CorruptObjectError for a frame of over `most` bytes. One thread may call this.
        """
        return receive_frame(lambda count: os.read(self._input, count), most=most)

    def send(self, data: bytes) -> None:
        """Send the parent one frame; from any thread. Raises OSError if the parent is gone."""
        with self._lock:
            self._output.write(pack_frame(data))
            self._output.flush()
