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
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from millrace.errors import InvalidSpecError, UnavailableError, Violation
from millrace.rpc import health
from millrace.rpc.access import PUBLIC, WORKER, ServerAccess
from millrace.rpc.channel import MAX_MESSAGE_BYTES
from millrace.rpc.gate import Gate
from millrace.rpc.health import HealthBoard, HealthServicer
from millrace.rpc.interceptors import CallInterceptor
from millrace.rpc.status import MAX_METADATA_BYTES
from millrace.telemetry.settings import parse_address

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 << 20
"""Largest request of any call: the largest by far is a run's config, of at most 1 MiB. Answers may be larger."""

HANDSHAKE_S = 10.0
"""How long a new connection may take until it speaks HTTP/2, however its bytes trickle."""

IDLE_S = 120.0
"""How long a connection without a call stays. A call begins when its header is whole, for which gRPC waits as long as
bytes come: it takes them for signs of life. A later call opens a new connection unnoticed."""

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
]


def _as_text(record: logging.LogRecord) -> bool:
    """Make the line's text at once, so that its record holds nothing but that.

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
    """Serve until SIGTERM, SIGINT or `stopping`, then drain and return.

    `on_started` gets the port, which matters where `address` says port 0. With a `health_board` each name is
    NOT_SERVING until the board says that it is ready; without one all are ready at once. Signals set `stopping`, so
    what else the process runs can wait on it too; they are handled only on the main thread, and not if
    `handle_signals` is off.
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
        draining.set()
        for each in servers:  # no effect after an orderly stop; frees the ports when something above raised
            await each.stop(0)
        for signum in handled:
            asyncio.get_running_loop().remove_signal_handler(signum)


def _add_services(
    server: grpc.aio.Server, register: Register, board: HealthBoard, draining: asyncio.Event
) -> Sequence[str]:
    """Add the servicers, whose names are returned, and health and reflection for them."""
    names = register(server, draining)
    for name in names:
        board.add(name)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(board, draining), server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    return names


async def _start_health(address: str, servicer: HealthServicer) -> grpc.aio.Server:
    """The server for probes that speak no TLS: it tells the health and nothing else."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    _add_port(server, address, None, field="MILLRACE_HEALTH_LISTEN")
    await server.start()
    return server


def _bind(server: grpc.aio.Server, address: str, access: ServerAccess, names: Sequence[str]) -> int:
    """Bind and return the port; the error says what holds the port and what helps."""
    try:
        parse_address(address)
    except ValueError as error:
        wrong = Violation(field="MILLRACE_LISTEN", value=address, message=str(error))
        raise InvalidSpecError([wrong], reason="ADDRESS_INVALID") from None
    access.require_safe(address, {PUBLIC if name.startswith("millrace.v1.") else WORKER for name in names})
    credentials = None if access.tls is None else access.tls.grpc_credentials()
    return _add_port(server, address, credentials, field="MILLRACE_LISTEN")


def _add_port(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, *, field: str) -> int:
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
    """What the system says when one binds the address; gRPC tells it only to its own log."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _install_signals(stopping: asyncio.Event) -> list[signal.Signals]:
    """Make SIGTERM and SIGINT set `stopping`, and the next one exit at once; returns the signals taken."""
    if threading.current_thread() is not threading.main_thread():
        return []  # only the main thread can take signals; its owner stops us by the event

    def handle(signum: signal.Signals) -> None:
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
