"""The env-server's side of the template (`template`): start it, ask it for workers, hear of their ends, replace it."""

import asyncio
import contextlib
import itertools
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from millrace.decoding import decode_object
from millrace.errors import CorruptObjectError
from millrace.telemetry import waits

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 128 * 1024
# It imports 5 CPU-seconds' worth of libraries; a busy machine has its own idea of seconds.
_READY_S = 180.0
_FORK_S = 20.0
# A template that ends this often, each time within the minute, is not tried again for a while.
_MAX_SHORT_LIVES = 3
_SHORT_LIFE_S = 60.0
_PAUSE_S = 300.0


class ForkServerError(Exception):
    """No worker was forked; one can be started by itself."""


class ForkedProcess:
    """A worker that the template forked."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.peak_bytes = 0
        self._ended = asyncio.Event()

    async def wait(self) -> int | None:
        """Its return code, once it has ended."""
        await self._ended.wait()
        return self.returncode

    def note_end(self, returncode: int, peak_bytes: int) -> None:
        """It is gone."""
        self.returncode, self.peak_bytes = returncode, peak_bytes
        self._ended.set()


class ForkServer:
    """One template at a time. Of one event loop."""

    def __init__(self, environ: Callable[[], Mapping[str, str]], cwd: str) -> None:
        """`environ` gives the variables of the template, `cwd` is its working directory."""
        self._environ = environ
        self._cwd = cwd
        self._template: _Template | None = None
        self._starting = asyncio.Lock()
        self._num_short_lives = 0
        self._not_before = 0.0

    async def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        """A copy of the template that works by this request with these open files. Raises ForkServerError."""
        template = await self._ready()
        with waits.waiting("a copy of the template of env workers", waits_on="env worker", deadline_s=_FORK_S):
            try:
                async with asyncio.timeout(_FORK_S):
                    return await template.fork(request, files)
            except TimeoutError:
                template.kill()
                raise ForkServerError(f"the template did not answer within {_FORK_S:g} s and was killed") from None

    async def warm(self) -> None:
        """Start the template, if there is none; what goes wrong is told by the next `fork`."""
        with contextlib.suppress(ForkServerError):
            await self._ready()

    async def close(self) -> None:
        """End the template, and with it every copy."""
        if self._template is not None:
            await self._template.close()

    async def _ready(self) -> "_Template":
        """The template, once it has imported everything; a new one if the last one ended."""
        async with self._starting:
            if self._template is None or self._template.is_ended:
                self._look_back()
                self._template = await _Template.start(self._environ(), self._cwd)
        template = self._template
        with waits.shared("the template of env workers to import", waits_on="env worker", deadline_s=_READY_S):
            try:
                async with asyncio.timeout(_READY_S):
                    await asyncio.shield(template.ready)
            except TimeoutError:
                template.kill()
                raise ForkServerError(f"the template was not ready within {_READY_S:g} s and was killed") from None
        return template

    def _look_back(self) -> None:
        """Raise ForkServerError while no new template shall be tried."""
        now = time.monotonic()
        if now < self._not_before:
            raise ForkServerError(f"its templates ended {_MAX_SHORT_LIVES} times; the next is tried later")
        if self._template is None:
            return
        logger.warning("template of env workers is replaced", extra={"pid": self._template.pid})
        self._num_short_lives = self._num_short_lives + 1 if self._template.age_s < _SHORT_LIFE_S else 0
        if self._num_short_lives >= _MAX_SHORT_LIVES:
            self._num_short_lives, self._not_before = 0, now + _PAUSE_S
            raise ForkServerError(f"its templates ended {_MAX_SHORT_LIVES} times; the next is tried later")


class _Template:
    """A running template."""

    def __init__(self, process: asyncio.subprocess.Process, channel: socket.socket) -> None:
        self._process = process
        self._channel = channel
        self._began = time.monotonic()
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[ForkedProcess]] = {}
        self._children: dict[int, ForkedProcess] = {}
        self._loop = asyncio.get_running_loop()
        self.is_ended = False
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(channel, self._hear)

    @classmethod
    async def start(cls, environ: Mapping[str, str], cwd: str) -> "_Template":
        """Start one. Raises ForkServerError."""
        if sys.platform != "linux":
            raise ForkServerError("only Linux can watch forked processes as this needs")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "millrace.env_server.template",
                f"--fd={theirs.fileno()}",
                pass_fds=[theirs.fileno()],
                # pyarrow's allocator would start a thread.
                env={**environ, "JE_ARROW_MALLOC_CONF": "background_thread:false"},
                cwd=cwd,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ForkServerError(f"the template could not be started: {error}") from error
        finally:
            theirs.close()
        ours.setblocking(False)
        return cls(process, ours)

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    @property
    def age_s(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._began

    async def fork(self, request: Mapping[str, Any], files: Sequence[int]) -> ForkedProcess:
        """Ask for a copy. Raises ForkServerError."""
        number = next(self._numbers)
        message = json.dumps({**request, "fork": number}).encode()
        if len(message) > _MAX_MESSAGE_BYTES:
            raise ForkServerError(f"its variables have {len(message)} bytes, the most is {_MAX_MESSAGE_BYTES}")
        answer: asyncio.Future[ForkedProcess] = self._loop.create_future()
        self._asked[number] = answer
        try:
            socket.send_fds(self._channel, [message], list(files))
            return await answer
        except OSError as error:
            raise ForkServerError(f"the template cannot be asked: {error}") from error
        finally:
            self._asked.pop(number, None)

    def kill(self) -> None:
        """SIGKILL it; its copies die with it."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """End it."""
        self._end("it was closed")
        self.kill()
        await self._process.wait()

    def _hear(self) -> None:
        """Take what it says."""
        try:
            while data := self._channel.recv(_MAX_MESSAGE_BYTES):
                self._take(decode_object(data, what="what the template said", reason="FRAME_UNREADABLE"))
        except BlockingIOError:
            return
        except CorruptObjectError as error:
            logger.error("template of env workers is killed", extra={"problem": str(error)})
            self.kill()
        except OSError as error:
            logger.warning("template of env workers is gone", extra={"problem": str(error)})
        self._end("it ended")

    def _take(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": True, "threads": threads}:
                logger.info("template of env workers is ready", extra={"pid": self.pid, "threads": threads})
                if not self.ready.done():
                    self.ready.set_result(None)
            case {"forked": number, "pid": pid}:
                child = self._children[pid] = ForkedProcess(pid)
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_result(child)  # else nobody holds its sockets any more, and it ends
            case {"refused": number, "problem": problem}:
                answer = self._asked.get(number)
                if answer is not None and not answer.done():
                    answer.set_exception(ForkServerError(str(problem)))
            case {"ended": pid, "status": status, "peak_bytes": peak_bytes}:
                if (child := self._children.pop(pid, None)) is not None:
                    child.note_end(int(status), int(peak_bytes))
            case other:
                logger.error("unknown message of the template of env workers", extra={"said": str(other)[:200]})

    def _end(self, why: str) -> None:
        """Nobody waits for it any more."""
        if self.is_ended:
            return
        self.is_ended = True
        self._loop.remove_reader(self._channel)
        self._channel.close()
        error = ForkServerError(f"the template of env workers: {why}")
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # retrieved: nobody may wait for it
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        for child in self._children.values():
            child.note_end(-signal.SIGKILL, 0)  # the kernel ends them with their parent
        self._children.clear()
