"""Who may use a replica's HTTP API, whichever engine serves it: TLS by its files, and a bearer token.

The workers' token and those of the tokens file do; one that may only read sees which models are there. `GET /health`
needs none and tells only its status. See `millrace.rpc.access` for the rules and docs/security.md for how to set it up.
"""

import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from millrace.errors import PermissionDeniedError, UnauthenticatedError
from millrace.inference.http.limits import MAX_BODY_BYTES, body_too_large
from millrace.rpc.access import WORKER, ServerAccess
from millrace.telemetry.settings import Settings, join_address

HEALTH = "/health"
BODY_TOO_LARGE = "millrace.body_too_large"
"""Key of the scope of a request whose body has passed the bound."""
CHALLENGE = {"WWW-Authenticate": "Bearer"}

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def http_access(host: str, port: int, environ: Mapping[str, str] | None = None) -> ServerAccess:
    """What the server at this address demands; InvalidSpecError if it must not listen there as it is set up."""
    access = ServerAccess.from_environ(environ)
    access.require_safe(join_address(host, port), {WORKER}, field="MILLRACE_HTTP_LISTEN")
    return access


def http_scheme(environ: Mapping[str, str] | None = None) -> str:
    """`https` where this process has a certificate to show."""
    return "https" if Settings.from_env(os.environ if environ is None else environ).tls_cert else "http"


def refusal() -> dict[str, Any]:
    """The body of a 401, in OpenAI's shape; it is the same for every path."""
    message = "a valid bearer token is required"
    return {"error": {"message": message, "type": "AuthenticationError", "param": None, "code": 401}}


def vllm_flags(host: str, port: int, environ: Mapping[str, str] | None = None) -> list[str]:
    """Arguments that make vLLM's server demand the same; InvalidSpecError as from `http_access`."""
    access = http_access(host, port, environ)
    flags = [f"--middleware={__name__}.TokenGate"]
    if access.tls is not None:
        access.tls.check()
        flags += [f"--ssl-certfile={access.tls.cert}", f"--ssl-keyfile={access.tls.key}", "--enable-ssl-refresh"]
        if access.tls.client_ca is not None:
            flags += [f"--ssl-ca-certs={access.tls.client_ca}", "--ssl-cert-reqs=2"]  # 2 is ssl.CERT_REQUIRED
    return flags


def read_only_refusal(error: PermissionDeniedError) -> dict[str, Any]:
    """The body of a 403, in OpenAI's shape."""
    return {"error": {"message": error.message, "type": "PermissionDeniedError", "param": None, "code": 403}}


class TokenGate:
    """ASGI middleware: 401 without a valid token, 403 with one that may only read, both before anything is read.

    Bodies above the bound get 413; one of no announced length looks cut off to the application where it passes the
    bound. Where tokens are demanded, `GET /health` tells its status and not why.
    """

    def __init__(self, app: App, *, access: ServerAccess | None = None) -> None:
        """`access` is by default that of this process's variables."""
        self._app = app
        self._access = ServerAccess.from_environ() if access is None else access
        self._is_guarded = self._access.tokens is not None or self._access.worker_tokens is not None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        values = [value.decode("latin-1") for name, value in scope.get("headers", ()) if name == b"authorization"]
        try:
            self._access.admit_http(scope["path"], values[0] if len(values) == 1 else None)
        except UnauthenticatedError:
            await _refuse(scope, send, 401, refusal(), CHALLENGE)
            return
        except PermissionDeniedError as error:
            await _refuse(scope, send, 403, read_only_refusal(error))
            return
        size = _content_length(scope)
        if scope["type"] == "http" and size is not None and size > MAX_BODY_BYTES:
            await _answer(send, *body_too_large(size))
            return
        if self._is_guarded and scope["path"] == HEALTH:
            send = _status_only(send)
        await self._app(scope, _bounded(scope, receive), send)


async def _refuse(
    scope: Mapping[str, Any], send: Send, status: int, body: Mapping[str, Any], extra: Mapping[str, str] | None = None
) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    await _answer(send, status, body, extra)


async def _answer(send: Send, status: int, body: Mapping[str, Any], extra: Mapping[str, str] | None = None) -> None:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.lower().encode(), value.encode()) for name, value in (extra or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def _content_length(scope: Mapping[str, Any]) -> int | None:
    values = [value for name, value in scope.get("headers", ()) if name == b"content-length"]
    return int(values[0]) if len(values) == 1 and values[0].isdigit() and len(values[0]) < 20 else None


def _bounded(scope: MutableMapping[str, Any], receive: Receive) -> Receive:
    """Return a `receive` that reports a disconnect where the body passes the bound, and notes that in the scope."""
    left = MAX_BODY_BYTES

    async def read() -> MutableMapping[str, Any]:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left >= 0:
            return message
        scope[BODY_TOO_LARGE] = True
        return {"type": "http.disconnect"}

    return read


def _status_only(send: Send) -> Send:
    """Send only whether the status is 200."""

    async def shortened(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status = message["status"]
            await _answer(send, status, {"status": "ok" if status == 200 else "unavailable"})

    return shortened
