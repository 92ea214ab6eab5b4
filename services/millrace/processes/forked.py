"""The client of a fork server: starts it, requests processes, and gets their ends.

Nothing depends on it: if it is down, refuses or does not answer, a process is started in the ordinary way.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.processes.channel import Channel, Message
from millrace.processes.fork_server import ROOM, ROOM_BYTES

logger = logging.getLogger(__name__)

_KILL_WAIT_S = 5.0
_SHOWN_ROOM = "-" * 256
"""Fills the server's command line, so that its children's longer ones fit into the same memory."""


class ForkServerError(Exception):
    """Nothing was forked; the program can be started in the ordinary way."""


class ForkedProcess:
    """A process that a fork server has started (a `sessions.Process`)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.peak_bytes = 0
        """Most resident memory that it had, once it has ended; 0 if nobody knows."""
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Wait until the process has ended; return its exit code, or minus the number of the signal."""
        await self._ended.wait()  # as long as the process lives
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int, /) -> None:
        """Send the signal; ProcessLookupError if the process has ended."""
        if self.returncode is not None:
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, number)

    def end(self, code: int, *, peak_bytes: int = 0) -> None:
        """Record that the process ended with exit code `code` (minus the signal's number after a signal), and wake its
        waiters.

        Later calls change nothing. `peak_bytes` is the most resident memory that it had; 0 if that is unknown.
        """
        if self.returncode is None:
            self.returncode, self.peak_bytes = code, peak_bytes
            self._ended.set()

    def watch(self) -> None:
        """Watch for the process's end without the fork server, on the running event loop; return at once.

        It then counts as killed (minus SIGKILL), because only the server, its parent, could learn its exit code.
        """
        if self.returncode is not None:
            return
        # A pidfd becomes readable when its process ends, also for a process that is not our child.
        try:
            descriptor = os.pidfd_open(self.pid)
        except ProcessLookupError:
            self.end(-signal.SIGKILL)
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            """Record that the process has ended, and watch no longer."""
            loop.remove_reader(descriptor)
            os.close(descriptor)
            self.end(-signal.SIGKILL)

        loop.add_reader(descriptor, ended)


class ForkServerClient:
    """One server process at a time: `start` again when it has ended."""

    def __init__(
        self, needs: Mapping[str, Sequence[str]], *, log_path: Path | None = None, module: str | None = None
    ) -> None:
        """Create the client.

        `needs` names the main modules that may be forked, and for each what the server imports before. The server's
        output is appended to `log_path`; None: it goes where ours goes. `module` is the program to run instead of
        `millrace.processes.fork_server`.
        """
        self._needs = needs
        self._log_path = log_path
        self._module = module or "millrace.processes.fork_server"
        self._numbers = itertools.count(1)
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._answers: dict[int, asyncio.Future[Message]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._loaded = asyncio.Event()
        self._is_first = True

    @property
    def pid(self) -> int | None:
        """Return the process id of the current server; None if there is none."""
        return None if self._server is None or self._channel is None else self._server.pid

    @property
    def is_loaded(self) -> bool:
        """Return whether the current server has imported everything that it was started for."""
        return self._channel is not None and self._loaded.is_set()

    async def wait_loaded(self, *, timeout_s: float) -> None:
        """Wait until the current server has imported everything that it was started for.

        Raises ForkServerError if the server ended, or if it is killed here because it was not ready after `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                await self._loaded.wait()
        except TimeoutError:
            self.stop()
            raise ForkServerError(f"the fork server was not ready within {timeout_s:g} s and was killed") from None
        if self._channel is None:
            raise ForkServerError("the fork server has ended")

    def can_fork(self, module: str) -> bool:
        """Return whether `fork` may be called for this main module now.

        The first server may be asked while it still imports; one that replaces a dead server only once it has imported
        all.
        """
        return module in self._needs and self._channel is not None and (self._is_first or self._loaded.is_set())

    def start(self, env: Mapping[str, str], *, cwd: Path | None = None, pass_fds: Sequence[int] = ()) -> None:
        """Start the server with the environment `env`, unless one runs; it begins to import, and this returns at once.

        Its children have the files `pass_fds` open, too, under the same numbers. May raise OSError.
        """
        if self._channel is not None:
            return
        needs = [f"{module}={','.join(needed)}" for module, needed in self._needs.items()]
        with Channel.to_child() as (ours, theirs), contextlib.ExitStack() as stack:
            output = None
            if self._log_path is not None:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                output = stack.enter_context(self._log_path.open("ab"))
            self._server = subprocess.Popen(
                [sys.executable, "-m", self._module, str(theirs), _SHOWN_ROOM, *needs],
                # Threads would forbid to fork: numpy's (torch's begin later, as many as wanted), and pyarrow's.
                env={
                    **env,
                    "OPENBLAS_NUM_THREADS": "1",
                    "JE_ARROW_MALLOC_CONF": "background_thread:false",
                    ROOM: "_" * ROOM_BYTES,
                },
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                pass_fds=(theirs, *pass_fds),
            )
        self._channel, self._loaded = ours, asyncio.Event()
        ours.listen(self._handle, self._note_end)

    def preload(self, module: str, need: str) -> None:
        """Have the server import the module `need`, too, before it forks the next process of the main module `module`.

        Do nothing without a server.
        """
        if self._channel is not None:
            with contextlib.suppress(OSError):  # it is gone, which `_note_end` reports
                self._channel.send({"id": next(self._numbers), "module": module, "preload": need})

    async def fork(
        self,
        module: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        marks: Mapping[str, str],
        files: Mapping[int, int],
        timeout_s: float,
    ) -> ForkedProcess:
        """Fork a process that runs the main module `module` with the arguments of `argv` after its third, and return
        it.

        `argv` is the command line that `ps` shows, such as `python -m MODULE …`; `marks` are variables of `env` that
        /proc shows. `files` are open files of this process by the numbers that they get in the child. Raises
        ForkServerError if the server refuses, or if it is killed here because it did not answer within `timeout_s`.
        """
        if self._channel is None:
            raise ForkServerError("there is no fork server")
        number = next(self._numbers)
        message = {
            "id": number,
            "module": module,
            "argv": list(argv),
            "env": dict(env),
            "marks": [f"{name}={value}" for name, value in marks.items()],
            "files": list(files),
        }
        # Registered before the message is sent: the answer may be read as soon as this task waits.
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            self._channel.send(message, list(files.values()))
            answered = await _answer_within(answer, timeout_s=timeout_s)
        except ValueError as error:
            raise ForkServerError(str(error)) from None
        except (OSError, TimeoutError) as error:
            self.stop()
            raise ForkServerError(f"the fork server does not answer and was killed: {error!r}") from None
        finally:
            self._answers.pop(number, None)
        if "pid" not in answered:
            raise ForkServerError(f"the fork server refuses {module}: {answered.get('refused', '')}")
        return answered["child"]

    def stop(self) -> None:
        """Kill the server and refuse pending requests; its children live on and are watched without it. Idempotent."""
        # Closed first, so that the server's death is not reported as an unexpected end (`_note_end`).
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a hanging disk keeps what is killed
                self._server.wait(_KILL_WAIT_S)
            self._server = None
        # With their parent gone nobody reports how they end: each is watched by itself from now on.
        for child in self._children.values():
            child.watch()
        self._children.clear()
        self._loaded.set()  # nobody waits for it any more
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result({"refused": "the fork server has ended"})

    def _note_end(self, why: str) -> None:
        """Log the end of the server's channel, with the reason `why`, and stop what is left of the server."""
        logger.warning("the fork server is gone", extra={"of": self._module, "why": why})
        self.stop()

    def _handle(self, message: Message) -> None:
        """Handle a message of the server: that it has loaded, that a child has ended, or its answer to a request.

        A child that was forked for a request whose caller waits no more is killed.
        """
        if "loaded" in message:
            logger.info("the fork server is ready", extra={"pid": self.pid, "of": self._module})
            self._loaded.set()
            self._is_first = False
        elif "ended" in message:
            if child := self._children.pop(message["ended"], None):
                child.end(message["code"], peak_bytes=message["peak_bytes"])
        else:
            answer = self._answers.get(message["id"])
            if "pid" in message:
                # Registered here, and not when the caller wakes: the next message may already report its end.
                child = self._children[message["pid"]] = ForkedProcess(message["pid"])
                message = {**message, "child": child}
                if answer is None or answer.done():
                    _kill_unwanted(message)
            if answer is not None and not answer.done():
                answer.set_result(message)


async def _answer_within(answer: asyncio.Future[Message], *, timeout_s: float) -> Message:
    """Wait for the server's answer, at most `timeout_s`, and return it.

    Raises TimeoutError, or CancelledError; a process that was forked in the same moment is killed then.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except BaseException:  # raised on
        if answer.done() and not answer.cancelled():
            _kill_unwanted(answer.result())
        raise


def _kill_unwanted(answered: Message) -> None:
    """Kill the process that an answer of the server names, if it names one: nobody waits for it any more."""
    if "child" in answered:
        with contextlib.suppress(ProcessLookupError):
            answered["child"].send_signal(signal.SIGKILL)
