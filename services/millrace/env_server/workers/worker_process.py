"""One environment worker process, seen from the env-server: start, talk, notice its death, kill."""

import asyncio
import contextlib
import ipaddress
import json
import logging
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from millrace.decoding import decode_object
from millrace.env_server.engine_access import ENGINE, MAX_ATTEMPTS, engine_token_for_workers, retry_pause_s
from millrace.env_server.isolation import limits as census
from millrace.env_server.isolation.limits import (
    Death,
    DeathCause,
    EnvLoadError,
    WorkerDiedError,
    WorkerLimits,
    describe_death,
)
from millrace.env_server.wire import loaded_from_wire
from millrace.env_server.workers.frames import EchoProbe, encode_frame, read_frame
from millrace.env_server.workers.starter import Started, WorkerStarter
from millrace.errors import CorruptObjectError
from millrace.internal.v1 import env_worker_pb2
from millrace.internal.v1.play_pb2 import EnvSpec, PlayGroupRequest
from millrace.processes.forked import ForkedProcess
from millrace.processes.sessions import Process
from millrace.processes.table import kill_session
from millrace.rollouts.requests import LoadedEnv
from millrace.rollouts.types import Rollout
from millrace.rollouts.wire import purpose_from_wire, rollout_from_proto
from millrace.telemetry import faults, waits
from millrace.telemetry.faults import Point

logger = logging.getLogger(__name__)

# The worker answers a deadline by itself within its own cancellation grace (2 s). A worker that has not answered this
# long after a rollout's deadline is blocked, and with it every rollout that it plays.
DEFAULT_BLOCKED_GRACE_S = 12.0
# One call that waits in the event loop (a sleep, a lock, a server that does not answer) blocks every rollout of the
# worker. A call that computes may be a reward that takes its time; its rollout's deadline bounds it.
DEFAULT_WAITS_S = 20.0
BLOCKED_VARIABLE = "MILLRACE_ENV_BLOCKED_S"
BLOCKED_REMEDY = (
    "what waits must be awaited (`asyncio.to_thread` makes any call awaitable) and have a time-out; "
    f"{BLOCKED_VARIABLE} allows the env-server's workers more than {DEFAULT_WAITS_S:g} s"
)
_COMPUTES_SHARE = 0.1
_CLOSE_S = 6.0
# A worker answers an empty command at once, unless its event loop is blocked, and a byte on its echo socket unless its
# whole process is frozen. A worker that is silent for longer is a visible wait. A blocked loop is overdue after that,
# and ended later, because environments may block it for a while; a process that does not run at all is killed. Imports
# hold the interpreter for seconds on a busy machine, so loading has a longer limit.
_PING_S = 1.0
_SILENT_S = 3.0
_SILENT_OVERDUE_S = 8.0
DEFAULT_FROZEN_S = 20.0
_FROZEN_LOADING_S = 60.0
_SHOWN_PLACES = 4

# A worker of level `container` has no connections but those to the engines that the env-server has it play with. Its
# network has no device but loopback, on which every address of the world is. Where an engine is played with, `init` of
# the worker listens at the engine's own address and port and hands the listening socket to the env-server, which takes
# the connections and passes their bytes on. So environments call engines by the same URLs as everywhere, TLS included;
# names are looked up in the worker's own /etc/hosts. Every other address refuses connections at once.

_MAX_MESSAGE_BYTES = 4096
_ASK_S = 10.0
_CONNECT_S = 5.0
_CHUNK_BYTES = 1 << 16
_PORTS = {"http": 80, "https": 443}
# Where engines with names are, for their worker.
_NAMES = ipaddress.ip_network("127.77.0.0/16")


class DoorError(Exception):
    """The worker cannot be connected to that engine."""


