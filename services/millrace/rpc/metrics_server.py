"""The HTTP server of `GET /metrics`, for services that have no HTTP API of their own.

It has a thread with an event loop of its own; the numbers are read on the event loop of the service, where they
change. A service's loop that does not answer makes the scrape fail with 503: to Prometheus the service is down, which
is what a hung service is.

Connections are bounded in number and in time (`millrace.rpc.http_server`). Who may ask is the access's to say, as with
every server (`millrace.rpc.access`): TLS and a token beyond loopback.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from millrace.errors import UnauthenticatedError
from millrace.rpc.access import METRICS_PATH, WORKER, ServerAccess
from millrace.telemetry.settings import parse_address

if TYPE_CHECKING:  # a service that serves no metrics starts without FastAPI
    from fastapi import FastAPI

    from millrace.rpc.http_server import HttpServer

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 16
"""At once. A Prometheus pair needs two."""
REQUEST_S = 5.0
"""How long a scraper has for its TLS handshake and the whole of its request, however its bytes trickle."""
EXCHANGE_S = 20.0
"""How long a connection lives at most, its answer and a slow reader included."""
ANSWER_S = 5.0
"""How long the event loop has to read the numbers."""
_FIELD = "MILLRACE_METRICS_LISTEN"

T = TypeVar("T")


@contextlib.asynccontextmanager
async def metrics_server(
    address: str | None, registry: CollectorRegistry, *, access: ServerAccess | None = None
) -> AsyncIterator[int]:
    """Serve the registry at `GET /metrics` while the block runs; the value is the port that was taken.

    `address` is host:port; None serves nothing, and the value is 0. `access` says who may ask, by default by this
    process's variables. InvalidSpecError if the address needs protection that is not set up, UnavailableError if it
    cannot be bound.
    """
    if address is None:
        yield 0
        return
    access = ServerAccess.from_environ() if access is None else access
    access.require_safe(address, {WORKER}, field=_FIELD)
    app = _app(registry, access, asyncio.get_running_loop())
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="metrics", daemon=True)
    thread.start()
    try:
        server = await _on(loop, _start(app, address, access))
        logger.info("listening for metrics", extra={"address": address, "port": server.port})
        try:
            yield server.port
        finally:
            await _on(loop, server.stop())  # at most a second
    finally:
        loop.call_soon_threadsafe(loop.stop)
        # Joined in a thread: the service's event loop must not stand still for it.
        await asyncio.to_thread(thread.join)
        loop.close()


async def _start(app: "FastAPI", address: str, access: ServerAccess) -> "HttpServer":
    """Start the HTTP server of the metrics on the running event loop, and return it."""
    from millrace.rpc.http_server import HttpBounds, HttpServer

    bounds = HttpBounds(
        connections=MAX_CONNECTIONS,
        request_s=REQUEST_S,
        idle_s=0.0,
        exchange_s=EXCHANGE_S,
        message_bytes=1 << 16,
        shutdown_s=1.0,
    )
    return await HttpServer.start(app, *parse_address(address), tls=access.tls, bounds=bounds, field=_FIELD)


def _app(registry: CollectorRegistry, access: ServerAccess, loop: asyncio.AbstractEventLoop) -> "FastAPI":
    """Return the application that answers `GET /metrics`; `loop` is the service's, on which the registry is read."""
    from fastapi import FastAPI, Request
    from fastapi.responses import PlainTextResponse, Response

    app = FastAPI(openapi_url=None)

    @app.middleware("http")
    async def admit(request: Request, handle: Callable[[Request], Awaitable[Response]]) -> Response:
        """Answer 401 to a request without an accepted token; handle any other.

        The connection is closed after each answer.
        """
        values = request.headers.getlist("authorization")
        try:
            access.admit_metrics(values[0] if len(values) == 1 else None)
        except UnauthenticatedError:
            response: Response = PlainTextResponse(
                "a valid bearer token is required\n", 401, headers={"WWW-Authenticate": "Bearer"}
            )
        else:
            response = await handle(request)
        response.headers["Connection"] = "close"  # a place is worth more than a handshake per scrape
        return response

    @app.get(METRICS_PATH)
    async def metrics(request: Request) -> Response:
        """Answer with the registry's values in the format that the request accepts.

        503 if the service's loop does not answer within `ANSWER_S`, 500 if they cannot be read.
        """
        encode, content_type = choose_encoder(request.headers.get("accept", ""))

        async def read() -> bytes:
            return encode(registry)

        try:
            async with asyncio.timeout(ANSWER_S):
                body = await _on(loop, read())
        except (TimeoutError, RuntimeError):  # RuntimeError: the loop is closed
            return PlainTextResponse("the service does not answer its own metrics server\n", 503)
        except Exception:  # the edge of a request: the scraper hears that it failed, the log says why
            logger.exception("the metrics could not be read")
            return PlainTextResponse("the metrics could not be read; the service's log says why\n", 500)
        return Response(body, headers={"Content-Type": content_type})

    @app.exception_handler(404)
    async def not_here(_: Request, __: Exception) -> Response:
        return PlainTextResponse("only GET /metrics is here\n", 404)

    return app


async def _on(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Run the coroutine `work` on `loop`, which runs in another thread, and return its result; raise its error."""
    try:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))
    finally:
        work.close()  # no effect on what ran; what never began, because the loop is closed or stands still
