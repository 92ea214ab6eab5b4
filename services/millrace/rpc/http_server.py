"""HTTP servers by uvicorn, whose connections are bounded from the first byte of a handshake to the last of an answer.

uvicorn knows of a connection after its TLS handshake, and waits for a request's header as long as bytes come. Here a
connection counts from its acceptance: it has `request_s` for handshake and header together, for each further header,
and for reading on where an answer does not fit into the socket. Where all places are taken, a new one gets that of the
connection that has been without a whole header for longest, else the first that an answer leaves. So opening
connections and letting bytes trickle keeps nobody out.

It serves in the event loop that starts it. Who may call is the application's to say; TLS is here.
"""

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace.errors import UnavailableError
from millrace.rpc.reach import bound_socket
from millrace.rpc.tls import ServerFiles, rotating_server_context
from millrace.telemetry.settings import join_address

logger = logging.getLogger(__name__)
logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # below: its start, its end, and each malformed request

MAX_HEADER_BYTES = 64 << 10
"""Of a request line with its headers, give or take one read from the socket."""
_BACKLOG = 4096
_LEAST_S = 0.05  # for what a connection has sent already to be read, before its place is another's
_NO_DESCRIPTOR_S = 0.1  # pause after the process ran out of descriptors or memory for one more connection
_NONE_LEFT = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpBounds:
    """What the connections of one server may take."""

    connections: int
    """At once."""
    request_s: float
    """For the handshake and a whole header, and for a client to go on reading what fills its socket."""
    idle_s: float
    """Between an answer and the next request."""
    exchange_s: float | None = None
    """For all of a connection's life; None ends none that makes progress."""
    message_bytes: int
    """Of one body as it is sent, with what frames it."""
    shutdown_s: float
    """For answers on their way at the end."""


