"""A process that has imported the modules that other processes need, and starts those by forking itself.

    python -m millrace.processes.fork_server FD ROOM MODULE=NEEDS,NEEDS ...

Importing torch and transformers costs seconds of processor time, in every service and at every restart; a fork of a
process that has them costs milliseconds and shares their memory. `forked` is the other end of its channel.

It has one thread, runs no event loop, opens no channel and touches no GPU, so that a fork is safe at any time: it only
imports, in the order of its arguments, and answers in between. A module whose imports fail is refused, and what is
then started in the ordinary way shows the error. It ends when its channel does.

It is asked with `{"id", "module", "argv", "env", "marks", "files"}`: `files` are the numbers that the open files which
come with it shall have in the child. `{"id", "module", "preload"}` names one more import. It says `{"id", "pid"}` or
`{"id", "refused"}`; `{"loaded"}` when everything is imported, and `{"ended", "code", "peak_bytes"}` (the code as
subprocess has it) for each end of a child.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import random
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from millrace.processes.channel import Channel, Message

ROOM = "MILLRACE_FORK_ROOM"
"""Variable of the server, last in its environment, whose memory a child overwrites with its own marks."""
ROOM_BYTES = 2048
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 47, 48, 49, 50  # places in /proc/self/stat, from 0


class ForkServer:
    """The server. `run` returns only in a child, with the message that says which program the child becomes."""

    def __init__(self, channel: Channel, needs: Sequence[tuple[str, Sequence[str]]]) -> None:
        """Create the server.

        `needs` names for each main module, in this order, the modules to import before it is forked.
        """
        self._channel = channel
        self._kept = _open_files() - {channel.fileno()}  # inherited by this server, and by its children
        self._order = [(module, need) for module, needed in needs for need in needed]
        self._loading = {module: list(needed) for module, needed in needs}
        self._problems: dict[str, str] = {}
        self._requests: list[tuple[Message, list[int]]] = []
        self._children: dict[int, int] = {}
        """Pid by the descriptor that is readable once the process has ended."""
        self._poll = select.poll()
        self._poll.register(channel.fileno(), select.POLLIN)

    def run(self) -> Message:
        """Import and fork until the channel ends, which exits.

        In a forked child, return the message that requested it.
        """
        gc.disable()  # what is imported lives as long as the process: collections find nothing, and cost a quarter
        while True:
            # While imports are left only pending messages are read, so that a request waits for one import at most.
            self._receive_all(wait=not self._order)
            if self._order:
                self._load(*self._order.pop(0))
            for message, files in list(self._requests):
                # Forked before its imports are done, the child would have to repeat them by itself.
                if self._loading.get(message["module"]):
                    continue
                self._requests.remove((message, files))
                if self._fork(message, files):
                    return message

    def _load(self, module: str, need: str) -> None:
        """Import `need`, one of the modules that the main module `module` needs.

        Where that fails, later forks of `module` are refused. Sends `loaded` once nothing is left to import.
        """
        try:
            importlib.import_module(need)
        except Exception as error:  # noqa: BLE001 - whatever it is: the module shows it when it is started by itself
            self._problems[module] = f"{need}: {type(error).__name__}: {error}"
        self._loading[module].remove(need)
        if not self._order:
            self._answer(loaded=True)

    def _receive_all(self, *, wait: bool) -> None:
        """Receive all pending messages and ends of children.

        With `wait`, wait until there is a request or an import to handle.
        """
        while ready := self._poll.poll(None if wait else 0):
            for number, _ in ready:
                if number in self._children:
                    self._reap(number)
                else:
                    self._receive_one()
            wait = wait and not self._requests and not self._order

    def _receive_one(self) -> None:
        """Receive one message: queue the import or the fork that it requests, or refuse a module that is not served.

        Exits the process if the channel has ended.
        """
        received = None
        # The kernel reports a reset in place of an end where the client was gone with answers of ours unread.
        with contextlib.suppress(ConnectionResetError):
            received = self._channel.receive()
        if received is None:
            os._exit(0)  # the client is gone; nothing here is worth an orderly end
        message, files = received
        if message["module"] not in self._loading:
            self._refuse(message, files, "not among the modules of this fork server")
        elif "preload" in message:
            self._order.append((message["module"], message["preload"]))
            self._loading[message["module"]].append(message["preload"])
        else:
            self._requests.append(received)

    def _reap(self, descriptor: int) -> None:
        """Collect a child that has ended, by the descriptor that became readable, and report its exit code and peak
        memory.
        """
        pid = self._children.pop(descriptor)
        self._poll.unregister(descriptor)
        os.close(descriptor)
        _, status, used = os.wait4(pid, 0)
        self._answer(ended=pid, code=os.waitstatus_to_exitcode(status), peak_bytes=used.ru_maxrss * 1024)

    def _fork(self, message: Message, files: list[int]) -> bool:
        """Fork a child and report its pid, or refuse the request if imports failed or threads run.

        Return True in the child only. `files` are the open files that came with the message: in the child they get the
        numbers that the message names, and all other files of the server are closed.
        """
        problem = self._problems.get(message["module"])
        if problem is None and (threads := len(os.listdir("/proc/self/task"))) > 1:
            # They would not exist in the copy, and what they hold would be locked there for ever.
            problem = f"an import has started {threads - 1} threads"
        # A collection in the child must leave these objects alone: it would write to their pages, and so copy them.
        gc.freeze()
        try:
            pid = os.fork() if problem is None else -1
        except OSError as error:
            pid, problem = -1, str(error)
        if problem is not None:
            self._refuse(message, files, problem)
            return False
        if pid:
            _close(files)
            descriptor = os.pidfd_open(pid)
            self._children[descriptor] = pid
            self._poll.register(descriptor, select.POLLIN)
            self._answer(id=message["id"], pid=pid)
            return False
        # As `sessions.start` does for programs: the child leads a session and process group of its own.
        os.setsid()
        self._channel.close()
        free = max(message["files"], default=0) + 1  # out of the way until the wanted numbers are free
        above = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, free) for number in files]
        # Other children's files and descriptors are not this one's to hold open.
        _close(_open_files() - self._kept - set(above))
        for number, wanted in zip(above, message["files"], strict=True):
            os.dup2(number, wanted)
        _close(above)
        gc.enable()
        return True

    def _refuse(self, message: Message, files: list[int], problem: str) -> None:
        """Answer that nothing is forked for this message, because of `problem`, and close the files that came with
        it.
        """
        self._answer(id=message["id"], refused=problem)
        _close(files)

    def _answer(self, **message: Any) -> None:
        """Send the client a message with these fields; do nothing if the client is gone."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next look at the channel sees its end
            self._channel.send(message)


