"""How env-servers call the engines of their own deployment: TLS by MILLRACE_TLS_CA, and the workers' token.

Engines of others get neither: their certificates are the system's to check, and our token is none of their business.
"""

import asyncio
import ssl
from typing import Any
from urllib.parse import urlsplit

import httpx

from millrace.rpc.access import ClientAccess
from millrace.rpc.tls import Stamp, client_context

# A rollout's deadline cancels its request long before.
_TIMEOUT = httpx.Timeout(6 * 3600.0, connect=5.0)
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)


class EngineAccess:
    """Of one process; files are read again when they change."""

    def __init__(self, access: ClientAccess | None = None) -> None:
        """`access` is by default that of this process's variables; InvalidSpecError if a file of it is wrong."""
        self._access = ClientAccess.internal_from_environ() if access is None else access
        self._context: ssl.SSLContext | None = None
        self._seen: Stamp = ()
        self._clients: dict[asyncio.AbstractEventLoop, tuple[ssl.SSLContext, httpx.AsyncClient]] = {}

    def headers(self, url: str) -> dict[str, str]:
        """The header that shows the token; InvalidStateError if it would travel in plain text beyond this machine."""
        if self._access.secret is None:
            return {}
        parts = urlsplit(url)
        if parts.scheme != "https":
            ClientAccess(secret=self._access.secret, is_insecure=self._access.is_insecure).require_safe(
                parts.netloc if parts.port else f"{parts.netloc}:80"
            )
        return self._access.headers()

    def context(self) -> ssl.SSLContext | None:
        """The context for `https`; None is the library's own, which trusts what the system trusts."""
        tls = self._access.tls
        if tls is None:
            return None
        if self._context is None or tls.stamp() != self._seen:
            self._seen = tls.stamp()
            self._context = client_context(tls)
        return self._context

    def secured(self, client: Any) -> Any:
        """An AsyncOpenAI like `client` that shows the token and trusts our CA; `client` itself where none is set."""
        headers, context = self.headers(str(client.base_url)), self.context()
        if not headers and context is None:
            return client
        options: dict[str, Any] = {}
        if headers:
            options["api_key"] = headers["Authorization"].removeprefix("Bearer ")
        if context is not None:
            options["http_client"] = self._http_client(context)
        return client.with_options(**options)

    def _http_client(self, context: ssl.SSLContext) -> httpx.AsyncClient:
        """The event loop's client with this context; that of an older one is dropped with its idle connections."""
        loop = asyncio.get_running_loop()
        known = self._clients.get(loop)
        if known is None or known[0] is not context:
            fresh = httpx.AsyncClient(verify=context, timeout=_TIMEOUT, limits=_LIMITS, trust_env=False)
            known = self._clients[loop] = (context, fresh)
        return known[1]


_OURS: list[EngineAccess] = []


def engine_access() -> EngineAccess:
    """The process's one."""
    if not _OURS:
        _OURS.append(EngineAccess())
    return _OURS[0]
