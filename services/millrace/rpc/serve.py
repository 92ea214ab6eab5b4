"""The life of every gRPC server: start, report, serve, drain, stop.

    stop asked (SIGTERM, SIGINT, or `stopping`)
      -> health NOT_SERVING for every name        load balancers look away
      -> drain_s                                  until they have
      -> `before_stop`                            what the process works on beside its calls finishes; bounded by itself
      -> `draining` is set                        watch handlers end their streams themselves, with UNAVAILABLE
      -> server.stop(grace_s)                     what is under way finishes, the rest is cancelled

Who may call is the access's to say (`millrace.rpc.access`); by default that of this process's variables.

An open stream that does not look at `draining` holds the end up for the whole of `grace_s`. A second signal exits at
once.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

import millrace
from millrace.errors import InvalidSpecError, MillraceError, UnavailableError, Violation, all_errors
from millrace.internal.v1.worker_service_pb2 import HeartbeatResponse, Worker
from millrace.rpc import health
from millrace.rpc.access import PUBLIC, WORKER, ServerAccess
from millrace.rpc.channel import MAX_MESSAGE_BYTES
from millrace.rpc.health import HealthBoard, HealthServicer
from millrace.rpc.interceptors import CallInterceptor, Gate
from millrace.rpc.reach import advertised, worker_slot
from millrace.rpc.status import MAX_METADATA_BYTES
from millrace.rpc.worker import OnAssignments, OnSilence, Report, WorkerAgent
from millrace.telemetry.settings import Settings, parse_address

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 << 20
"""Largest request of any call: the largest by far is a run's config, of at most 1 MiB. Answers may be larger."""

HANDSHAKE_S = 10.0
"""How long a new connection may take until it speaks HTTP/2, however its bytes trickle."""

IDLE_S = 120.0
"""How long a connection without a call stays. A call begins when its header is whole, for which gRPC waits as long as
bytes come: it takes them for signs of life. A later call opens a new connection unnoticed."""

MAX_PENDING = 8192
"""Calls that may wait for the event loop: two for each of the most workers that an orchestrator registers."""

SERVER_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),  # else a second server shares the port silently and gets half of the calls
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    # Clients ping every 30 s while a call is silent; the default allows one ping in 300 s and then hangs up.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # TLS handshake and HTTP/2 preface together; the default lets a connection that says nothing stay for 120 s.
    ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
    # Above 1,000 calls that no handler has begun, gRPC ends new ones with CANCELLED at random: a server that is two
    # seconds late would lose heartbeats of a fleet, whose repetitions make it later still.
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
]


def _as_text(record: logging.LogRecord) -> bool:
    """Replace a log record's arguments by its text, and return True: a filter of a logger, which drops nothing.

    A server that was never started is itself an argument of the line that gRPC logs at DEBUG while it frees the server
    (`AioServer.__dealloc__` of grpcio 1.85). A handler that keeps the record would free it once more: SIGSEGV.
    """
    record.msg, record.args = record.getMessage(), ()
    return True


logging.getLogger("grpc._cython.cygrpc").addFilter(_as_text)

