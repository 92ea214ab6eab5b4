"""Who looks: one-time codes become sessions, and a session is a cookie that no script can read."""

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from millrace.errors import CapacityError
from millrace.rpc.access import Grant
from millrace.rpc.tokens import token_digest

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
