"""Who may call whom: what servers demand, what clients show, and where plain text is allowed.

    service                          beyond loopback a server demands
    millrace.v1.*                    TLS, and a token of MILLRACE_TOKENS_FILE
    millrace.internal.v1.*           TLS, and the workers' token of MILLRACE_WORKER_TOKEN_FILE
    HTTP API of engines              TLS, and a token of either file, or what env workers get instead of the workers'
    GET /metrics                     TLS, and a token of either file, or of MILLRACE_METRICS_TOKEN_FILE
    reflection, unknown methods      one of the two
    grpc.health.v1, GET /health      nothing: they tell serving or not serving

A token whose line names a tenant opens that tenant's runs in millrace.v1.*, the one that calls (`calling_tenant`).
Neither engines nor metrics keep tenants apart: such a token does not open them.

A token whose line says `access=read` opens what reads (`READING_METHODS`, `GET /v1/models`, `GET /metrics`) and nothing
else.

With MILLRACE_TLS_CLIENT_CA every caller must show a certificate of that CA as well (mTLS), or instead of a token where
no file of tokens is set. What is set is demanded everywhere, also on loopback; what must be set but is not keeps a
server from starting, unless MILLRACE_INSECURE=1. See docs/security.md.
"""

import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc

from millrace.errors import (
    InternalError,
    InvalidSpecError,
    InvalidStateError,
    PermissionDeniedError,
    UnauthenticatedError,
    Violation,
)
from millrace.rpc.tls import ClientFiles, ServerFiles
from millrace.rpc.tokens import AcceptedToken, SecretFile, TokensFile, WorkersFile
from millrace.telemetry.settings import Settings, parse_address, variable_name

PUBLIC = "public"
"""The kind of token that people and their tools have."""
WORKER = "worker"
"""The kind of token that the services of a deployment have."""
AUTHORIZATION = "authorization"
METRICS_PATH = "/metrics"

_PUBLIC_PACKAGE, _INTERNAL_PACKAGE, _HEALTH = "/millrace.v1.", "/millrace.internal.v1.", "/grpc.health.v1.Health/"
_SCHEME = "bearer "
# What users and environments may ask of an engine. Everything else of its HTTP API is for the services themselves.
_ENGINE_PATHS = frozenset(
    {
        "/v1/models",
        "/v1/chat/completions",
        "/v1/completions",
        "/inference/v1/generate",
        "/tokenize",
        "/detokenize",
        METRICS_PATH,
    }
)

_READING_PATHS = frozenset({"/v1/models", METRICS_PATH})
READING_METHODS = frozenset(
    f"/millrace.v1.RunService/{name}"
    for name in (
        *("GetRun", "ListRuns", "AuditRun", "WatchRun", "ListCheckpoints", "ExplainRun"),
        *("ListMetrics", "ListRollouts", "GetLineage", "ListUsage"),
    )
)
"""What a token that may only read may call of the public API. A method that is not named here writes."""

Find = Callable[[str], AcceptedToken | None]


def denied() -> UnauthenticatedError:
    """Make (not raise) the error for a caller without the right to call: a valid bearer token is required.

    It is the same for every such caller, and names neither the reason nor whether the method exists.
    """
    return UnauthenticatedError(
        "a valid bearer token is required",
        reason="UNAUTHENTICATED",
        remedy="give one with MILLRACE_TOKEN_FILE or --token-file; `millrace token new` makes them",
    )


def read_only() -> PermissionDeniedError:
    """Make (not raise) the error for a caller whose token may only read, and who called what changes something."""
    return PermissionDeniedError(
        "this token may only read: its line in the server's tokens file says access=read",
        reason="READ_ONLY_TOKEN",
        remedy="use a token that may write; `millrace token new` without --read-only makes one",
    )


def operators_only() -> PermissionDeniedError:
    """Make (not raise) the error for a caller whose token is a tenant's, and who asked for what no tenant has alone."""
    return PermissionDeniedError(
        "this token is a tenant's, and opens the runs of that tenant only",
        reason="TENANT_TOKEN",
        remedy="use the token of an operator: its line in the server's tokens file names no tenant",
    )


_CALLER: ContextVar[str] = ContextVar("tenant of the caller")


def set_caller(tenant: str) -> None:
    """Note, for the rest of this task and for those that it starts, that a tenant calls; empty for an operator."""
    _CALLER.set(tenant)


def calling_tenant() -> str:
    """Return the tenant whose call this task answers; empty for an operator.

    Raise InternalError in a task that answers no call: what nobody has admitted sees nothing.
    """
    try:
        return _CALLER.get()
    except LookupError:
        raise InternalError("a call was not admitted before it was answered", reason="CALLER_UNKNOWN") from None