Register = Callable[[grpc.aio.Server, asyncio.Event], Sequence[str]]
"""Adds servicers to the server and returns their full names; the event says that the server drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """How a server ends once it is asked to."""

    drain_s: float = 3.0
    """How long load balancers may take to look away."""
    grace_s: float = 10.0
    """How long calls under way may take after that."""
    before_stop: Callable[[], Awaitable[None]] | None = None
    """Finishes what the process works on beside its calls."""


_SHUTDOWN = Shutdown()


async def serve(
    address: str,
    register: Register,
    *,
    shutdown: Shutdown = _SHUTDOWN,
    on_started: Callable[[int], None] | None = None,
    stopping: asyncio.Event | None = None,
    health_board: HealthBoard | None = None,
    handle_signals: bool = True,
    access: ServerAccess | None = None,
) -> None:
    """Serve gRPC at `address` (host:port) until SIGTERM, SIGINT or `stopping`, then drain as `shutdown` says, and
    return.

    `register` adds the servicers. `on_started` gets the port, which matters where `address` says port 0. With a
    `health_board` each name is NOT_SERVING until the board says that it is ready; without one all are ready at once.
    Signals set `stopping`, so what else the process runs can wait on it too; they are handled only on the main thread,
    and not if `handle_signals` is off. `access` says who may call, by default by this process's variables.
    UnavailableError if the address cannot be bound, InvalidSpecError if it needs protection that is not set up.
    """
    stopping = stopping or asyncio.Event()
    draining, board = asyncio.Event(), health_board or HealthBoard()
    access = ServerAccess.from_environ() if access is None else access
    server = grpc.aio.server(interceptors=[Gate(access), CallInterceptor()], options=SERVER_OPTIONS)
    names = _add_services(server, register, board, draining)
    port = _bind(server, address, access, names)
    servers = [server]
    if access.health_listen is not None:
        servers.append(await _start_health(access.health_listen, HealthServicer(board, draining)))
    handled = _install_signals(stopping) if handle_signals else []
    try:
        await server.start()
        if health_board is None:
            for name in names:
                board.set_ready(name)
        logger.info("listening", extra={"address": address, "port": port, "services": ",".join(names)})
        if on_started is not None:
            on_started(port)
        await stopping.wait()
        logger.info("draining", extra={"drain_s": shutdown.drain_s, "grace_s": shutdown.grace_s})
        board.drain()
        await asyncio.sleep(shutdown.drain_s)
        if shutdown.before_stop is not None:
            await shutdown.before_stop()
        draining.set()
        await asyncio.gather(*(each.stop(shutdown.grace_s) for each in servers))
        logger.info("stopped", extra={"port": port})
    finally:
        # Set here, too, for watches on the health server where the start failed or this task was cancelled.
        draining.set()
        for each in servers:  # no effect after an orderly stop; frees the ports when something above raised
            await each.stop(0)
        for signum in handled:
            asyncio.get_running_loop().remove_signal_handler(signum)


def _add_services(
    server: grpc.aio.Server, register: Register, board: HealthBoard, draining: asyncio.Event
) -> Sequence[str]:
    """Add the servicers of `register` to the server, and health and reflection for them; return their full names.

    Each name is put on `board`, not ready yet. Watches of the health end when `draining` is set.
    """
    names = register(server, draining)
    for name in names:
        board.add(name)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(board, draining), server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return names


async def _start_health(address: str, servicer: HealthServicer) -> grpc.aio.Server:
    """Start a server without TLS and tokens at `address` that answers health checks and nothing else, and return it."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    _add_port(server, address, None, field="MILLRACE_HEALTH_LISTEN")
    await server.start()
    return server


def _bind(server: grpc.aio.Server, address: str, access: ServerAccess, names: Sequence[str]) -> int:
    """Bind the server to `address` and return the port that was taken.

    `names` are the full names of its services: they decide which tokens `access` must demand. InvalidSpecError if the
    address is malformed or needs protection that is not set up, UnavailableError if it cannot be bound.
    """
    try:
        parse_address(address)
    except ValueError as error:
        wrong = Violation(field="MILLRACE_LISTEN", value=address, message=str(error))
        raise InvalidSpecError([wrong], reason="ADDRESS_INVALID") from None
    access.require_safe(address, {PUBLIC if name.startswith("millrace.v1.") else WORKER for name in names})
    credentials = None if access.tls is None else access.tls.grpc_credentials()
    return _add_port(server, address, credentials, field="MILLRACE_LISTEN")


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, *, field: str) -> int:
    """Bind the server to `address`, in plain text if there are no credentials, and return the port that was taken.

    UnavailableError, naming the variable `field` and the system's cause, if it cannot be bound.
    """
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        cause = _why_not(*parse_address(address)) or str(error)
        raise UnavailableError(
            f"cannot listen on {address}: {cause}",
            reason="ADDRESS_UNAVAILABLE",
            remedy=f"stop what listens there, or choose another address ({field}; port 0 takes a free one)",
            metadata={"address": address},
        ) from error


