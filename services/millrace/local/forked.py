"""The supervisor's end of the fork server: starts it, asks it for processes, hears how they end.

Nothing depends on it: while it is away, refuses or does not answer, a process is started in the ordinary way.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from millrace.local.fork_server import MAX_MESSAGE_BYTES, ROOM, ROOM_BYTES
from millrace.telemetry import waits

log = logging.getLogger(__name__)

VARIABLE = "MILLRACE_FORK_SERVER"
"""0 has every service of a one-machine stack start as a program of its own."""
NEEDS: Mapping[str, Sequence[str]] = {
    "millrace.orchestrator.main": ("millrace.orchestrator.main", "millrace.orchestrator.serve"),
    "millrace.env_server.main": ("millrace.env_server.main", "millrace.env_server.run"),
    "millrace.inference.main": (
        "millrace.inference.main",
        "millrace.inference.replica",
        "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto",
    ),
    "millrace.trainer.main": (
        "millrace.trainer.main",
        "millrace.trainer.serve",
        "millrace.trainer.distributed",
        "millrace.trainer.job",
        "millrace.trainer.model",
    ),
}
"""What each service imports before it works, lighter ones first."""
WITH_TORCH = ("millrace.inference.main", "millrace.trainer.main")
FIRST_S = 120.0
"""Longest wait for an answer while the server imports for the first time."""
ANSWERS_WITHIN_S = 5.0
"""Later: a fork takes milliseconds, on a busy machine the turn of the server more."""
_GPUS = ("/dev/nvidiactl", "/dev/kfd")


def needs(modules: Iterable[str], environ: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """What to import for those of these main modules that may be forked.

    None of them elsewhere than on Linux, or where `VARIABLE` says 0. What uses a GPU is started afresh: what a driver
    did in a process does not survive a fork.
    """
    if environ.get(VARIABLE, "1") == "0" or not hasattr(os, "pidfd_open") or not Path("/proc/self/stat").exists():
        return {}
    has_gpu = any(Path(path).exists() for path in _GPUS)
    return {name: NEEDS[name] for name in modules if name in NEEDS and not (has_gpu and name in WITH_TORCH)}


class ForkedProcess:
    """A process that the fork server has started; has what is used of `asyncio.subprocess.Process`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Returns when it has ended, with its exit code, or minus the number of the signal."""
        await self._ended.wait()  # as long as the process lives
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def end(self, code: int) -> None:
        """It has ended so."""
        if self.returncode is None:
            self.returncode = code
            self._ended.set()

    def watch(self) -> None:
        """Notice its end without the server, which alone would learn the exit code: it counts as killed."""
        if self.returncode is not None:
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.end(-signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self.end(-signal.SIGKILL)

        loop.add_reader(descriptor, ended)


class ForkServerProcess:
    """One fork server at a time; a dead one is started again with the next process that is asked for."""

    def __init__(self, needs: Mapping[str, Sequence[str]], *, env: Mapping[str, str], log_path: Path) -> None:
        """`needs` names the main modules that may be forked, and what is imported for each, in this order.

        `env` is what every one of them inherits.
        """
        self._needs = needs
        self._env = dict(env)
        self._log_path = log_path
        self._numbers = itertools.count(1)
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._is_loaded = False
        self._is_first = True

    @property
    def pid(self) -> int | None:
        """Process id of the server of now; None if there is none."""
        return None if self._server is None or self._socket is None else self._server.pid

    def start(self, marks: Mapping[str, str], *, pass_fds: Sequence[int] = ()) -> None:
        """Start the server unless it runs; it begins to import. Its children have `pass_fds` open, too."""
        if self._socket is not None:
            return
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAX_MESSAGE_BYTES)
        needs = [f"{module}={','.join(needed)}" for module, needed in self._needs.items()]
        room = "-" * 256  # of the command line, for the longer ones of children
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log_path.open("ab") as output:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "millrace.local.fork_server", str(theirs.fileno()), room, *needs],
                # numpy's own threads would forbid to fork; torch's begin later, and are as many as the service wants
                env={**self._env, **marks, "OPENBLAS_NUM_THREADS": "1", ROOM: "_" * ROOM_BYTES},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(theirs.fileno(), *pass_fds),
            )
        self._socket, self._is_loaded = ours, False
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def can_fork(self, module: str) -> bool:
        """Whether a process of this module should be asked for: for what has died, only of a server that is ready."""
        return module in self._needs and self._socket is not None and (self._is_first or self._is_loaded)

    async def fork(
        self, module: str, argv: Sequence[str], *, env: Mapping[str, str], marks: Mapping[str, str], output: int
    ) -> ForkedProcess | None:
        """A new process; None if it has to be started in the ordinary way."""
        if self._socket is None or not self.can_fork(module):
            return None
        number = next(self._numbers)
        message = {
            "id": number,
            "module": module,
            "argv": list(argv),
            "env": dict(env),
            "marks": [f"{name}={value}" for name, value in marks.items()],
        }
        timeout_s = ANSWERS_WITHIN_S if self._is_loaded else FIRST_S
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            socket.send_fds(self._socket, [json.dumps(message).encode()], [output])
            with waits.waiting(f"{module} to be forked", waits_on="fork server", deadline_s=timeout_s):
                async with asyncio.timeout(timeout_s):
                    said = await answer
        except (OSError, TimeoutError) as error:
            log.warning("the fork server does not answer", extra={"error": repr(error)})
            self.stop()
            return None
        finally:
            self._answers.pop(number, None)
        if "pid" not in said:
            log.warning("the fork server refuses", extra={"of": module, "why": said.get("refused", "")})
            return None
        return self._children[said["pid"]]

    def stop(self) -> None:
        """End the server; its children live on, and their ends are noticed without it. Idempotent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None
        for child in self._children.values():
            child.watch()
        self._children.clear()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"refused": "the fork server has ended"})

    def _hear(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            log.warning("the fork server has ended")
            self.stop()
            return
        said = json.loads(data)  # of our own server, over a socket that nobody else has
        if "loaded" in said:
            self._is_loaded, self._is_first = True, False
            return
        if "ended" in said:
            if child := self._children.pop(said["ended"], None):
                child.end(said["code"])
            return
        if "pid" in said:
            child = self._children[said["pid"]] = ForkedProcess(said["pid"])
            if (answer := self._answers.get(said["id"])) is None or answer.done():
                with contextlib.suppress(ProcessLookupError):  # nobody waits for it any more
                    os.kill(child.pid, signal.SIGKILL)
                return
        if (answer := self._answers.get(said["id"])) and not answer.done():
            answer.set_result(said)