class Door:
    """The connections of one worker to its engines, in one event loop."""

    def __init__(self, control: socket.socket, hosts: Path) -> None:
        """Prepare the connections of one worker to its engines.

        `control` is the socket to the worker's `init`, from which listening sockets are got; `hosts` is the file that
        the worker has as /etc/hosts.
        """
        control.settimeout(_ASK_S)
        self._control = control
        self._hosts = hosts
        self._servers: dict[tuple[str, int], asyncio.Server] = {}
        self._names: dict[str, str] = {}
        self._opening = asyncio.Lock()
        self._passing: set[asyncio.Task[None]] = set()

    async def open(self, base_url: str) -> None:
        """Let the confined worker connect to the host and port of `base_url` until `close`; do nothing if it can
        already.

        Raises DoorError, and ConnectionError if the worker has ended.
        """
        parts = urlsplit(base_url)
        host, port = parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0)
        # One at a time: messages on the control socket have no ids, so the next answer is that of the last request.
        async with self._opening:
            address = self._address(host)
            if (address, port) in self._servers:
                return
            with waits.waiting(f"a way out of a worker to {host}:{port}", waits_on="env worker", deadline_s=_ASK_S):
                listener = await asyncio.to_thread(self._ask, address, port)

            def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                """Pass on a connection of the worker to the engine, in a task."""
                passing = asyncio.create_task(_pass_on(reader, writer, host, port), name=f"pass on to {host}:{port}")
                self._passing.add(passing)
                passing.add_done_callback(self._passing.discard)

            self._servers[address, port] = await asyncio.start_server(take, sock=listener)

    async def close(self) -> None:
        """Close all of the worker's connections to engines, and the socket to its `init`."""
        for server in self._servers.values():
            server.close()
        for passing in self._passing:
            passing.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        self._control.close()

    def _address(self, host: str) -> str:
        """Return the IP address at which the worker finds `host`.

        A name gets a loopback address of its own, which is written into the worker's /etc/hosts.
        """
        if host == "localhost":
            return "127.0.0.1"
        with contextlib.suppress(ValueError):
            return str(ipaddress.ip_address(host))
        if host not in self._names:
            # An address of 127/8 for each name, so that two engines with names can have the same port.
            self._names[host] = str(_NAMES[len(self._names) + 1])
            with self._hosts.open("a") as file:
                file.write(f"{self._names[host]} {host}\n")
        return self._names[host]

    def _ask(self, address: str, port: int) -> socket.socket:
        """Have the worker's `init` listen at the address, inside its namespace, and return the listening socket
        (blocking).

        Raises DoorError, or ConnectionError if the worker has ended.
        """
        try:
            self._control.send(json.dumps({"host": address, "port": port}).encode())
            data, files, _, _ = socket.recv_fds(self._control, _MAX_MESSAGE_BYTES, 1)
            if not data:
                raise ConnectionResetError("the worker has ended")
            problem = decode_object(data, what="the answer of init", reason="FRAME_UNREADABLE").get("problem")
        except (TimeoutError, CorruptObjectError) as error:
            raise DoorError(f"the worker has no way to {address}:{port}: {error}") from error
        if not files:
            raise DoorError(f"the worker has no way to {address}:{port}: {problem}")
        return socket.socket(fileno=files[0])


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
    """Connect to the engine at `host` and copy bytes between it and the worker's connection, until both sides have
    ended.

    `reader` and `writer` are the worker's connection. If the connection to the engine cannot be made or breaks off, the
    worker's is reset, and nothing is raised.
    """
    theirs: asyncio.StreamWriter | None = None
    try:
        answers, theirs = await _connect(host, port)
        async with asyncio.TaskGroup() as group:
            group.create_task(_copy(reader, theirs))
            group.create_task(_copy(answers, writer))
        theirs.close()
        writer.close()  # what was written is still sent
    except* OSError as errors:
        # The worker sees what it would see without us: its connection breaks off.
        why = "; ".join(str(error) for error in errors.exceptions)
        logger.info("an engine's connection broke off", extra={"engine": f"{host}:{port}", "error": why})
    finally:
        for end in (writer, theirs):
            if end is not None and not end.is_closing():
                # A reset, not an orderly end: the worker must not take half an answer for a whole one.
                end.transport.abort()