def _why_not(host: str, port: int) -> str | None:
    """Try to bind an address, and return the system's error as text; None if it can be bound.

    gRPC writes that error to its own log only.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            # As gRPC does: connections of a predecessor in TIME_WAIT are no reason against the address.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _install_signals(stopping: asyncio.Event) -> list[signal.Signals]:
    """Have SIGTERM and SIGINT set `stopping`, and the next one exit at once; return the signals that are handled.

    On any thread but the main one nothing is handled, and the list is empty.
    """
    if threading.current_thread() is not threading.main_thread():
        return []  # only the main thread can take signals; its owner stops us by the event

    def handle(signum: signal.Signals) -> None:
        """Set `stopping` at the first signal; exit the process at the next."""
        if not stopping.is_set():
            logger.info("stopping on signal; another one exits at once", extra={"signal": signum.name})
            stopping.set()
            return
        logger.warning("exiting at once on a second signal", extra={"signal": signum.name})
        sys.stderr.flush()
        os._exit(128 + signum)

    signals = [signal.SIGTERM, signal.SIGINT]
    for signum in signals:
        asyncio.get_running_loop().add_signal_handler(signum, handle, signum)
    return signals


# The life of a worker (env-server, inference or trainer): serve, register, announce that it leaves, drain, end.
#
#     serve ── the port is known ──> register ──> heartbeats ...
#     asked to stop ──> `leave`, and a last heartbeat at once, while load balancers look away ──> `drain` ──> end
#
# The registration outlasts the server, so that what finishes during the drain is still reported.

LAST_HEARTBEAT_S = 1.0
"""Longest wait for the answer to the last heartbeat. Where everything stops at once, nobody answers it."""


async def _nothing() -> None: ...


def _ignore(_: HeartbeatResponse) -> None: ...


class RegisteredWorker:
    """One worker process; `serve` is its life. Without an orchestrator in the settings it registers nowhere."""

    def __init__(
        self,
        settings: Settings,
        worker: Worker,
        report: Report,
        *,
        on_assignments: OnAssignments = _ignore,
        on_silence: OnSilence | None = None,
        is_held: bool = False,
        stopping: asyncio.Event | None = None,
        http_url: Callable[[str], str] | None = None,
    ) -> None:
        """Prepare a worker process; `serve` runs it. `worker` has id, kind, log formats and capacity.

        Its address is added later: it follows from the settings and the port. `report` makes each heartbeat,
        `on_assignments` gets each reply, and `on_silence` is called when the orchestrator has not answered for long,
        and when it answers again. With `is_held` the orchestrator holds its reply until there is something new.
        `stopping` is set to end the worker. `http_url` makes the registered URL from the host under which others reach
        this process; None registers no URL.
        """
        self.stopping = stopping or asyncio.Event()
        """Set it to end; signals do so where they are handled."""
        self._settings = settings
        # A copy: the caller's message stays as it is.
        self._worker = Worker(version=millrace.__version__)
        self._worker.MergeFrom(worker)
        self._report = report
        self._on_assignments = on_assignments
        self._on_silence = on_silence
        self._is_held = is_held
        self._http_url = http_url
        self._agent: WorkerAgent | None = None
        self._started = asyncio.Event()
        self._is_announced = asyncio.Event()
        self._is_gone = asyncio.Event()

    async def serve(
        self,
        register: Register | None,
        *,
        health_board: HealthBoard | None = None,
        handle_signals: bool = True,
        leave: Callable[[], Awaitable[None]] = _nothing,
        drain: Callable[[], Awaitable[None]] = _nothing,
        beside: Sequence[Callable[[], Coroutine[Any, Any, None]]] = (),
    ) -> None:
        """Serve calls and stay registered until the stop is requested; raise what the orchestrator refuses for good.

        `register` adds the servicers; with None nobody calls this worker: it registers no address, and its server, if
        the settings have an address for one, only answers health checks. `leave` is called as soon as the stop is
        requested, `drain` once load balancers have looked away. The coroutines of `beside` run meanwhile: their errors
        are raised, too, and what still runs at the end is cancelled.
        """

        async def drain_and_announce() -> None:
            await drain()
            await self._is_announced.wait()  # at most LAST_HEARTBEAT_S after `leave`

        try:
            async with asyncio.TaskGroup() as group:
                others = [group.create_task(each()) for each in beside]
                group.create_task(self._leave(leave), name="leave")
                if register is None:
                    self._find(worker_slot(self._settings.advertise or self._settings.listen or ""))
                # It begins once the server has a port, or at once where there is no server (`_started`).
                registration = group.create_task(self._stay_registered(), name="registration")
                await self._serve_calls(register, drain_and_announce, health_board, handle_signals=handle_signals)
                # Only now: heartbeats report what the drain still finishes.
                self._is_gone.set()
                await registration
                for task in others:
                    task.cancel()
        except BaseExceptionGroup as errors:
            # One of them failed and the others were cancelled. The caller gets that error; ours come before others.
            found = list(all_errors(errors))
            raise next((error for error in found if isinstance(error, MillraceError)), found[0]) from None

    async def _serve_calls(
        self,
        register: Register | None,
        before_stop: Callable[[], Awaitable[None]],
        health_board: HealthBoard | None,
        *,
        handle_signals: bool,
    ) -> None:
        """Run the gRPC server until it has stopped; `before_stop` is awaited between the drain and the end of calls.

        Without `register` and an address in the settings there is no server: wait for the stop and call `before_stop`.
        """
        if register is None and self._settings.listen is None:
            await self.stopping.wait()
            await before_stop()
            return
        await serve(
            self._settings.require("listen"),
            register or (lambda server, draining: []),
            shutdown=Shutdown(drain_s=self._settings.drain_s, grace_s=self._settings.grace_s, before_stop=before_stop),
            on_started=None if register is None else self._find_address,
            stopping=self.stopping,
            health_board=health_board,
            handle_signals=handle_signals,
        )

    def heartbeat_soon(self) -> None:
        """Have a heartbeat sent at once, also where the orchestrator holds its answer to the one before.

        Do not wait for it.
        """
        if self._agent is not None:
            self._agent.heartbeat_soon()

    async def wait_started(self) -> None:
        """Wait until the server listens, or, for a worker without one, until it may register."""
        await self._started.wait()

    def _find_address(self, port: int) -> None:
        """Set the address and URL under which others reach this worker, given the port that was bound, and its slot."""
        self._worker.address = advertised(self._settings, port)
        if self._http_url is not None:
            self._worker.http_url = self._http_url(parse_address(self._worker.address)[0])
        self._find(worker_slot(self._worker.address))

    def _find(self, slot: str) -> None:
        """Set the worker's slot, and make the agent that registers it, if the settings name an orchestrator.

        This worker counts as started then (`wait_started`).
        """
        self._worker.slot = slot
        if self._settings.orchestrator is not None:
            self._agent = WorkerAgent(
                self._settings.orchestrator,
                self._worker,
                self._report,
                self._on_assignments,
                on_silence=self._on_silence,
                is_held=self._is_held,
            )
        self._started.set()

    async def _stay_registered(self) -> None:
        """Register and send heartbeats until the server has stopped; return at once without an orchestrator.

        RuntimeError if the agent was cancelled while this task was not.
        """
        await self._started.wait()
        if self._agent is None:
            return
        try:
            await self._agent.run(self._is_gone)
        except asyncio.CancelledError:
            # gRPC raises a cancellation also where something has closed the channel. A task group ignores a child that
            # ends with one, so the worker would go on to serve without a registration.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise RuntimeError("the worker agent was cancelled, though nobody ended this worker") from None

    async def _leave(self, leave: Callable[[], Awaitable[None]]) -> None:
        """Wait for the stop, call `leave`, and send a last heartbeat at once, by which the orchestrator learns of
        it.
        """
        await self.stopping.wait()
        await leave()
        if self._agent is not None:
            await self._agent.heartbeat_now(timeout_s=LAST_HEARTBEAT_S)
        self._is_announced.set()
