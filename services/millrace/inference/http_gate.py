"""The gate of `http_access` for the embedded engine's aiohttp server."""

import ssl
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from millrace.errors import UnauthenticatedError
from millrace.inference.http_access import CHALLENGE, HEALTH, http_access, refusal
from millrace.rpc.access import ServerAccess
from millrace.rpc.tls import rotating_server_context

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def protect(app: web.Application, host: str, port: int) -> ssl.SSLContext | None:
    """Put the gate before everything of `app`; returns the context to listen with, None for plain text.

    InvalidSpecError if the server must not listen on this address as it is set up.
    """
    access = http_access(host, port)
    app.middlewares.insert(0, _gate(access))
    return None if access.tls is None else rotating_server_context(access.tls)


def _gate(access: ServerAccess) -> Middleware:
    is_guarded = access.tokens is not None or access.worker_tokens is not None

    @web.middleware
    async def gate(request: web.Request, handler: Handler) -> web.StreamResponse:
        values = request.headers.getall("Authorization", [])
        try:
            access.admit_http(request.path, values[0] if len(values) == 1 else None)
        except UnauthenticatedError:
            return web.json_response(refusal(), status=401, headers=CHALLENGE)
        response = await handler(request)
        if is_guarded and request.path == HEALTH:
            state = "ok" if response.status == 200 else "unavailable"
            return web.json_response({"status": state}, status=response.status)
        return response

    return gate