def serve(channel: Channel, needs: Sequence[tuple[str, Sequence[str]]]) -> NoReturn:
    """Run a fork server until its channel ends; in a forked child, run the requested program and exit with its code.

    `needs` names for each main module the modules to import before it is forked.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    become(ForkServer(channel, needs).run())


def become(message: Message) -> NoReturn:
    """Run the main module that a message names, with the message's arguments and environment, and exit with its code.

    Called in a forked child: what a new process would initialise itself (environment, arguments, random numbers) is set
    anew.
    """
    # Python installs this handler at its start; `serve` has replaced it in the server.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(message["env"])
    # The first three words are `python -m MODULE`.
    sys.orig_argv, sys.argv = list(message["argv"]), [message["module"], *message["argv"][3:]]
    _show(message["argv"], message["marks"])
    # State that a new process would have initialised itself; Python reseeds only its own random numbers.
    tempfile.tempdir = None
    # The import system caches directory listings: modules written since the server's start would not be found.
    importlib.invalidate_caches()
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    try:
        sys.exit(importlib.import_module(message["module"]).main())
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise  # Python prints it
        _leave(ended.code or 0)


def _leave(code: int) -> NoReturn:
    """End this process with the exit code `code` as Python does, but leave its objects to the kernel.

    Python would take all modules apart, and so copy every page that is shared with the server: half a second of
    processor time for each child.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # ends executors, joins threads, as multiprocessing does
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
            stream.flush()
    ctypes.CDLL(None).fflush(None)  # what libraries in C have printed
    os._exit(code)


def _show(argv: Sequence[str], marks: Sequence[str]) -> None:
    """Write `argv` over this process's command line, as `ps` shows it, and `marks` into its environment in /proc.

    `marks` are texts "NAME=value", by which the reaper finds processes. Does nothing where /proc does not show the
    memory, or there is no room in it: `ps` then shows the server's command.
    """
    try:
        stat = Path("/proc/self/stat").read_text()
        # Field 2 is the command in parentheses, which may contain spaces: fields are counted from the last parenthesis.
        places = [0, 0, 0, *map(int, stat.rpartition(")")[2].split()[1:])]
        arg_start, arg_end, env_start, env_end = (places[at] for at in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
        environ = ctypes.string_at(env_start, env_end - env_start)
    except (OSError, ValueError, IndexError):
        return
    room_at, room = environ.find(f"{ROOM}=".encode()), len(ROOM) + 1 + ROOM_BYTES
    shown = b"".join(mark.encode() + b"\0" for mark in marks)
    # Only within the room that the server reserved: the kernel shows a fixed range of memory.
    if room_at >= 0 and len(shown) <= room:
        ctypes.memmove(env_start + room_at, shown.ljust(room, b"_"), room)
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if arg_start and len(command) <= arg_end - arg_start:
        ctypes.memmove(arg_start, command.ljust(arg_end - arg_start, b"\0"), arg_end - arg_start)


def _open_files() -> set[int]:
    """Return the numbers of all files that this process has open."""
    found: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def _close(numbers: Iterable[int]) -> None:
    for number in numbers:
        os.close(number)


def main() -> NoReturn:
    """Run the fork server that `forked.ForkServerClient` starts: the arguments are its channel's number and what to
    import.
    """
    words = (word.partition("=") for word in sys.argv[3:])
    serve(Channel.inherited(int(sys.argv[1])), [(module, needs.split(",")) for module, _, needs in words])


if __name__ == "__main__":
    main()
