"""One environment worker process, seen from the env-server: start, talk, notice its death, kill."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Self

from millrace.env_server.frames import encode_frame, read_frame
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import env_service_pb2, env_worker_pb2, rollout_pb2
from millrace.telemetry import waits
from millrace.telemetry.settings import Settings, variable_name

logger = logging.getLogger(__name__)

# The worker answers a deadline by itself within its own cancellation grace (2 s). A worker that has not answered this
# long after a rollout's deadline is blocked, and with it every rollout that it plays.
DEFAULT_BLOCKED_GRACE_S = 12.0
_CLOSE_S = 6.0
# A worker answers an empty command with an empty report at once, unless its event loop or the whole process stands
# still. Who is silent for longer is a visible wait, and overdue after that; only a rollout's deadline ends it, because
# environments may block their loop for a while.
_PING_S = 1.0
_SILENT_S = 3.0
_SILENT_OVERDUE_S = 8.0
# Where our processes are is no business of an environment; how to log is its worker's.
_WITHHELD = {variable_name(part.name) for part in fields(Settings)} - {"MILLRACE_LOG_LEVEL", "MILLRACE_LOG_JSON"}
_STORE_CREDENTIALS = "AWS_"


class WorkerDiedError(Exception):
    """The worker ended while it played. `is_blocked` says that the env-server killed it because it did not answer."""

    def __init__(self, message: str, *, is_blocked: bool) -> None:
        super().__init__(message)
        self.is_blocked = is_blocked


class EnvLoadError(Exception):
    """The environment could not be loaded."""

    def __init__(self, error_type: str, message: str) -> None:
        super().__init__(message)
        self.error_type = error_type


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """A running worker. Made by `spawn`; `loaded` and `exited` tell where it is."""

    process: asyncio.subprocess.Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str
    blocked_grace_s: float
    loaded: asyncio.Future[env_worker_pb2.EnvLoaded] = field(init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _plays: dict[int, asyncio.Future[list[rollout_pb2.Rollout]]] = field(default_factory=dict, init=False)
    _next_play_id: int = field(default=1, init=False)
    _blocked_reason: str = field(default="", init=False)
    _heard: float = field(default=0.0, init=False)
    _listener: asyncio.Task[None] = field(init=False)
    _pulse: asyncio.Task[None] = field(init=False)

    @classmethod
    async def spawn(
        cls, env: env_service_pb2.EnvSpec, *, name: str, blocked_grace_s: float = DEFAULT_BLOCKED_GRACE_S
    ) -> Self:
        """Start a worker and tell it what to load. In a session of its own, so that its children die with it."""
        ours, theirs = socket.socketpair()
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "millrace.env_server.worker",
                "--fd",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=worker_environ(os.environ),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            theirs.close()
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(process=process, reader=reader, writer=writer, name=name, blocked_grace_s=blocked_grace_s)
        worker.loaded = asyncio.get_running_loop().create_future()
        worker._listener = asyncio.create_task(worker._listen(), name=f"listen {name}")
        worker._pulse = asyncio.create_task(worker._watch_pulse(), name=f"pulse {name}")
        await worker._send(env_worker_pb2.WorkerCommand(load=env_worker_pb2.LoadEnv(env=env)))
        logger.info("env worker started", extra={"worker": name, "pid": process.pid, "env": env.id})
        return worker

    @property
    def num_playing(self) -> int:
        """Plays that it has not answered."""
        return len(self._plays)

    @property
    def is_ready(self) -> bool:
        """Loaded and alive."""
        return not self._ended.is_set() and self.loaded.done() and self.loaded.exception() is None

    async def wait_ended(self) -> None:
        """Wait for its end, as long as it takes."""
        await self._ended.wait()

    async def play(self, request: env_service_pb2.PlayGroupRequest, *, tokenizer_dir: str) -> list[rollout_pb2.Rollout]:
        """Play the request's members; one rollout per member. Raises WorkerDiedError."""
        if self._ended.is_set():
            raise WorkerDiedError(f"worker {self.name} had ended already", is_blocked=False)
        play_id, self._next_play_id = self._next_play_id, self._next_play_id + 1
        answer: asyncio.Future[list[rollout_pb2.Rollout]] = asyncio.get_running_loop().create_future()
        self._plays[play_id] = answer
        try:
            play = env_worker_pb2.PlayMembers(play_id=play_id, request=request, tokenizer_dir=tokenizer_dir)
            await self._send(env_worker_pb2.WorkerCommand(play=play))
            return await self._answer(answer, request.rollout_timeout_seconds + self.blocked_grace_s)
        except asyncio.CancelledError:
            cancel = env_worker_pb2.CancelPlay(play_id=play_id)
            with contextlib.suppress(ConnectionError):
                self.writer.write(encode_frame(env_worker_pb2.WorkerCommand(cancel=cancel)))
            raise
        finally:
            self._plays.pop(play_id, None)

    async def _answer(
        self, answer: asyncio.Future[list[rollout_pb2.Rollout]], timeout_s: float
    ) -> list[rollout_pb2.Rollout]:
        await asyncio.wait({answer}, timeout=timeout_s)
        if not answer.done():
            self.kill(f"blocked: no answer {self.blocked_grace_s:g} s after a rollout's deadline")
            await self._ended.wait()  # SIGKILL: the kernel ends it
        return await answer

    def kill(self, reason: str) -> None:
        """SIGKILL its process group; its plays end with WorkerDiedError."""
        if not self._ended.is_set():
            logger.warning("env worker killed", extra={"worker": self.name, "reason": reason})
            self._blocked_reason = self._blocked_reason or reason
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """Close the socket, which ends it; kill it if it does not end."""
        self.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._ended.wait()
        except TimeoutError:
            self.kill("did not end when asked")
            await self._ended.wait()

    async def _send(self, command: env_worker_pb2.WorkerCommand) -> None:
        # A worker that died meanwhile is noticed by the listener, which ends the play.
        with contextlib.suppress(ConnectionError):
            self.writer.write(encode_frame(command))
            await self.writer.drain()

    async def _watch_pulse(self) -> None:
        """Ask for a sign of life once per second; its silence is a wait of this env-server. Ends with the worker."""
        await asyncio.wait({self.loaded})  # before that it cannot answer: loading has a deadline of its own
        wait = waits.LastingWait()
        looked = self._heard = time.monotonic()
        try:
            while not self.writer.is_closing():
                self.writer.write(encode_frame(env_worker_pb2.WorkerCommand()))
                await asyncio.sleep(_PING_S)
                now = time.monotonic()
                if now - looked > _PING_S + _SILENT_S:
                    self._heard = now  # this process itself stood still
                looked = now
                silent_s = now - self._heard
                if silent_s < _SILENT_S or not self._plays:
                    wait.over()
                    continue
                wait.on(
                    f"env worker {self.name} (pid {self.process.pid}), which has not answered for {silent_s:.0f} s: "
                    f"frozen, or blocked by the environment's code; {len(self._plays)} rollouts wait",
                    waits_on=f"env worker {self.name}",
                    key="silent",
                    deadline_s=_SILENT_OVERDUE_S,
                )
        finally:
            wait.over()

    async def _listen(self) -> None:
        """Read reports until the worker closes its socket, then collect its end: every waiter hears of it."""
        try:
            while (report := await read_frame(self.reader, env_worker_pb2.WorkerReport())) is not None:
                self._take(report)
        except CorruptObjectError as error:
            self.kill(str(error))
        finally:
            await self._reap()
            self._end()

    async def _reap(self) -> None:
        # A worker that closed its socket ends within its own exit time; one that does not is killed.
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.process.wait()
        except TimeoutError:
            self.kill("closed its socket and did not end")
            await self.process.wait()
        # Children of the environment outlive a worker that crashed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _take(self, report: env_worker_pb2.WorkerReport) -> None:
        self._heard = time.monotonic()
        match report.WhichOneof("report"):
            case None:
                return  # the answer to a ping
            case "loaded":
                if not self.loaded.done():
                    self.loaded.set_result(report.loaded)
            case "failed":
                if not self.loaded.done():
                    self.loaded.set_exception(EnvLoadError(report.failed.error_type, report.failed.error_message))
            case "ended":
                answer = self._plays.get(report.ended.play_id)
                if answer is not None and not answer.done():
                    answer.set_result(list(report.ended.rollouts))
            case other:
                logger.error("unknown report of an env worker", extra={"worker": self.name, "report": other})

    def _end(self) -> None:
        how = self._blocked_reason or describe_exit(self.process.returncode)
        self._ended.set()
        self._pulse.cancel()
        self.writer.close()
        if not self.loaded.done():
            self.loaded.set_exception(
                EnvLoadError("WorkerDied", f"the environment's process ended while loading: {how}")
            )
        self.loaded.exception()  # retrieved: nobody may be waiting for it any more
        for answer in self._plays.values():
            if not answer.done():
                error = WorkerDiedError(f"worker {self.name} died: {how}", is_blocked=bool(self._blocked_reason))
                answer.set_exception(error)
        logger.info("env worker ended", extra={"worker": self.name, "how": how})


def worker_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker inherits: everything but our placement (Redis and its password, the store) and the store's keys.

    Environments are foreign code that runs code of models: neither may write to the log or the store. All `AWS_*` goes,
    because profiles and role files lead to the same keys; an environment that needs AWS of its own gets it by its args.
    """
    return {
        key: value for key, value in environ.items() if key not in _WITHHELD and not key.startswith(_STORE_CREDENTIALS)
    }


def describe_exit(returncode: int | None) -> str:
    """`exit code 17` or `killed by SIGKILL`."""
    if returncode is not None and returncode < 0:
        try:
            return f"killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"killed by signal {-returncode}"
    return f"exit code {returncode}"