class HttpServer:
    """A running server; `start` makes one, `stop` ends it."""

    def __init__(self, app: Any, listener: socket.socket, *, tls: ServerFiles | None, bounds: HttpBounds) -> None:
        """Configure a server that `start` then runs; prefer `start`.

        The `listener` listens already; without `tls` it is plain.
        """
        self.port = int(listener.getsockname()[1])
        self.bounds = bounds
        self._listener = listener
        self._context = None if tls is None else rotating_server_context(tls)
        self._config = uvicorn.Config(
            app,
            http=HttpToolsProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            # uvicorn takes whole seconds.
            timeout_keep_alive=int(bounds.idle_s),
            timeout_graceful_shutdown=int(bounds.shutdown_s),
        )
        self._config.load()
        self._uvicorn = uvicorn.Server(self._config)
        self._open: dict[_Connection, None] = {}  # that have waited for longest first
        self._freed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, app: Any, host: str, port: int, *, tls: ServerFiles | None, bounds: HttpBounds, field: str
    ) -> Self:
        """Serve the ASGI application at an address, and return the running server; `port` 0 takes a free one.

        Without `tls` it speaks plain text. UnavailableError, naming the variable `field`, if the address cannot be
        bound.
        """
        server = cls(app, _listen(host, port, field=field), tls=tls, bounds=bounds)
        # What `uvicorn.Server.serve` does, without its sockets and its signal handlers.
        server._uvicorn.lifespan = server._config.lifespan_class(server._config)
        await server._uvicorn.startup(sockets=[])
        loop = asyncio.get_running_loop()
        server._tasks = [loop.create_task(server._uvicorn.main_loop()), loop.create_task(server._accept())]
        for task in server._tasks:
            task.add_done_callback(_report)
        return server

    async def stop(self) -> None:
        """Accept nothing more, wait for answers that are under way at most `HttpBounds.shutdown_s`, then close all
        connections.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._listener.close()
        # Among them are those in their TLS handshake, of which uvicorn does not know.
        for connection in self._waiting():
            connection.cut()
        # Waits for answers that are under way, `shutdown_s` at most.
        await self._uvicorn.shutdown(sockets=[])
        for connection in list(self._open):
            connection.cut()

    async def _accept(self) -> None:
        """Accept connections for ever, each once there is room for it.

        Where the process has no descriptor left, pause and log.
        """
        loop = asyncio.get_running_loop()
        # unregistered wait: a pause where the process is out of descriptors, which is logged
        while True:
            try:
                link, _ = await loop.sock_accept(self._listener)
            except OSError as error:  # of one connection that has gone already, or of this process
                if error.errno in _NONE_LEFT:
                    logger.error("no connection can be accepted", extra={"port": self.port, "error": str(error)})
                    await asyncio.sleep(_NO_DESCRIPTOR_S)
                continue
            # The connection that finds no place waits here, accepted; those after it wait in the kernel's backlog.
            try:
                await self._make_room()
            except asyncio.CancelledError:
                link.close()
                raise
            # Its place counts from here on, before TLS and header.
            connection = _Connection(
                self._config,
                self._uvicorn.server_state,
                self._uvicorn.lifespan.state,
                bounds=self.bounds,
                changed=self._note,
            )
            self._open[connection] = None
            connection.begin(link, self._context)

    async def _make_room(self) -> None:
        """Wait until the number of connections is below the bound.

        Meanwhile the connection that has waited for longest for a request is cut off, once it has waited for
        `_LEAST_S`. Where every connection is being answered, only the end of one makes room.
        """
        while len(self._open) >= self.bounds.connections:
            oldest = next(iter(self._waiting()), None)
            left = None if oldest is None else oldest.since + _LEAST_S - asyncio.get_running_loop().time()
            if oldest is not None and left is not None and left <= 0:
                oldest.cut()
                continue
            self._freed.clear()
            with contextlib.suppress(TimeoutError):  # without `left`, until an answer ends or its time is over
                await asyncio.wait_for(self._freed.wait(), left)

    def _waiting(self) -> "list[_Connection]":
        """Return the connections for which no request is being answered, the one that has waited for longest first."""
        return [connection for connection in self._open if not connection.is_busy]

    def _note(self, connection: "_Connection", is_open: bool) -> None:
        """Note that a connection has ended or, if `is_open`, begins to wait for its next request.

        Of those that wait it is then the last to be cut off. A place may be free: `_make_room` looks again.
        """
        # A dict keeps the order of insertion: put back, this connection is the youngest of those that wait.
        if connection in self._open:
            del self._open[connection]
            if is_open:
                self._open[connection] = None
        self._freed.set()


class _Connection(HttpToolsProtocol):
    """uvicorn's connection with deadlines. It is busy from a whole header to the end of the answer."""

    def __init__(self, *args: Any, bounds: HttpBounds, changed: "Callable[[_Connection, bool], None]") -> None:
        """Take uvicorn's arguments, bounds, and `changed`, which is called with this connection when its state changes.

        The second argument of `changed` is True where it waits for its next request, False where it has ended.
        """
        super().__init__(*args)
        self.bounds = bounds
        self._changed = changed
        self._shaking: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._end: asyncio.TimerHandle | None = None
        self.since = self.loop.time()
        """When it began to wait for a header."""
        self._is_idle = False
        self._is_in_message = False
        self._size = 0

    @property
    def is_busy(self) -> bool:
        """Return whether a request of this connection is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def begin(self, link: socket.socket, context: Any) -> None:
        """Take an accepted socket over, with TLS if `context` is an SSL context (None: plain), and return at once.

        The deadlines of handshake and header, and of the whole connection if there is one, begin now; past one it is
        cut.
        """
        self._cut_in(self.bounds.request_s)
        if self.bounds.exchange_s is not None:
            self._end = self.loop.call_later(self.bounds.exchange_s, self.cut)
        self._shaking = self.loop.create_task(self._shake(link, context))
        self._shaking.add_done_callback(lambda _: self._shaken(link))

    async def _shake(self, link: socket.socket, context: Any) -> None:
        """Connect the socket to this protocol, with a TLS handshake if there is a context; a failed handshake is only
        logged.
        """
        try:
            await self.loop.connect_accepted_socket(lambda: self, link, ssl=context)
        except (OSError, EOFError) as error:  # of TLS, or it hung up
            logger.debug("a connection was cut off", extra={"error": str(error)})

    def _shaken(self, link: socket.socket) -> None:
        """Close the socket if the handshake ended without a connection; called when the handshake's task has ended."""
        if self.transport is None:  # no handshake: nothing else will ever close it
            link.close()
            self._over()

    def cut(self) -> None:
        """Close the connection at once, whatever it waits for, also during its handshake."""
        if self.transport is not None:
            self.transport.abort()
        elif self._shaking is not None:
            self._shaking.cancel()
        self._over()

    def _over(self) -> None:
        """Cancel the deadlines, and report that this connection has ended."""
        self._cut_in(None)
        if self._end is not None:
            self._end.cancel()
        self._changed(self, False)

    def _cut_in(self, seconds: float | None) -> None:
        """Cut the connection in `seconds` from now, in place of the deadline before; None sets no deadline."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None if seconds is None else self.loop.call_later(seconds, self.cut)

    def connection_made(self, transport: Any) -> None:
        # The deadline goes on from the acceptance: handshake and header share it.
        self.since = self.loop.time()
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._over()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on to the parser; cut the connection if its header or body gets larger than its bound.

        The first bytes after an idle time begin the deadline of the next header.
        """
        if self._is_idle:
            self._is_idle = False
            self._cut_in(self.bounds.request_s)
        self._size += len(data)
        super().data_received(data)
        # What these bytes have completed has set the count to 0: only an unfinished header or body is measured.
        if self._size > (self.bounds.message_bytes if self._is_in_message else MAX_HEADER_BYTES):
            self.cut()

    def on_headers_complete(self) -> None:
        """End the header's deadline, and bound the body from here on."""
        self._cut_in(None)
        self._size, self._is_in_message = 0, True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._size, self._is_in_message = 0, False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Give an idle connection the time for its next request, and report that it waits, unless a request came
        already.
        """
        super().on_response_complete()
        if self.is_busy:  # with a request that came before this answer was over
            return
        self._is_idle, self.since = True, self.loop.time()
        self._cut_in(self.bounds.idle_s + self.bounds.request_s)  # uvicorn closes it before, if the client reads
        self._changed(self, True)

    def pause_writing(self) -> None:
        """Give the client `request_s` seconds to read what fills its socket."""
        super().pause_writing()
        self._cut_in(self.bounds.request_s)

    def resume_writing(self) -> None:
        """Take the deadline for reading away, or, where the answer is complete, set that of the next request."""
        super().resume_writing()
        self._cut_in(None if self.is_busy else self.bounds.idle_s + self.bounds.request_s)


def _report(task: asyncio.Task[None]) -> None:
    """Log the error with which a task of the server ended, if any: nothing new is served then."""
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("an HTTP server has broken down", exc_info=error)


def _listen(host: str, port: int, *, field: str) -> socket.socket:
    """Return a non-blocking listening socket.

    UnavailableError, naming the variable `field`, if the address cannot be bound.
    """
    try:
        listener = bound_socket(host, port)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        address = join_address(host, port)
        raise UnavailableError(
            f"cannot listen on {address}: {error.strerror or error}",
            reason="ADDRESS_UNAVAILABLE",
            remedy=f"stop what listens there, or choose another address ({field}; port 0 takes a free one)",
            metadata={"address": address},
        ) from error
    return listener
