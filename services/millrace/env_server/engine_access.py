"""How environments call the engines of their own deployment: TLS by MILLRACE_TLS_CA, and a token for that alone.

Env workers are foreign code, so they do not get the workers' token: `EngineToken` of the env-server writes what follows
from it into a file for them. Engines of others get nothing: their certificates are the system's to check, and our token
is none of their business.
"""

import asyncio
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from millrace.env_server.standing import noting_engine
from millrace.rpc.access import ClientAccess
from millrace.rpc.keep_alive import kept_alive_socket
from millrace.rpc.tls import Stamp, client_context
from millrace.rpc.tokens import WorkersFile
from millrace.storage.clean_up import TemporaryDirectory
from millrace.telemetry.settings import Settings

# Environments may block the loop that connects for seconds. An engine that is not there refuses at once, or its lease
# ends.
_CONNECT_TIMEOUT_S = 30.0
# Backstop only: a rollout's deadline cancels its request long before.
_TOTAL_TIMEOUT_S = 6 * 3600.0


class EngineAccess:
    """Of one process; files are read again when they change."""

    def __init__(self, access: ClientAccess | None = None) -> None:
        """`access` is by default that of this process's variables; InvalidSpecError if a file of it is wrong."""
        self._access = ClientAccess.engine(Settings.from_env(os.environ)) if access is None else access
        self._context: ssl.SSLContext | None = None
        self._seen: Stamp = ()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

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

    def session(self) -> aiohttp.ClientSession:
        """The event loop's session, until `close`. It has no limit of connections: the env-server's capacity is one."""
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = make_session()
        return self._sessions[loop]

    async def close(self) -> None:
        """Close the event loop's session, if there is one."""
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session.close()


def make_session() -> aiohttp.ClientSession:
    """A session for engines and endpoints, without a limit of connections."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=kept_alive_socket),
        timeout=aiohttp.ClientTimeout(total=_TOTAL_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
        trace_configs=[noting_engine()],
    )


class EngineToken:
    """The env-server's side: what its workers need to call engines."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """`environ` is by default this process's; InvalidSpecError if a file that it names is wrong."""
        settings = Settings.from_env(os.environ if environ is None else environ)
        shared = ["tls_ca", "tls_server_name", "insecure"]
        if settings.tls_client_ca is not None:
            shared += ["tls_cert", "tls_key"]  # engines of this deployment ask for a certificate, too
        self._shared = Settings(**{name: getattr(settings, name) for name in shared})
        path = settings.worker_token_file
        self._workers = None if path is None else WorkersFile(Path(path), field="MILLRACE_WORKER_TOKEN_FILE")
        self._directory: TemporaryDirectory | None = None
        self._written: tuple[str, ...] = ()
        self.owner: tuple[int, int] | None = None
        """uid and gid of the workers, if they are not those of this process."""

    def environ(self) -> dict[str, str]:
        """Variables for an env worker."""
        variables = self._shared.access_environ()
        if self._workers is not None:
            variables["MILLRACE_ENGINE_TOKEN_FILE"] = str(self._path())
            self.refresh()
        return variables

    def visible(self) -> list[str]:
        """Paths that an env worker needs for that."""
        shared = [path for path in self._shared.access_environ().values() if os.path.isabs(path)]
        return shared if self._workers is None else [*shared, str(self._path().parent)]

    def refresh(self) -> None:
        """Follow the workers' token, if it has changed. Costs microseconds."""
        if self._workers is None or (tokens := self._workers.engine_tokens()) == self._written:
            return
        path = self._path()
        fresh = path.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write("".join(f"{token}\n" for token in tokens))
        if self.owner is not None:
            os.chown(fresh, *self.owner)
            os.chown(path.parent, *self.owner)
        fresh.rename(path)
        self._written = tokens

    def _path(self) -> Path:
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="millrace-engine-")
        return Path(self._directory.name) / "token"


_OURS: list[EngineAccess] = []
_TOKEN: list[EngineToken] = []


def engine_access() -> EngineAccess:
    """The one of this env worker."""
    if not _OURS:
        _OURS.append(EngineAccess())
    return _OURS[0]


def engine_token_for_workers() -> EngineToken:
    """The one of this env-server."""
    if not _TOKEN:
        _TOKEN.append(EngineToken())
    return _TOKEN[0]
