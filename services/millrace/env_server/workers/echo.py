"""Whether an environment's worker process still runs at all, however busy its event loop is.

Environment code may block the worker's event loop for minutes, which only a rollout's deadline ends. A process that is
stopped (SIGSTOP, a debugger, a hanging disk) is another matter: it will not come back by itself, and everything that it
plays waits with it. So a thread of the worker answers every byte on a socket of its own, which needs the interpreter
for a moment but not the loop.
"""

import contextlib
import socket
import threading
import time

_CHUNK_BYTES = 4096


def start_answering(channel: socket.socket) -> None:
    """The worker's side: echo until the other side closes, in a thread."""

    def answer() -> None:
        with contextlib.suppress(OSError):
            while data := channel.recv(_CHUNK_BYTES):
                channel.sendall(data)

    threading.Thread(target=answer, name="echo", daemon=True).start()


class EchoProbe:
    """The env-server's side; call `ask` regularly."""

    def __init__(self, channel: socket.socket, *, stood_still_s: float) -> None:
        """`stood_still_s`: a longer pause between two calls of `ask` says that this process itself did not run."""
        channel.setblocking(False)
        self._channel = channel
        self._stood_still_s = stood_still_s
        self._heard = self._asked = time.monotonic()

    def ask(self) -> float:
        """Seconds since the worker's last sign of life; asks for the next one."""
        now = time.monotonic()
        if now - self._asked > self._stood_still_s:
            self._heard = now
        self._asked = now
        with contextlib.suppress(OSError):  # nothing there yet, or the worker ended: others notice that
            if self._channel.recv(_CHUNK_BYTES):
                self._heard = now
        with contextlib.suppress(OSError):
            self._channel.send(b".")
        return now - self._heard

    def close(self) -> None:
        """Close the socket."""
        self._channel.close()
