"""A process that has imported what the services import, and becomes any of them by forking itself.

    python -m millrace.local.fork_server SOCKET ROOM MODULE=NEEDS,NEEDS ...

Importing torch and transformers costs seconds of processor time, in every service and at every restart; a fork of a
process that has them costs milliseconds and shares their memory. `millrace.local.forked` is the supervisor's end.

It has one thread, runs no event loop, opens no channel and touches no GPU, so that a fork is safe at any time: it only
imports, in the order of its arguments, and answers in between. A module whose imports fail is refused, and what the
supervisor then starts in the ordinary way shows the error in its log. It ends when its socket does.

Messages are JSON datagrams: `{"id", "module", "argv", "env", "marks"}` with the file for the output, answered by
`{"id", "pid"}` or `{"id", "refused"}`; `{"loaded"}` when everything is imported, and `{"ended", "code"}` (as subprocess
has it) for each end of a child.
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

MAX_MESSAGE_BYTES = 160 * 1024
ROOM = "MILLRACE_FORK_ROOM"
"""Variable of the server whose value a child writes over with its own marks; stands last in the environment."""
ROOM_BYTES = 2048
_ARG_START, _ARG_END, _ENV_START, _ENV_END = 47, 48, 49, 50  # places in /proc/self/stat, from 0


class ForkServer:
    """`run` returns in a child, with what the child shall be; it never returns in the server."""

    def __init__(self, sock: socket.socket, needs: Sequence[tuple[str, Sequence[str]]]) -> None:
        """`needs`: for each service's main module, in this order, the modules to be imported before it is forked."""
        self._socket = sock
        self._order = [(module, need) for module, needed in needs for need in needed]
        self._loading = {module: list(needed) for module, needed in needs}
        self._problems: dict[str, str] = {}
        self._asked: list[tuple[dict[str, Any], int]] = []
        self._children: dict[int, int] = {}
        """Pid by the descriptor that tells of its end."""

    def run(self) -> dict[str, Any]:
        """Import and answer until the socket ends; in a child, the message that asked for it."""
        gc.disable()  # what is imported lives as long as the process: collections find nothing, and cost a quarter
        while True:
            self._hear(wait=not self._order)
            if self._order:
                self._load(*self._order.pop(0))
            for message, output in list(self._asked):
                if self._loading.get(message["module"]):
                    continue
                self._asked.remove((message, output))
                if self._fork(message, output):
                    return message

    def _load(self, module: str, need: str) -> None:
        """Import one of the modules that a service needs."""
        try:
            importlib.import_module(need)
        except Exception as error:  # noqa: BLE001 - whatever it is: the service shows it when it is started by itself
            self._problems[module] = f"{need}: {type(error).__name__}: {error}"
        self._loading[module].remove(need)
        if not self._order:
            self._answer(loaded=True)

    def _hear(self, *, wait: bool) -> None:
        """Take every message that is there, and the ends of children; with `wait`, wait for the first."""
        while True:
            ready, _, _ = select.select([self._socket, *self._children], [], [], None if wait else 0)
            if not ready:
                return
            for each in ready:
                if isinstance(each, int):
                    self._bury(each)
                else:
                    self._take()
            wait = wait and not self._asked

    def _take(self) -> None:
        data, files, _, _ = socket.recv_fds(self._socket, MAX_MESSAGE_BYTES, 1)
        if not data:
            os._exit(0)  # the supervisor is gone; nothing here is worth an orderly end
        message = json.loads(data)  # of our own supervisor, over a socket that nobody else has
        if message["module"] in self._loading:
            self._asked.append((message, files[0]))
        else:
            self._answer(id=message["id"], refused="not among the modules of this fork server")
            os.close(files[0])

    def _bury(self, descriptor: int) -> None:
        pid = self._children.pop(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._answer(ended=pid, code=os.waitstatus_to_exitcode(status))

    def _fork(self, message: dict[str, Any], output: int) -> bool:
        """Fork, unless something forbids it; True in the child."""
        problem = self._problems.get(message["module"])
        if problem is None and (threads := len(os.listdir("/proc/self/task"))) > 1:
            problem = f"an import has started {threads - 1} threads"
        if problem is not None:
            self._answer(id=message["id"], refused=problem)
            os.close(output)
            return False
        gc.freeze()
        if pid := os.fork():
            os.close(output)
            self._children[os.pidfd_open(pid)] = pid
            self._answer(id=message["id"], pid=pid)
            return False
        os.setsid()
        os.dup2(output, 1)
        os.dup2(output, 2)
        for descriptor in (output, *self._children):
            os.close(descriptor)
        self._socket.close()
        gc.enable()
        return True

    def _answer(self, **message: Any) -> None:
        self._socket.send(json.dumps(message).encode())


def become(message: dict[str, Any]) -> NoReturn:
    """Be the service that a message asks for, and end as it ends."""
    os.environ.clear()
    os.environ.update(message["env"])
    sys.orig_argv, sys.argv = list(message["argv"]), [message["module"]]
    _show(message["argv"], message["marks"])
    sys.exit(importlib.import_module(message["module"]).main())


def _show(argv: Sequence[str], marks: Sequence[str]) -> None:
    """Have `ps` show this command, and the environment these marks, by which the reaper finds processes.

    Both lie in memory of the process that the kernel shows as they are. Where that is not so, `ps` shows the server.
    """
    try:
        stat = Path("/proc/self/stat").read_text()
        places = [0, 0, 0, *map(int, stat.rpartition(")")[2].split()[1:])]
        arg_start, arg_end, env_start, env_end = (places[at] for at in (_ARG_START, _ARG_END, _ENV_START, _ENV_END))
        environ = ctypes.string_at(env_start, env_end - env_start)
    except (OSError, ValueError, IndexError):
        return
    room_at, room = environ.find(f"{ROOM}=".encode()), len(ROOM) + 1 + ROOM_BYTES
    shown = b"".join(mark.encode() + b"\0" for mark in marks)
    if room_at >= 0 and len(shown) <= room:
        ctypes.memmove(env_start + room_at, shown.ljust(room, b"_"), room)
    command = b"".join(os.fsencode(word) + b"\0" for word in argv)
    if arg_start and len(command) <= arg_end - arg_start:
        ctypes.memmove(arg_start, command.ljust(arg_end - arg_start, b"\0"), arg_end - arg_start)


def main() -> NoReturn:
    """Serve; a child leaves it as the service that it became."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    server = ForkServer(
        socket.socket(fileno=int(sys.argv[1])),
        [(module, needs.split(",")) for module, _, needs in (word.partition("=") for word in sys.argv[3:])],
    )
    message = server.run()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    become(message)


if __name__ == "__main__":
    main()