async def _connect(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the engine, as often as the worker itself would try without confinement. Raises OSError."""
    with waits.shared(f"{waits.COUNT} connections to the engine at {host}:{port}", waits_on=f"{host}:{port}"):
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(host, port)
            except OSError:
                if attempt == MAX_ATTEMPTS:
                    raise
            await asyncio.sleep(retry_pause_s(attempt))
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes from one connection to another until the first ends, then end the other's sending side."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


@dataclass(frozen=True, slots=True)
class _Play:
    """A request that a worker plays, and the future for its answer."""

    request: PlayGroupRequest
    answer: asyncio.Future[list[Rollout]]

    def checked(self, ended: env_worker_pb2.PlayEnded) -> list[Rollout]:
        """Decode the rollouts with which the worker has answered, and return them, one for each member of the request.

        Raises CorruptObjectError if they are others. A worker runs foreign code, and its rollouts are not checked again
        before the log.
        """
        asked, rollouts = self.request, [rollout_from_proto(rollout) for rollout in ended.rollouts]
        same = (asked.run_uid, purpose_from_wire(asked.purpose), asked.eval_id, asked.ordinal, asked.attempt)
        expected = [(*same, member) for member in asked.members]
        if [(r.run_uid, r.purpose, r.eval_id, r.ordinal, r.attempt, r.member) for r in rollouts] != expected:
            raise CorruptObjectError(f"it answered with other rollouts than those of group {asked.ordinal}")
        return rollouts


@dataclass(eq=False, kw_only=True)
class WorkerProcess:
    """A running worker, made by `spawn`; `loaded` and `wait_ended` wait for its next states."""

    started: Started
    limits: WorkerLimits
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    name: str
    blocked_grace_s: float
    frozen_s: float
    waits_s: float
    echo: EchoProbe
    door: Door | None = None
    """Its connections to engines at level `container`."""
    memory_bytes: int = field(default=0, init=False)
    """Memory of the worker and its children when it was read last."""
    peak_bytes: int = field(default=0, init=False)
    """The most memory that the worker was seen to use."""
    standing_s: float = field(default=0.0, init=False)
    """Seconds for which one call has blocked its loop without computing; 0 without a limit of it."""
    loaded: asyncio.Future[LoadedEnv] = field(init=False)
    _ended: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _plays: dict[int, _Play] = field(default_factory=dict, init=False)
    _next_play_id: int = field(default=1, init=False)
    _is_closing: bool = field(default=False, init=False)
    _killed: tuple[DeathCause, str] | None = field(default=None, init=False)
    _places: Counter[str] = field(default_factory=Counter[str], init=False)
    _heard: float = field(default=0.0, init=False)
    _ready_s: float = field(default=0.0, init=False)
    """Seconds for which it or one of its children was seen ready to run."""
    _moved: tuple[float, float] | None = field(default=None, init=False)
    """When its event loop last made progress, and the seconds that it had computed or been ready to by then."""
    _listener: asyncio.Task[None] = field(init=False)
    _watch: asyncio.Task[None] = field(init=False)

    @classmethod
    async def spawn(
        cls,
        env: EnvSpec,
        starter: WorkerStarter,
        *,
        name: str,
        blocked_grace_s: float = DEFAULT_BLOCKED_GRACE_S,
        frozen_s: float = DEFAULT_FROZEN_S,
        waits_s: float = DEFAULT_WAITS_S,
    ) -> Self:
        """Start a worker and send it the environment to load; return before that is loaded. Raises OSError.

        The worker is killed if it does not answer within `blocked_grace_s` after a rollout's deadline, if its process
        does not run for `frozen_s`, or if one call blocks its event loop for `waits_s` without computing (0 is no
        limit). It has a session of its own, so that its children die with it. `name` is for messages.
        """
        is_container = starter.confinement.is_container
        pairs = [socket.socketpair(), socket.socketpair()]
        if is_container:
            # Messages with file descriptors need boundaries, which a stream does not keep.
            pairs.append(socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        try:
            started = await starter.start([theirs.fileno() for _, theirs in pairs], python=env.python)
        except BaseException:  # raised on
            for end, _ in pairs:
                end.close()
            raise
        finally:
            # The worker has copies of its own. With ours left open, its end would not end the connection.
            for _, end in pairs:
                end.close()
        ours, our_echo, *control = (end for end, _ in pairs)
        reader, writer = await asyncio.open_connection(sock=ours)
        worker = cls(
            started=started,
            limits=starter.confinement.limits,
            reader=reader,
            writer=writer,
            name=name,
            blocked_grace_s=blocked_grace_s,
            frozen_s=frozen_s,
            waits_s=waits_s,
            echo=EchoProbe(our_echo, stood_still_s=_PING_S + _SILENT_S),
            door=Door(control[0], started.hosts) if is_container else None,
        )
        worker.loaded = asyncio.get_running_loop().create_future()
        worker._listener = asyncio.create_task(worker._listen(), name=f"listen {name}")
        worker._watch = asyncio.create_task(worker._watch_life(), name=f"watch {name}")
        await worker._send(env_worker_pb2.WorkerCommand(load=env_worker_pb2.LoadEnv(env=env)))
        logger.info("env worker started", extra={"worker": name, "pid": worker.process.pid, "env": env.id})
        return worker

    @property
    def process(self) -> Process:
        """Return the worker's process."""
        return self.started.process

    @property
    def num_playing(self) -> int:
        """Return the number of plays that the worker has not answered."""
        return len(self._plays)

    @property
    def is_ready(self) -> bool:
        """Return whether the worker has loaded its environment, lives, and is not being closed."""
        return (
            not self._ended.is_set() and not self._is_closing and self.loaded.done() and self.loaded.exception() is None
        )

    @property
    def is_ended(self) -> bool:
        """Return whether the worker has ended and its process was collected."""
        return self._ended.is_set()

    async def wait_ended(self) -> None:
        """Wait until the worker has ended, without a limit."""
        await self._ended.wait()

    async def play(self, request: PlayGroupRequest, *, tokenizer_dir: str) -> list[Rollout]:
        """Play the request's members in the worker and return one rollout for each. Raises WorkerDiedError.

        `tokenizer_dir` has the policy's tokenizer. A cancelled call cancels the play in the worker. A worker that does
        not answer in time after the deadline is killed.
        """
        if self._ended.is_set():
            # Nothing of this play has begun, so it is as little its fault as if somebody had asked the worker to end.
            how = "it had ended already"
            raise WorkerDiedError(f"worker {self.name} died: {how}", Death(cause=DeathCause.ASKED, how=how))
        play_id, self._next_play_id = self._next_play_id, self._next_play_id + 1
        answer: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        self._plays[play_id] = _Play(request, answer)
        try:
            engine_token_for_workers().refresh()
            if self.door is not None:
                with contextlib.suppress(ConnectionError):  # it died: the listener ends the play
                    await self.door.open(request.base_url)
            play = env_worker_pb2.PlayMembers(play_id=play_id, request=request, tokenizer_dir=tokenizer_dir)
            await self._send(env_worker_pb2.WorkerCommand(play=play))
            faults.reach(Point.ENV_SERVER_MID_EPISODE, step=request.planned_step)
            return await self._answer(answer, request.rollout_timeout_seconds + self.blocked_grace_s)
        except asyncio.CancelledError:
            cancel = env_worker_pb2.CancelPlay(play_id=play_id)
            with contextlib.suppress(ConnectionError):
                self.writer.write(encode_frame(env_worker_pb2.WorkerCommand(cancel=cancel)))
            raise
        finally:
            self._plays.pop(play_id, None)

    async def _answer(self, answer: asyncio.Future[list[Rollout]], timeout_s: float) -> list[Rollout]:
        """Wait for the worker's answer to a play and return its rollouts; raise WorkerDiedError.

        After `timeout_s` the worker is killed as soon as its loop makes no progress. Before that it may take much
        longer: the worker ends each rollout by the rollout's own time, without the time of other plays in its loop.
        """
        await asyncio.wait({answer}, timeout=timeout_s)
        while not answer.done():
            if self.echo.stuck_s >= self.blocked_grace_s:
                where = f"; its event loop is in {self.echo.place}" if self.echo.place else ""
                self.kill(f"blocked: no answer {self.blocked_grace_s:g} s after a rollout's deadline{where}")
                await self._ended.wait()  # SIGKILL: the kernel ends it
                break
            await asyncio.wait({answer}, timeout=_PING_S)
        return await answer

    def kill(self, reason: str, cause: DeathCause = DeathCause.BLOCKED) -> None:
        """Kill the worker and its children with SIGKILL; its plays end with WorkerDiedError. Do nothing if it has
        ended.

        Of several calls the first one's cause and reason are reported.
        """
        if not self._ended.is_set():
            logger.warning("env worker killed", extra={"worker": self.name, "reason": reason})
            self._killed = self._killed or (cause, reason)
            # Its children first: once it is dead those that left its session are nobody's.
            kill_session(self.process.pid)

    async def close(self) -> None:
        """Close the socket, which ends the worker, and wait for its end; kill it if it does not end in time."""
        self._is_closing = True
        self.writer.close()
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._ended.wait()
        except TimeoutError:
            self.kill("did not end when asked")
            await self._ended.wait()

    async def _send(self, command: env_worker_pb2.WorkerCommand) -> None:
        """Send the worker a command; one that has died is no error here."""
        # A worker that died meanwhile is noticed by the listener, which ends the play.
        with contextlib.suppress(ConnectionError):
            self.writer.write(encode_frame(command))
            await self.writer.drain()

    async def _watch_life(self) -> None:
        """Check the worker once a second until it ends: signs of life, memory and processes, blocked calls.

        A worker that exceeds a limit is killed. One that does not answer is a visible wait of this env-server.
        """
        wait = waits.LastingWait()
        looked = self._heard = time.monotonic()
        try:
            while not self._ended.is_set():
                await asyncio.sleep(_PING_S)
                now = time.monotonic()
                if now - looked > _PING_S + _SILENT_S or not self.loaded.done():
                    self._heard = now  # this process itself stood still; or the loop does not run yet
                looked = now
                if self.loaded.done():
                    self.writer.write(encode_frame(env_worker_pb2.WorkerCommand()))
                frozen_s = self.echo.ask()
                usage = self._weigh()
                self._bound_waits(usage, now=now, frozen_s=frozen_s)
                self._judge(wait, frozen_s=frozen_s, silent_s=now - self._heard)
        finally:
            wait.over()
            self.echo.close()

    def _weigh(self) -> census.Usage:
        """Read and return the resources that the worker's processes use, and kill them if they exceed its limits."""
        usage = census.CENSUS.usage(self.process.pid, is_container=self.door is not None)
        self.memory_bytes = usage.rss_bytes
        self.peak_bytes = max(self.peak_bytes, usage.rss_bytes, census.peak_bytes(self.process.pid))
        if problem := self.limits.exceeded_by(usage):
            self.kill(problem, DeathCause.LIMIT)
        return usage

    def _bound_waits(self, usage: census.Usage, *, now: float, frozen_s: float) -> None:
        """Kill the worker if one call has blocked its loop for `waits_s` while neither it nor its children computed.

        `usage` is what they use now, `now` the monotonic time, and `frozen_s` for how long the process has not run,
        which does not count. Sets `standing_s`.
        """
        # A process that is ready but gets no processor computes nothing either, and is not to blame for it.
        self._ready_s += _PING_S * usage.is_ready
        computed_s = usage.cpu_s + self._ready_s
        has_progress = self.echo.stuck_s < _PING_S
        # The count begins anew whenever the loop made progress, and while it cannot: during loading, or frozen.
        if self._moved is None or has_progress or not self.loaded.done() or frozen_s >= _SILENT_S:
            self._moved = now, computed_s
        since, computed_before_s = self._moved
        waited_s = now - since
        is_standing = bool(self.waits_s) and computed_s - computed_before_s < _COMPUTES_SHARE * waited_s
        self.standing_s = waited_s if is_standing else 0.0
        if is_standing and waited_s >= self.waits_s:
            where = self.echo.place or "in code that is not the environment's own"
            self.kill(f"blocked: one call has waited for {waited_s:.0f} s in its event loop ({where})")

    def _judge(self, wait: waits.LastingWait, *, frozen_s: float, silent_s: float) -> None:
        """Kill the worker if its process has not run for too long; else register what its rollouts wait for as `wait`.

        `frozen_s` and `silent_s` are the seconds since its process, and its event loop, last answered.
        """
        limit_s = self.frozen_s if self.loaded.done() else max(self.frozen_s, _FROZEN_LOADING_S)
        who = f"env worker {self.name} (pid {self.process.pid}), which has not answered for"
        waiting = f"{len(self._plays)} rollouts wait"
        if frozen_s > limit_s:
            self.kill(f"frozen: its process gave no sign of life for {frozen_s:.0f} s", DeathCause.FROZEN)
        elif frozen_s >= _SILENT_S:
            reason = f"{who} {frozen_s:.0f} s: its process is frozen, and is killed after {limit_s:g} s; {waiting}"
            wait.on(
                reason, waits_on=f"env worker {self.name}", key="frozen", deadline_s=min(_SILENT_OVERDUE_S, limit_s)
            )
        elif silent_s >= _SILENT_S and self._plays:
            where = f" ({self.echo.place})" if self.echo.place else ""
            reason = f"{who} {silent_s:.0f} s: blocked by the environment's code{where}; {waiting}"
            wait.on(reason, waits_on=f"env worker {self.name}", key="blocked", deadline_s=_SILENT_OVERDUE_S)
        elif self._plays and (most := self._places.most_common(1)) and most[0][0] != ENGINE:
            places = ", ".join(f"{count} at {place}" for place, count in self._places.most_common(_SHOWN_PLACES))
            reason = f"rollouts that env worker {self.name} plays: {places}"
            wait.on(reason, waits_on=f"env worker {self.name}", key="standing")
        else:
            wait.over()

    async def _listen(self) -> None:
        """Read reports until the worker closes its socket, then collect the process, and end all that waits for the
        worker.
        """
        try:
            while (report := await read_frame(self.reader, env_worker_pb2.WorkerReport)) is not None:
                self._take(report)
        except CorruptObjectError as error:
            self.kill(str(error), DeathCause.ITSELF)
        finally:
            await self._reap()
            self._end()

    async def _reap(self) -> None:
        """Wait for the end of the process, killed if it takes too long, and end its children, connections and
        directory.
        """
        # A worker that closed its socket ends within its own exit time; one that does not is killed.
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self.process.wait()
        except TimeoutError:
            self.kill("closed its socket and did not end")
            await self.process.wait()
        # Children of the environment outlive a worker that crashed.
        # In a thread: it looks at the process table for up to 0.2 s.
        await asyncio.to_thread(kill_session, self.process.pid)
        if self.door is not None:
            await self.door.close()
        await self.started.forget()

    def _take(self, report: env_worker_pb2.WorkerReport) -> None:
        """Process one report of the worker: where its plays are, that it has loaded or failed, or the rollouts of a
        play.

        Raises CorruptObjectError for one that cannot be used.
        """
        self._heard = time.monotonic()
        match report.WhichOneof("report"):
            case "standing":  # the answer to a ping
                self._places = Counter(report.standing.places)
            case "loaded":
                # A worker runs foreign code, which may answer twice: only the first answer counts.
                if not self.loaded.done():
                    self.loaded.set_result(loaded_from_wire(report.loaded))
            case "failed":
                if not self.loaded.done():
                    failed = report.failed
                    error = EnvLoadError(failed.error_type, failed.error_message, remedy=failed.error_remedy)
                    self.loaded.set_exception(error)
            case "ended":
                playing = self._plays.get(report.ended.play_id)
                if playing is not None and not playing.answer.done():
                    playing.answer.set_result(playing.checked(report.ended))
            case other:
                logger.error("unknown report of an env worker", extra={"worker": self.name, "report": other})

    def _end(self) -> None:
        """Mark the worker as ended, and end all that wait for it with how it died."""
        if isinstance(self.process, ForkedProcess):
            self.peak_bytes = max(self.peak_bytes, self.process.peak_bytes)
        death = describe_death(self.process.returncode, killed=self._killed, peak_bytes=self.peak_bytes)
        self._ended.set()
        self._watch.cancel()
        self.writer.close()
        if not self.loaded.done():
            message = f"the environment's process ended while loading: {death.how}"
            self.loaded.set_exception(EnvLoadError("WorkerDied", message, is_from_outside=death.is_from_outside))
        self.loaded.exception()  # retrieved: nobody may be waiting for it any more
        for playing in self._plays.values():
            if not playing.answer.done():
                playing.answer.set_exception(WorkerDiedError(f"worker {self.name} died: {death.how}", death))
        logger.info("env worker ended", extra={"worker": self.name, "how": death.how})
