"""The process from which workers are forked: `python -m millrace.env_server.template --fd N`.

It imports what every worker needs, which costs 5 CPU-seconds, once, and then makes copies of itself. It runs no code of
environments, knows no secret (it has the variables of a worker), and stays single-threaded: a thread that a library
started would not exist in the copies, and what it holds would be locked there for ever. So before each fork it counts
its threads, and refuses if there are more than one; the env-server starts workers by themselves then.

On its socket, one JSON object per message: `{"fork": n, …}` with two or three open files is answered by
`{"forked": n, "pid": p}` or `{"refused": n, "problem": text}`, and the end of each copy is told as
`{"ended": p, "status": s, "peak_bytes": b}`.
"""

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from millrace.decoding import decode_object
from millrace.env_server import worker
from millrace.env_server.confinement import Confinement, die_with_parent
from millrace.telemetry.startup import without_gc

MAX_MESSAGE_BYTES = 128 * 1024
MAX_FILES = 3
# What workers of both generations of environments import.
_PRELOADED = ("millrace.env_server.v0", "millrace.env_server.v1", "millrace.env_server.renderer")
_PR_SET_NAME = 15


def main() -> None:
    """Import, fork on request, until the env-server is gone; in a copy: be a worker."""
    parser = argparse.ArgumentParser(description="Template of Millrace environment workers; started by the env-server.")
    parser.add_argument("--fd", type=int, required=True, help="inherited socket (SOCK_SEQPACKET)")
    channel = socket.socket(fileno=parser.parse_args().fd)
    die_with_parent()
    with without_gc():
        for module in _PRELOADED:
            importlib.import_module(module)
    template = _Template(channel)
    template.send({"ready": True, "threads": num_threads()})
    be_worker = template.serve()
    if be_worker is not None:
        be_worker()


def num_threads() -> int:
    """Threads of this process, those of libraries included."""
    return len(os.listdir("/proc/self/task"))


class _Template:
    """Forks and watches."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._children: dict[int, int] = {}
        """Pid by its pidfd."""

    def serve(self) -> Callable[[], None] | None:
        """Serve until the socket closes (None), or until this is the copy: what it shall do then."""
        while True:
            for file, _ in self._poll.poll():
                if file in self._children:
                    self._tell_end(file)
                    continue
                data, files, _, _ = socket.recv_fds(self._channel, MAX_MESSAGE_BYTES, MAX_FILES)
                if not data:
                    return None
                be_worker = self._fork(
                    decode_object(data, what="a request to the template", reason="FRAME_UNREADABLE"), files
                )
                if be_worker is not None:
                    return be_worker

    def _fork(self, request: dict[str, Any], files: list[int]) -> Callable[[], None] | None:
        """Make a copy; in the copy: what it shall do."""
        threads = num_threads()
        if threads != 1:
            self._close(files)
            self.send({"refused": request["fork"], "problem": f"the template has {threads} threads"})
            return None
        try:
            pid = os.fork()
        except OSError as error:
            self._close(files)
            self.send({"refused": request["fork"], "problem": str(error)})
            return None
        if pid == 0:
            return lambda: _be_worker(request, files)
        self._close(files)
        pidfd = os.pidfd_open(pid)
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)
        self.send({"forked": request["fork"], "pid": pid})
        return None

    def _tell_end(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        _, status, used = os.wait4(pid, 0)
        self.send({"ended": pid, "status": os.waitstatus_to_exitcode(status), "peak_bytes": used.ru_maxrss * 1024})

    def send(self, message: dict[str, Any]) -> None:
        """Tell the env-server, if it is there."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the next look at the socket sees its end
            self._channel.send(json.dumps(message).encode())

    @staticmethod
    def _close(files: list[int]) -> None:
        for file in files:
            os.close(file)


def _be_worker(request: dict[str, Any], files: list[int]) -> None:
    """In the copy: forget the template, then what a worker of its own process does."""
    os.setsid()
    _close_others(keep={0, 1, 2, *files})
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request["environ"])
    # What a process of its own would have found out for itself.
    tempfile.tempdir = None
    importlib.invalidate_caches()
    random.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"env-worker", 0, 0, 0)
    worker.run(files, request["directory"], Confinement.from_json(request["confinement"]))


def _close_others(*, keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with contextlib.suppress(OSError):  # the one of this listing is closed already
                os.close(int(name))


if __name__ == "__main__":
    main()
