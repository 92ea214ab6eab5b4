"""The HTTP server of `GET /metrics`, for services that have no HTTP API of their own.

It runs in threads, so that a scraper which is slow or never ends its request holds up nobody; the numbers are read on
the event loop of the service, where they change. A loop that does not answer makes the scrape fail with 503: to
Prometheus the service is down, which is what a hung service is.

Connections are bounded in number and in time, from the first byte of the handshake to the last one of the answer. Where
too many are open, the oldest that has not sent its request yet is closed for the new one: whoever opens connections
and lets bytes trickle keeps no scraper out.

Who may ask is the access's to say, as with every server (`millrace.rpc.access`): TLS and a token beyond loopback.
"""

import asyncio
import concurrent.futures
import contextlib
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from millrace.errors import UnauthenticatedError, UnavailableError
from millrace.rpc.access import METRICS_PATH, WORKER, ServerAccess
from millrace.rpc.tls import rotating_server_context
from millrace.telemetry.settings import parse_address

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""At once; for one above that the oldest without a whole request is closed. A Prometheus pair needs two."""
REQUEST_S = 5.0
"""How long a scraper has for its TLS handshake and the whole of its request, however its bytes trickle."""
EXCHANGE_S = 20.0
"""How long a connection lives at most, with the answer and whoever reads it slowly."""
ANSWER_S = 5.0
"""How long the event loop has to read the numbers."""
_POLL_S = 0.1

Encode = Callable[[CollectorRegistry], bytes]
Read = Callable[[Encode], bytes]


@contextlib.asynccontextmanager
async def metrics_server(
    address: str | None, registry: CollectorRegistry, *, access: ServerAccess | None = None
) -> AsyncIterator[int]:
    """Serves the registry while the block runs; the value is the port. Without an address nothing is served (port 0).

    `access` is by default that of this process's variables. InvalidSpecError if the address needs protection that is
    not set up, UnavailableError if it cannot be bound.
    """
    if address is None:
        yield 0
        return
    access = ServerAccess.from_environ() if access is None else access
    access.require_safe(address, {WORKER}, field="MILLRACE_METRICS_LISTEN")
    server = _bind(address, access, _reader(asyncio.get_running_loop(), registry))
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="metrics", daemon=True)
    thread.start()
    log.info("listening for metrics", extra={"address": address, "port": server.server_port})
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)  # at most one poll
        server.server_close()


def _reader(loop: asyncio.AbstractEventLoop, registry: CollectorRegistry) -> Read:
    """Reads the numbers on the loop, from another thread; TimeoutError if the loop does not come to it."""

    def read(encode: Encode) -> bytes:
        done: concurrent.futures.Future[bytes] = concurrent.futures.Future()

        def work() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(encode(registry))
                except BaseException as error:  # noqa: BLE001 - the thread that asked raises it
                    done.set_exception(error)

        loop.call_soon_threadsafe(work)
        try:
            return done.result(ANSWER_S)
        finally:
            done.cancel()

    return read


def _bind(address: str, access: ServerAccess, read: Read) -> "_Server":
    host, port = parse_address(address)
    context = None if access.tls is None else rotating_server_context(access.tls)
    try:
        return _Server(host.strip("[]"), port, access=access, context=context, read=read)
    except OSError as error:
        raise UnavailableError(
            f"cannot listen on {address}: {error.strerror or error}",
            reason="ADDRESS_UNAVAILABLE",
            remedy="stop what listens there, or choose another address (MILLRACE_METRICS_LISTEN; port 0 takes a free "
            "one)",
            metadata={"address": address},
        ) from error


@dataclass(eq=False, slots=True)
class _Connection:
    """One scraper. `link` is what closes it: the TLS socket as soon as there is one."""

    link: socket.socket
    began: float
    is_asking: bool = True
    """Its request has not arrived as a whole."""
    is_cut: bool = False

    def cut(self) -> None:
        """End it, whatever its thread waits for."""
        self.is_cut = True
        with contextlib.suppress(OSError):  # it has gone by itself
            socket.socket.shutdown(self.link, socket.SHUT_RDWR)  # TLS's own would drop what the thread works with

    def secured(self, wrapped: socket.socket) -> None:
        """TLS is spoken over it from now on."""
        self.link = wrapped
        if self.is_cut:  # while it changed hands
            self.cut()


class _Connections:
    """Those that are open; all methods may be called from any thread."""

    def __init__(self) -> None:
        self._open: list[_Connection] = []  # oldest first
        self._lock = threading.Lock()

    def add(self, request: socket.socket) -> _Connection | None:
        """A new one, for which an old one may have to go; None if all are being answered."""
        with self._lock:
            if len(self._open) >= MAX_CONNECTIONS:
                oldest = next((connection for connection in self._open if connection.is_asking), None)
                if oldest is None:
                    return None
                self._open.remove(oldest)
                oldest.cut()
            connection = _Connection(request, time.monotonic())
            self._open.append(connection)
            return connection

    def remove(self, connection: _Connection) -> None:
        """It has ended."""
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)

    def cut_late(self) -> None:
        """End those whose time is over."""
        now = time.monotonic()
        with self._lock:
            for connection in self._open:
                if now - connection.began > (REQUEST_S if connection.is_asking else EXCHANGE_S):
                    connection.cut()


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self, host: str, port: int, *, access: ServerAccess, context: ssl.SSLContext | None, read: Read
    ) -> None:
        self.address_family = _family(host)
        self.access = access
        self.read = read
        self.asked = threading.local()
        self._context = context
        self._connections = _Connections()
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        # As the base, which would also look this machine's name up: seconds where the resolver is away.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def service_actions(self) -> None:
        """Between two polls."""
        self._connections.cut_late()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        assert isinstance(request, socket.socket)
        connection = self._connections.add(request)
        if connection is None:
            self.shutdown_request(request)
            return
        arguments = (connection, client_address)
        threading.Thread(target=self._answer, args=arguments, name="metrics scrape", daemon=True).start()

    def _answer(self, connection: _Connection, client_address: object) -> None:
        request = connection.link
        try:
            request.settimeout(EXCHANGE_S)
            if self._context is not None:
                # The handshake belongs into the thread, too: in `accept` a silent client would hold up all others.
                request = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
                connection.secured(request)
                request.do_handshake()
            self.asked.connection = connection
            self.finish_request(request, client_address)
        except OSError as error:  # a scraper that hung up or was too slow, or does not speak TLS
            log.debug("a scrape was cut off", extra={"error": str(error)})
        except Exception:  # noqa: BLE001 - the edge of a thread, which logs it
            self.handle_error(request, client_address)
        finally:
            self._connections.remove(connection)
            self.shutdown_request(request)

    def has_asked(self) -> None:
        """The request of the connection of this thread has arrived."""
        self.asked.connection.is_asking = False

    def handle_error(self, request: object, client_address: object) -> None:
        log.debug("a scrape was cut off", exc_info=True)  # noqa: LOG014 - called while the error is handled


class _Handler(BaseHTTPRequestHandler):
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride] - the only one that makes handlers
    server_version, sys_version = "millrace", ""

    def do_GET(self) -> None:
        self.server.has_asked()
        values = self.headers.get_all("Authorization") or []
        try:
            self.server.access.admit_metrics(values[0] if len(values) == 1 else None)
        except UnauthenticatedError:
            self._answer(401, b"a valid bearer token is required\n", challenge=True)
            return
        if self.path.partition("?")[0] != METRICS_PATH:
            self._answer(404, b"only GET /metrics is here\n")
            return
        encode, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            body = self.server.read(encode)
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            self._answer(503, b"the service does not answer its own metrics server\n")
            return
        except Exception:  # the edge of a request: the scraper hears that it failed, the log says why
            log.exception("the metrics could not be read")
            self._answer(500, b"the metrics could not be read; the service's log says why\n")
            return
        self._answer(200, body, content_type=content_type)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a scrape every few seconds is no news."""

    def _answer(
        self, status: int, body: bytes, *, content_type: str = "text/plain; charset=utf-8", challenge: bool = False
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if challenge:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(body)


def _family(host: str) -> socket.AddressFamily:
    try:
        return socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    except ValueError:
        return socket.AF_INET  # a name
