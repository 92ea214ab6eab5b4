"""The door of the dashboard: hosts, tokens, cookies, and what a browser may do with an answer.

    GET pages and scripts     everybody: they hold nothing of a run
    GET /api/…                the cookie of a session, or a bearer token of the public API
    POST /api/…               a bearer token, or a session with its CSRF token in `X-Millrace-CSRF`, from our own pages

What changes a run needs a token that may write, too.

Where the public API demands no token, a browser gets its session without a code, and a program needs none; a page of
another site can send neither our header, nor JSON without being asked about it, which we never answer. A name that
resolves to this machine but is not its own (DNS rebinding) is turned away: where nobody must show a token, and on
loopback always, `Host` must be an address or `localhost`.
"""

import hmac
import ipaddress
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.errors import CapacityError, InvalidSpecError, PermissionDeniedError, UnauthenticatedError, Violation
from millrace.rpc.access import Grant, ServerAccess, is_loopback, read_only
from millrace.rpc.tokens import token_digest

CSRF_HEADER = "x-millrace-csrf"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
"""Of every answer."""


# Who looks: one-time codes become sessions, and a session is a cookie that no script can read.

CODE_S = 120.0
"""How long a code can be used."""
SESSION_S = 12 * 3600.0
"""How long a session lasts; the token that it came from may end it before."""
MAX_CODES, MAX_SESSIONS = 256, 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A browser that has logged in."""

    grant: Grant
    csrf: str
    """What its writes must show in a header."""
    ends: float


class Sessions:
    """Codes and sessions, kept as digests; nothing of them outlives the process."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._codes: OrderedDict[bytes, tuple[Grant, float]] = OrderedDict()
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()

    def new_code(self, grant: Grant) -> str:
        """A code that opens one session within `CODE_S`; CapacityError while too many are unused."""
        now = self._clock()
        for digest in [digest for digest, (_, ends) in self._codes.items() if ends <= now]:
            del self._codes[digest]
        if len(self._codes) >= MAX_CODES:
            raise CapacityError(
                f"{MAX_CODES} codes are unused", reason="TOO_MANY_CODES", remedy=f"try again in {CODE_S:.0f} s"
            )
        code = secrets.token_urlsafe(24)
        self._codes[token_digest(code)] = (grant, now + CODE_S)
        return code

    def redeem(self, code: str) -> str | None:
        """A new session's secret for a code, which is worth nothing from then on; None if it is none."""
        found = self._codes.pop(token_digest(code), None)
        if found is None:
            return None
        grant, ends = found
        return self.open(grant) if self._clock() < ends and grant.holds() else None

    def open(self, grant: Grant) -> str:
        """A new session's secret; the oldest session ends where there are too many."""
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.popitem(last=False)
        secret = secrets.token_urlsafe(32)
        self._sessions[token_digest(secret)] = Session(
            grant=grant, csrf=secrets.token_urlsafe(24), ends=self._clock() + SESSION_S
        )
        return secret

    def find(self, secret: str) -> Session | None:
        """The session of a cookie, if it has not ended and its token still is accepted."""
        digest = token_digest(secret)
        session = self._sessions.get(digest)
        if session is None:
            return None
        if self._clock() >= session.ends or not session.grant.holds():
            del self._sessions[digest]
            return None
        return session

    def end(self, secret: str) -> None:
        """Log out."""
        self._sessions.pop(token_digest(secret), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who has been let in."""

    grant: Grant
    session: Session | None
    """None for a bearer token, and for programs where none is demanded."""
    is_bearer: bool = False
    secret: str = ""
    """Of the session."""


class Guard:
    """Decides for one server."""

    def __init__(self, access: ServerAccess, sessions: Sessions, *, host: str) -> None:
        """`host` is where the server listens."""
        self._access = access
        self._sessions = sessions
        self._is_checking_host = is_loopback(host) or not self.demands_token

    @property
    def demands_token(self) -> bool:
        """Whether the public API wants to see a token."""
        return self._access.tokens is not None

    def check_host(self, values: Sequence[str]) -> None:
        """InvalidSpecError for a `Host` that may be somebody else's name for this machine."""
        if not self._is_checking_host:
            return
        value = values[0] if len(values) == 1 else ""
        if not _is_own(value):
            wrong = Violation(field="Host", value=value[:100], message="is neither an address nor localhost")
            raise InvalidSpecError(
                [wrong], reason="HOST_REFUSED", remedy="open the dashboard as http://127.0.0.1:PORT/, or set up tokens"
            )

    def bearer(self, authorizations: Sequence[str]) -> Grant:
        """The grant of a token of the public API; UnauthenticatedError without one, where one is demanded."""
        metadata = [("authorization", value) for value in authorizations]
        return self._access.admit("/millrace.v1.RunService/GetRun", metadata)

    def admit(self, authorizations: Sequence[str], secret: str) -> Caller:
        """Let a question in by its token, or by the cookie of a session."""
        if authorizations:
            return Caller(grant=self.bearer(authorizations), session=None, is_bearer=True)
        session = self._sessions.find(secret) if secret else None
        if session is None and not self.demands_token:
            return Caller(grant=self.bearer([]), session=None)
        if session is None:
            raise UnauthenticatedError(
                "log in first",
                reason="UNAUTHENTICATED",
                remedy="`millrace dashboard` opens this page with a code that logs you in",
            )
        return Caller(grant=session.grant, session=session, secret=secret)

    def admit_write(self, caller: Caller, *, csrf: str, fetch_site: str) -> None:
        """PermissionDeniedError unless a write comes from our own pages, or from somebody who holds a token."""
        if caller.is_bearer and self.demands_token:
            return
        is_known = caller.session is None or hmac.compare_digest(
            caller.session.csrf.encode(), csrf.encode(errors="surrogateescape")
        )
        if not is_known or fetch_site not in ("", "same-origin"):
            raise PermissionDeniedError(
                "this did not come from a page of the dashboard",
                reason="CSRF_REFUSED",
                remedy="load the page again; programs show a bearer token instead of a cookie",
            )

    def admit_action(self, caller: Caller) -> None:
        """PermissionDeniedError unless the caller's token may change something."""
        if not caller.grant.may_write():
            raise read_only()


def _is_own(value: str) -> bool:
    """Whether a `Host` can be no name of another site: an address, or `localhost`, with or without a port."""
    name, bracket, rest = value.partition("]") if value.startswith("[") else ("", "", "")
    if bracket:
        host, port = name[1:], rest.removeprefix(":")
        if rest and not rest.startswith(":"):
            return False
    else:
        host, _, port = value.partition(":")
    if port and not (port.isascii() and port.isdecimal()):
        return False
    if host.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
