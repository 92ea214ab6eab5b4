"""Access of environments to the engines of their deployment: TLS by MILLRACE_TLS_CA, and a token for engines alone.

Env workers are foreign code, so they do not get the workers' token: `EngineToken` of the env-server writes what follows
from it into a file for them. Foreign engines get nothing: their certificates are the system's to check, and our token
is none of their business.
"""

import asyncio
import contextlib
import contextvars
import itertools
import os
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp

from millrace.backoff import Backoff
from millrace.rpc.access import ClientAccess
from millrace.rpc.reach import kept_alive_socket
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
    """TLS, token and HTTP sessions of one process for calls to engines; files are read again when they change."""

    def __init__(self, access: ClientAccess | None = None) -> None:
        """Prepare calls to engines with `access`, a token and TLS files; by default those that this process's variables
        name.

        Raises InvalidSpecError if a file named there is wrong.
        """
        self._access = ClientAccess.engine(Settings.from_env(os.environ)) if access is None else access
        self._context: ssl.SSLContext | None = None
        self._seen: Stamp = ()
        self._sessions: dict[asyncio.AbstractEventLoop, aiohttp.ClientSession] = {}

    def headers(self, url: str) -> dict[str, str]:
        """Return the HTTP header with the engine token for a request to `url`; {} if this process has no token.

        Raises InvalidStateError if the URL would carry it to another machine in plain text.
        """
        if self._access.secret is None:
            return {}
        parts = urlsplit(url)
        if parts.scheme != "https":
            # Without TLS files, because the URL's scheme decides whether this request is encrypted.
            ClientAccess(secret=self._access.secret, is_insecure=self._access.is_insecure).require_safe(
                parts.netloc if parts.port else f"{parts.netloc}:80"
            )
        return self._access.headers()

    def context(self) -> ssl.SSLContext | None:
        """Return the TLS context for requests to engines, made anew when its files have changed.

        None is the HTTP library's own, which trusts the system's certificates.
        """
        tls = self._access.tls
        if tls is None:
            return None
        # Certificates may be renewed while the process runs, and a context is not made for every request.
        if self._context is None or tls.stamp() != self._seen:
            self._seen = tls.stamp()
            self._context = client_context(tls)
        return self._context

    def session(self) -> aiohttp.ClientSession:
        """Return the HTTP session of the running event loop, made at the first call and kept until `close`.

        The session does not limit connections, because the env-server's capacity does.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._sessions:
            self._sessions[loop] = make_session()
        return self._sessions[loop]

    async def close(self) -> None:
        """Close the HTTP session of the running event loop, if there is one."""
        if session := self._sessions.pop(asyncio.get_running_loop(), None):
            await session.close()


def make_session() -> aiohttp.ClientSession:
    """Make an HTTP session for engines and endpoints, without a limit of connections; its requests are noted as
    time at the engine.
    """
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, socket_factory=kept_alive_socket),
        timeout=aiohttp.ClientTimeout(total=_TOTAL_TIMEOUT_S, sock_connect=_CONNECT_TIMEOUT_S),
        trace_configs=[noting_engine()],
    )


class EngineToken:
    """The env-server's side: the variables and the token file with which its workers call engines."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        """Read from `environ`, by default this process's variables, how this env-server's workers may call engines.

        Raises InvalidSpecError if a file named there is wrong.
        """
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
        """Return the variables by which an env worker has access to engines: those of TLS, and that of the token file.

        The token file is written first. There is none, and no variable of it, if the env-server has no token file for
        workers.
        """
        variables = self._shared.access_environ()
        if self._workers is not None:
            variables["MILLRACE_ENGINE_TOKEN_FILE"] = str(self._path())
            self.refresh()
        return variables

    def visible(self) -> list[str]:
        """Return the paths that an env worker must be able to read for its access to engines."""
        shared = [path for path in self._shared.access_environ().values() if os.path.isabs(path)]
        return shared if self._workers is None else [*shared, str(self._path().parent)]

    def refresh(self) -> None:
        """Write the workers' token file again if the env-server's token has changed; costs microseconds if not."""
        if self._workers is None or (tokens := self._workers.engine_tokens()) == self._written:
            return
        path = self._path()
        # Renamed when it is complete, because workers read the file at any time.
        fresh = path.with_suffix(".new")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write("".join(f"{token}\n" for token in tokens))
        # Before the rename: a worker must be able to read the file as soon as it has its name.
        if self.owner is not None:
            os.chown(fresh, *self.owner)
            os.chown(path.parent, *self.owner)
        fresh.rename(path)
        self._written = tokens

    def _path(self) -> Path:
        """Return the path of the workers' token file, in a temporary directory that is made at the first call."""
        if self._directory is None:
            self._directory = TemporaryDirectory(prefix="millrace-engine-")
        return Path(self._directory.name) / "token"


_OURS: list[EngineAccess] = []
_TOKEN: list[EngineToken] = []


def engine_access() -> EngineAccess:
    """Return this process's EngineAccess, made from its variables at the first call."""
    if not _OURS:
        _OURS.append(EngineAccess())
    return _OURS[0]


def engine_token_for_workers() -> EngineToken:
    """Return this env-server's EngineToken, by which its workers get access to engines; made at the first call."""
    if not _TOKEN:
        _TOKEN.append(EngineToken())
    return _TOKEN[0]


# Which failures of a model call mean that the engine went away, and how often a call is tried before that is reported.
#
# A lost engine (connection refused or broken off; a replica that starts, drains, or is being updated for longer than
# a moment; one that refuses our token while tokens are being changed) does not depend on the task: its rollout ends
# as ENGINE_LOST and the orchestrator plays it again, whole, where an engine answers. Every other status of an engine
# (400, 500) depends on the request.

