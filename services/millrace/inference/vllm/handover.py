"""The messages between the launcher and the vLLM server that it has started: which one serves the replica's address.

    launcher                                       vLLM server (`server/`)
    ──▶ {"flags": …}                               checks them
    ◀── {"violations": […]}
    ──▶ {"argv": […]}                              loads the model, seconds to minutes; the launcher answers for it
    ◀── {"event": "taking"}                        `take_over`: the engine is up, the plugin wants the gRPC address
        stops its own server
    ──▶ {"event": "take_address"}                         binds the address, registers under the same worker id
    ◀── {"event": "restart", "reason": …}          `ask_restart`: a policy came that this engine cannot take

Over a channel (`millrace.processes.channel`) whose number is in MILLRACE_LAUNCHER_FD. A vLLM server that was started by
hand has none, and every function here does nothing.
"""

import asyncio
import os
from typing import Any

from millrace.errors import UnavailableError
from millrace.processes.channel import Channel

FD_VARIABLE = "MILLRACE_LAUNCHER_FD"
PARENT_VARIABLE = "MILLRACE_LAUNCHER_PID"
WORKER_ID_VARIABLE = "MILLRACE_WORKER_ID"
OWNED_DIRECTORY_VARIABLE = "MILLRACE_OWNED_DIR"
"""Variable with the directory of the replica's policy, which the launcher deletes."""
TAKE_OVER_DEADLINE_S = 30.0

_line: "Line | None" = None


class Line:
    """The server's end of the channel, blocking."""

    def __init__(self, channel: Channel) -> None:
        """Take the server's end of the channel to the launcher."""
        self._channel = channel

    def send(self, message: dict[str, Any]) -> None:
        """Send one message to the launcher; raise UnavailableError if it is gone."""
        try:
            self._channel.send(message)
        except OSError as error:
            raise _gone() from error

    def receive(self, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Return the launcher's next message (blocking; without `timeout_s` as long as it takes).

        Raises UnavailableError if the launcher is gone, or sends none in time.
        """
        try:
            received = self._channel.receive(timeout_s=timeout_s)
        except OSError as error:
            raise _gone() from error
        if received is None:
            raise _gone()
        return received[0]


def line() -> Line | None:
    """Return the line to the launcher, opened at the first call; None if there is no launcher."""
    global _line
    if _line is None and (number := os.environ.pop(FD_VARIABLE, "")):
        _line = Line(Channel.inherited(int(number)))
    return _line


async def take_over() -> None:
    """Ask the launcher for the replica's gRPC address and return when the address is free; at once without a launcher.

    Must be called once, before binding the address. Raises UnavailableError if the launcher does not answer.
    """
    if (to_launcher := line()) is not None:
        await asyncio.to_thread(_take_over, to_launcher)


def ask_restart(reason: str) -> bool:
    """Ask the launcher to start a new vLLM for the next policy; return False if there is no launcher.

    The launcher stops this process soon after; the orchestrator then asks the replica for its policy again.
    """
    if (to_launcher := line()) is None:
        return False
    to_launcher.send({"event": "restart", "reason": reason})
    return True


def _take_over(to_launcher: Line) -> None:
    """Ask the launcher for the address and wait for its answer (blocking)."""
    to_launcher.send({"event": "taking"})
    to_launcher.receive(timeout_s=TAKE_OVER_DEADLINE_S)


def _gone() -> UnavailableError:
    """Make the error of a vLLM server whose launcher does not answer."""
    return UnavailableError(
        "the launcher of this vLLM server does not answer", reason="LAUNCHER_GONE", remedy="start the replica again"
    )