def is_loopback(host: str) -> bool:
    """Return whether a listener on `host` (a name or address, also in brackets) is reached from this machine only."""
    name = host.strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Why a call was let in."""

    name: str
    """Name of the token's line; empty where none is demanded."""
    tenant: str
    """Whose runs it opens; empty for an operator, and where no token is demanded."""
    holds: Callable[[], bool]
    """Whether it still is: tokens expire, are revoked, or get another tenant while streams run."""
    may_write: Callable[[], bool] = lambda: True
    """Whether the caller may change something, by the token's line of now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """What one process demands of its callers."""

    tls: ServerFiles | None = None
    tokens: TokensFile | None = None
    worker_tokens: WorkersFile | None = None
    metrics_tokens: WorkersFile | None = None
    """Opens `GET /metrics` and nothing else."""
    is_insecure: bool = False
    health_listen: str | None = None

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Create what this process demands of its callers from the settings: certificates, token files,
        MILLRACE_INSECURE.

        Reads the token files. InvalidSpecError names the variable and file that is wrong.
        """
        cert, key, client_ca = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        _require_pair(settings)
        if client_ca is not None and cert is None:
            message = "is set, but MILLRACE_TLS_CERT and MILLRACE_TLS_KEY are not"
            raise _invalid(Violation(field="MILLRACE_TLS_CLIENT_CA", value=client_ca, message=message))
        tls = None
        if cert is not None and key is not None:
            tls = ServerFiles(cert=Path(cert), key=Path(key), client_ca=Path(client_ca) if client_ca else None)
        public, workers, metrics = settings.tokens_file, settings.worker_token_file, settings.metrics_token_file
        return cls(
            tls=tls,
            tokens=TokensFile(Path(public), field="MILLRACE_TOKENS_FILE") if public else None,
            worker_tokens=WorkersFile(Path(workers), field="MILLRACE_WORKER_TOKEN_FILE") if workers else None,
            metrics_tokens=WorkersFile(Path(metrics), field="MILLRACE_METRICS_TOKEN_FILE") if metrics else None,
            is_insecure=settings.insecure,
            health_listen=settings.health_listen,
        )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Create what this process demands of its callers from environment variables, by default those of this process.

        InvalidSpecError names the variable and file that is wrong.
        """
        return cls.of(Settings.from_env(os.environ if environ is None else environ))

    def require_safe(self, address: str, kinds: Iterable[str], *, field: str = "MILLRACE_LISTEN") -> None:
        """Raise InvalidSpecError if a server for these kinds of callers (`PUBLIC`, `WORKER`) must not listen on
        `address`.

        Beyond loopback it must not without TLS, and without tokens for each kind or client certificates, unless
        MILLRACE_INSECURE allows it. `address` is host:port; `field` is the setting that holds it, for the message.
        """
        host, _ = parse_address(address)
        if self.is_insecure or is_loopback(host):
            return
        violations: list[Violation] = []
        if self.tls is None:
            message = "is not loopback, and without MILLRACE_TLS_CERT and MILLRACE_TLS_KEY calls travel in plain text"
            violations.append(Violation(field=field, value=address, message=message))
        has_mtls = self.tls is not None and self.tls.client_ca is not None
        wanted = {PUBLIC: ("tokens_file", self.tokens), WORKER: ("worker_token_file", self.worker_tokens)}
        for kind in sorted(set(kinds)):
            setting, tokens = wanted[kind]
            if tokens is None and not has_mtls:
                message = f"is not set, so everybody who reaches {address} could call its {kind} API"
                violations.append(Violation(field=variable_name(setting), message=message))
        if violations:
            raise _invalid(
                *violations,
                remedy="set them (docs/security.md), or listen on 127.0.0.1, or allow it with MILLRACE_INSECURE=1",
            )

    def admit(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Grant:
        """Return the grant for a gRPC call if its metadata has an accepted token, else raise `denied()` or
        `read_only()`.

        `method` is the full name with slashes: it decides whose tokens are accepted (public, workers', either), and
        whether a token that may only read is enough. Health needs no token. Client certificates were checked in the TLS
        handshake.
        """
        if method.startswith(_HEALTH):
            return _free()
        if method.startswith(_PUBLIC_PACKAGE):
            kinds = [PUBLIC]
        elif method.startswith(_INTERNAL_PACKAGE):
            kinds = [WORKER]
        else:
            kinds = [PUBLIC, WORKER]
        values = [value for key, value in metadata if key == AUTHORIZATION and isinstance(value, str)]
        grant = self._admit(kinds, values)
        # Reflection and unknown methods change nothing: a token that may only read is enough for them.
        if kinds == [PUBLIC] and method not in READING_METHODS and not grant.may_write():
            raise read_only()
        return grant

    def admit_http(self, path: str, authorization: str | None) -> Grant:
        """Return the grant for an HTTP request to `path`, or raise `denied()` or `read_only()`.

        `authorization` is the value of the header of that name; None if it is missing. /health needs no token, and
        nothing does where this process demands none. Workers' tokens open every path, scrapers' only that of the
        metrics. Public and env workers' tokens open the paths of `_ENGINE_PATHS` alone; a token that may only read
        opens only the paths that change nothing, and a tenant's opens none: an engine serves whichever run has it.
        """
        has_mtls = self.tls is not None and self.tls.client_ca is not None
        for_scrapers = self.metrics_tokens if path == METRICS_PATH else None
        # Without any secret on this server there is nothing to check. Health is open always: load balancers have no
        # token.
        is_open = self.worker_tokens is None and (has_mtls or self.tokens is None) and for_scrapers is None
        if path == "/health" or is_open:
            return _free()
        ways: list[Find] = [] if for_scrapers is None else [for_scrapers.find]
        if self.worker_tokens is not None:
            ways.append(self.worker_tokens.find)
        # Env workers run foreign code: their token opens the engine's routes and no others.
        if path in _ENGINE_PATHS:
            ways += [] if self.tokens is None else [self.tokens.find]
            ways += [] if self.worker_tokens is None else [self.worker_tokens.find_engine]
        grant = _granted(ways, [] if authorization is None else [authorization])
        if grant.tenant:
            raise operators_only()
        if path not in _READING_PATHS and not grant.may_write():
            raise read_only()
        return grant

    def admit_metrics(self, authorization: str | None) -> Grant:
        """Return the grant for a reader of `GET /metrics` of a service without an HTTP API, or raise `denied()`.

        `authorization` is the value of the header of that name; None if it is missing. Scrapers', workers' and
        operators' tokens are accepted, those of env workers and tenants are not. Without any token file everybody is
        let in.
        """
        ways = [file.find for file in (self.metrics_tokens, self.worker_tokens, self.tokens) if file is not None]
        grant = _granted(ways, [] if authorization is None else [authorization]) if ways else _free()
        # As with no token at all: its series have the names of all runs.
        if grant.tenant:
            raise denied()
        return grant

    def _admit(self, kinds: Sequence[str], authorizations: Sequence[str]) -> Grant:
        """Return the grant if the one bearer token of `authorizations` is accepted by a file of the `kinds`; else raise
        `denied()`.

        `kinds` are of `PUBLIC` and `WORKER`, `authorizations` the values of all authorization headers. Where none of
        the kinds has a file, every call is granted.
        """
        files = {PUBLIC: self.tokens, WORKER: self.worker_tokens}
        ways = [tokens.find for kind in kinds if (tokens := files[kind]) is not None]
        return _granted(ways, authorizations) if ways else _free()


def _granted(ways: Sequence[Find], authorizations: Sequence[str]) -> Grant:
    """Return a grant if one of `ways` (look-ups of a token in a file) accepts the bearer token, else raise `denied()`.

    `authorizations` are the values of all authorization headers. The grant looks the token up again each time that it
    is asked whether it still holds.
    """
    token = _bearer(authorizations)

    def find() -> AcceptedToken | None:
        """Look the token up in every file, and return the first entry that accepts it.

        None if it is unknown or expired by now.
        """
        # A list and not a generator: every file is asked, whichever accepts the token, so the time shows nothing.
        return next((found for found in [way(token) for way in ways] if found is not None), None)

    accepted = find()
    if accepted is None:
        raise denied()
    return Grant(
        name=accepted.name,
        tenant=accepted.tenant,
        holds=lambda: (now := find()) is not None and now.tenant == accepted.tenant,
        may_write=lambda: (now := find()) is not None and now.may_write,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientAccess:
    """How one process calls servers: whom it trusts, and what it shows."""

    tls: ClientFiles | None = None
    """None is plain text."""
    secret: Callable[[], str] | None = None
    """Gives the bearer token of now; None shows none."""
    is_insecure: bool = False

    @classmethod
    def plain(cls) -> Self:
        """Return the access of a client that speaks plain text and shows no token, for servers of one's own on
        loopback.
        """
        return cls()

    @classmethod
    def public(cls, settings: Settings) -> Self:
        """Return the access of clients of the public API: whom they trust, and the user's token if the settings have
        one.

        The token's file goes before the token itself. InvalidSpecError names the variable and file that is wrong.
        """
        secret: Callable[[], str] | None = None
        if settings.token_file is not None:
            secret = SecretFile(Path(settings.token_file), field="MILLRACE_TOKEN_FILE").read
        elif (token := settings.token) is not None:
            secret = lambda: token  # noqa: E731 - one line says it all
        return cls(tls=_client_files(settings), secret=secret, is_insecure=settings.insecure)

    @classmethod
    def internal(cls, settings: Settings) -> Self:
        """Return the access of calls between the services: whom they trust, and the workers' token if the settings have
        one.

        InvalidSpecError names the variable and file that is wrong.
        """
        path = settings.worker_token_file
        secret = None if path is None else SecretFile(Path(path), field="MILLRACE_WORKER_TOKEN_FILE").read
        return cls(tls=_client_files(settings), secret=secret, is_insecure=settings.insecure)

    @classmethod
    def engine(cls, settings: Settings) -> Self:
        """Return the access of env workers, which call the HTTP API of engines and nothing else, with a token of their
        own.

        InvalidSpecError names the variable and file that is wrong.
        """
        path = settings.engine_token_file
        secret = None if path is None else SecretFile(Path(path), field="MILLRACE_ENGINE_TOKEN_FILE").read
        return cls(tls=_client_files(settings), secret=secret, is_insecure=settings.insecure)

    @classmethod
    def public_from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return `public` for the settings in environment variables, by default those of this process."""
        return cls.public(Settings.from_env(os.environ if environ is None else environ))

    @classmethod
    def internal_from_environ(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Return `internal` for the settings in environment variables, by default those of this process."""
        return cls.internal(Settings.from_env(os.environ if environ is None else environ))

    def require_safe(self, address: str) -> None:
        """Raise InvalidStateError if calls to `address` (host:port) would carry a token in plain text beyond this
        machine.
        """
        if self.secret is None or self.tls is not None or self.is_insecure or is_loopback(parse_address(address)[0]):
            return
        raise InvalidStateError(
            f"refusing to send a token to {address} in plain text",
            reason="TOKEN_IN_PLAIN_TEXT",
            remedy="trust the server's certificate with MILLRACE_TLS_CA or --tls-ca (a PEM file, or `system`), or "
            "allow it with MILLRACE_INSECURE=1",
        )

    def headers(self) -> dict[str, str]:
        """Return the HTTP header that shows the current token; empty if this client has none.

        UnavailableError if it is gone.
        """
        return {} if self.secret is None else {"Authorization": f"Bearer {self.secret()}"}

    def channel_options(self) -> list[tuple[str, Any]]:
        """Return gRPC channel options: the name that servers' certificates must bear, if the settings have one; else
        none.
        """
        name = self.tls.server_name if self.tls is not None else None
        return [("grpc.ssl_target_name_override", name)] if name else []

    def channel_credentials(self) -> grpc.ChannelCredentials | None:
        """Return TLS credentials of the current files for a gRPC channel; None if this client speaks plain text."""
        return None if self.tls is None else self.tls.grpc_credentials()


def _client_files(settings: Settings) -> ClientFiles | None:
    """Return the certificate files of a client; None, for plain text, if no CA is set.

    InvalidSpecError if half a pair is set.
    """
    _require_pair(settings)
    if settings.tls_ca is None:
        return None
    cert, key = settings.tls_cert, settings.tls_key
    return ClientFiles(
        ca=Path(settings.tls_ca),
        cert=Path(cert) if cert else None,
        key=Path(key) if key else None,
        server_name=settings.tls_server_name,
    )


def _require_pair(settings: Settings) -> None:
    """Raise InvalidSpecError if only one of certificate and key is set; names the variable that is missing."""
    if (settings.tls_cert is None) != (settings.tls_key is None):
        field, other = ("tls_cert", "tls_key") if settings.tls_cert is None else ("tls_key", "tls_cert")
        message = f"is not set, but {variable_name(other)} is"
        raise _invalid(Violation(field=variable_name(field), message=message))


def _bearer(authorizations: Sequence[str]) -> str:
    """Return the bearer token in the only authorization header; empty, which no file accepts, in all other cases."""
    if len(authorizations) != 1 or not authorizations[0].lower().startswith(_SCHEME):
        return ""
    return authorizations[0][len(_SCHEME) :].strip()


def _free() -> Grant:
    """Return the grant of a call that needs no token: it has no name, always holds and may write."""
    return Grant(name="", tenant="", holds=lambda: True)


def _invalid(*violations: Violation, remedy: str = "set both and start again") -> InvalidSpecError:
    """Make the error for settings that are wrong together; the default `remedy` is for half a pair."""
    return InvalidSpecError(violations, reason="ACCESS_INVALID", remedy=remedy)