EXTERNAL_RETRIED_STATUSES = frozenset({408, 429, 500, 502, 503, 504, *range(520, 525)})
"""An endpoint that is not ours has no other replica that we know of: what may pass by itself is tried again there. A
content network says 520 to 524 if the server that it fronts does not answer."""
EXTERNAL_MAX_ATTEMPTS = 6
"""Tries of one model call of an external endpoint, within a minute and a half."""
MAX_RETRY_AFTER_S = 30.0
"""Longest pause that an endpoint's `Retry-After` is given."""
RETRIED_STATUSES = frozenset({429, 503})
"""The engine refused before it did any work: it is starting, updating its policy, or full."""
LOST_STATUSES = frozenset({429, 502, 503, 504})
"""After the last try the engine counts as lost."""
REFUSED_STATUSES = frozenset({401, 403})
"""An engine of ours answers so while it or we do not have the new token yet; another endpoint refuses for good."""
MAX_ATTEMPTS = 4
"""Tries of one model call, within two seconds: longer outages are the orchestrator's, which knows other replicas."""
ENGINE_LOST_MARK = "engine lost:"
"""Begins the message of such an error, through layers that keep only its text."""
_BACKOFF = Backoff(0.25, 5.0, spread=(0.5, 1.0))
_EXTERNAL_BACKOFF = Backoff(1.0, MAX_RETRY_AFTER_S, spread=(1.0, 1.25))


def external_pause_s(attempt: int, retry_after: str | None) -> float:
    """Return the seconds to wait after the `attempt`-th try (from 1) at an endpoint that is not ours.

    If `retry_after`, the text of the answer's header, is a number above 0, these are the seconds; else (also for None,
    and for a date) the seconds are about 1, 2, 4, … Both are at most MAX_RETRY_AFTER_S, but for some jitter.
    """
    try:
        asked_s = 0.0 if retry_after is None else float(retry_after)
    except ValueError:  # a date: rare, and our own pauses do
        asked_s = 0.0
    is_asked = 0 < asked_s < float("inf")
    return _EXTERNAL_BACKOFF.limited(asked_s) if is_asked else _EXTERNAL_BACKOFF.after(attempt)


def retry_pause_s(attempt: int) -> float:
    """Return the seconds to wait after the `attempt`-th try (from 1) at an engine of ours, with jitter.

    The jitter spreads the rollouts of a group.
    """
    return _BACKOFF.after(attempt)


# Where each play of this worker is: at the engine, at a tool, at a reward function, or in other code.
#
# The error of a rollout that misses its deadline has it, and so has the env-server's report of what it waits for.

ENGINE = "the engine"
ELSEWHERE = "the environment's own code"
_NUMBERS = itertools.count()


@dataclass(slots=True)
class Standing:
    """Where one play is now, such as at the engine or a reward function: several places, if it plays several
    members.
    """

    _now: dict[int, tuple[str, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def at(self, place: str) -> Iterator[None]:
        """Note that the play is at `place`, such as "the engine", during the block."""
        number = next(_NUMBERS)
        self._now[number] = (place, time.monotonic())
        try:
            yield
        finally:
            self._now.pop(number, None)

    @property
    def longest(self) -> tuple[str, float] | None:
        """Return (place, seconds) of the place where the play has been longest of those where it is now.

        None if it is at none.
        """
        found = min(self._now.values(), key=lambda entry: entry[1], default=None)
        return None if found is None else (found[0], time.monotonic() - found[1])

    @property
    def place(self) -> str:
        """Return the place where the play has been longest of those where it is now; ELSEWHERE if it is at none."""
        longest = self.longest
        return ELSEWHERE if longest is None else longest[0]

    def describe(self, own_line: str) -> str:
        """Return where the play is now as text, as in `for 18.2 s at reward function 'slow'`.

        If it is at no noted place, the text has `own_line`, a line of the environment's code, or ELSEWHERE for "".
        """
        if (longest := self.longest) is not None:
            return f"for {longest[1]:.1f} s at {longest[0]}"
        return f"in {own_line or ELSEWHERE}"


_STANDING: contextvars.ContextVar[Standing | None] = contextvars.ContextVar("millrace_standing", default=None)


def begin() -> Standing:
    """Make and return a new Standing for the play of the current task: `at` notes there where this task, and tasks
    that it starts, are.
    """
    standing = Standing()
    _STANDING.set(standing)
    return standing


def at(place: str) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: during its block the play of the current task is noted to be at `place`.

    Outside of a play it does nothing.
    """
    standing = _STANDING.get()
    return contextlib.nullcontext() if standing is None else standing.at(place)


def places(standings: Iterable[Standing]) -> Counter[str]:
    """Return how many of the plays are at each place."""
    return Counter(standing.place for standing in standings)


def noting_engine() -> aiohttp.TraceConfig:
    """Return a trace config for an aiohttp session: during each of its requests the play is noted to be at the
    engine.
    """
    config = aiohttp.TraceConfig()

    async def start(_: Any, context: Any, __: Any) -> None:
        """Begin the note that the play is at the engine."""
        context.block = at(ENGINE)
        # The trace config has separate callbacks for begin and end, so the block cannot be a `with` statement.
        context.block.__enter__()

    async def end(_: Any, context: Any, __: Any) -> None:
        """End the note that the play is at the engine."""
        context.block.__exit__(None, None, None)

    config.on_request_start.append(start)
    config.on_request_end.append(end)
    config.on_request_exception.append(end)
    return config
