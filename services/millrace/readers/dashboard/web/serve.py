"""Starts and stops the dashboard of one orchestrator."""

import contextlib
import logging
from collections.abc import AsyncIterator

from millrace.orchestrator.beside import RunSource
from millrace.readers.dashboard.reading import ReaderClient
from millrace.rpc.access import PUBLIC, ServerAccess
from millrace.telemetry.settings import parse_address

logger = logging.getLogger(__name__)

FIELD = "MILLRACE_DASHBOARD_LISTEN"
MAX_CONNECTIONS = 64
REQUEST_S = 10.0
IDLE_S = 30.0


@contextlib.asynccontextmanager
async def dashboard_server(
    address: str | None,
    source: RunSource,
    reader: ReaderClient,
    *,
    access: ServerAccess | None = None,
) -> AsyncIterator[int]:
    """Serve the pages while the block runs; the value is the port. Without an address nothing is served (port 0).

    `reader` stays the caller's to close. InvalidSpecError if the address needs protection that is not set up,
    UnavailableError if it cannot be bound.
    """
    if address is None:
        yield 0
        return
    from millrace.readers.dashboard.web.app import MAX_BODY_BYTES, Dashboard
    from millrace.readers.dashboard.web.guard import Guard, Sessions
    from millrace.rpc.http_server import HttpBounds, HttpServer

    access = ServerAccess.from_environ() if access is None else access
    access.require_safe(address, {PUBLIC}, field=FIELD)
    host, port = parse_address(address)
    sessions = Sessions()
    guard = Guard(access, sessions, host=host)
    dashboard = Dashboard(source, reader, guard, sessions, port=port, is_tls=access.tls is not None)
    bounds = HttpBounds(
        connections=MAX_CONNECTIONS, request_s=REQUEST_S, idle_s=IDLE_S, message_bytes=MAX_BODY_BYTES, shutdown_s=1.0
    )
    server = await HttpServer.start(dashboard.app(), host, port, tls=access.tls, bounds=bounds, field=FIELD)
    logger.info("the dashboard listens", extra={"address": address, "port": server.port})
    try:
        yield server.port
    finally:
        await server.stop()
