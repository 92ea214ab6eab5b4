"""Bearer tokens: files that hold them, read again when they change, and what a line of them means.

Two kinds of file, both mounted secrets:

    the tokens file of a server     one accepted token per line, as its hash:
                                    `sha256:<64 hex> NAME [access=read] [tenant=TENANT] [expires=RFC3339]`
    a secret file of a bearer       the token itself, one per line; the first is sent, and where the file is also what
                                    a server accepts (the workers' token), all of them are accepted

A file that is missing or unreadable later on accepts nobody; a malformed line is left out and logged (without its
content, which may be a token that somebody pasted there).
"""

import base64
import hashlib
import hmac
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Generic, TypeVar

from millrace.errors import InvalidSpecError, UnavailableError, Violation

logger = logging.getLogger(__name__)

TOKEN_PREFIX = "mrt_"
"""Begins every token, so that redaction and scanners for secrets know one when they see it."""
MIN_TOKEN_CHARS = 32
MAX_TOKEN_CHARS = 4096
MAX_FILE_BYTES = 1 << 20
_RACY_S = 2.0  # a file written as recently may change again without a visible change of its stamp
_TENANT = r"[a-z](?:[a-z0-9-]{0,18}[a-z0-9])?"
_LINE = re.compile(
    r"sha256:(?P<hash>[0-9a-f]{64})\s+(?P<name>[A-Za-z0-9][A-Za-z0-9._@-]{0,63})"
    r"(?:\s+access=(?P<access>read|write))?(?:\s+tenant=(?P<tenant>" + _TENANT + "))?"
    r"(?:\s+expires=(?P<expires>\S+))?"
)
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows after "Bearer"
_DURATION = re.compile(r"(?P<count>[1-9]\d{0,5})(?P<unit>[smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedToken:
    """One token that a server accepts."""

    digest: bytes
    """sha256 of the token."""
    name: str
    """Who has it; for logs."""
    expires: float | None = None
    """Seconds since 1970 from which on it is refused; None is never."""
    may_write: bool = True
    """Whether it may change something, and not only read."""
    tenant: str = ""
    """Whose runs it opens; empty for an operator's, which opens all."""


def is_tenant(text: str) -> bool:
    """Return whether a text names a tenant; the empty one names the operators."""
    return not text or re.fullmatch(_TENANT, text) is not None


def new_token() -> str:
    """Return a fresh token of 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(32)


def token_digest(token: str) -> bytes:
    """Return the sha256 of a token, which is what servers keep.

    Bytes of a header that are no UTF-8 count as themselves.
    """
    return hashlib.sha256(token.encode(errors="surrogateescape")).digest()


def engine_token(worker_token: str) -> str:
    """Return the token that env workers show to engines: it follows from the workers' token, but not the reverse.

    Environments are foreign code. This opens the engines' HTTP API to them, and no service of the deployment.
    """
    key = hmac.digest(worker_token.encode(), b"millrace: HTTP API of the engines", "sha256")
    return TOKEN_PREFIX + base64.urlsafe_b64encode(key).decode().rstrip("=")


def token_line(
    token: str, name: str, *, expires: datetime | None = None, may_write: bool = True, tenant: str = ""
) -> str:
    """Return the line of a tokens file that accepts the token, without a line end.

    It has the token's hash, not the token. `name` says who has the token. `tenant` is the tenant whose runs it opens,
    empty for an operator. `expires` without a zone is local time; None is never. Raises ValueError if the name or the
    tenant is malformed.
    """
    text = f"sha256:{token_digest(token).hex()} {name}"
    if not may_write:
        text += " access=read"
    if tenant:
        text += f" tenant={tenant}"
    if expires is not None:
        text += f" expires={expires.astimezone(UTC).isoformat(timespec='seconds').replace('+00:00', 'Z')}"
    parse_line(text)
    return text


def parse_line(text: str) -> AcceptedToken:
    """Return the accepted token that a line of a tokens file describes.

    ValueError says what is wrong, without the line.
    """
    match = _LINE.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            "must be `sha256:<64 hex digits> NAME [access=read] [tenant=TENANT] [expires=RFC3339]`; "
            "`millrace token new` prints such lines"
        )
    return AcceptedToken(
        digest=bytes.fromhex(match["hash"]),
        name=match["name"],
        expires=_expiry(match["expires"]),
        may_write=match["access"] != "read",
        tenant=match["tenant"] or "",
    )


def _expiry(text: str | None) -> float | None:
    """Return the time of an `expires=` entry in seconds since 1970; None stays None.

    ValueError if the text is no time, or a time without a zone.
    """
    if text is None:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        when = None
    if when is None or when.tzinfo is None:
        raise ValueError(f"expires={text} must be a time with its zone, such as 2030-01-31T12:00:00Z")
    return when.timestamp()


def parse_duration(text: str) -> timedelta:
    """Parse a whole number with a unit, such as `30d`, `12h`, `90m`, `45s` or `2w`; ValueError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError("must be a whole number and one of s, m, h, d, w, such as 30d")
    return timedelta(**{_UNITS[match["unit"]]: int(match["count"])})


def parse_secret(text: str) -> str:
    """Return `text` if it is a well-formed token; ValueError says what is wrong, without showing it."""
    if not MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS or not _TOKEN.fullmatch(text):
        raise ValueError(
            f"must be a token of at least {MIN_TOKEN_CHARS} letters, digits or ._~+/=-; `millrace token new` makes one"
        )
    return text


class WatchedFile(Generic[T]):
    """A small file of lines, parsed; read again when it changes. Reads take microseconds: no thread is needed."""

    def __init__(self, path: Path, parse: Callable[[str], T], *, field: str) -> None:
        """Read the file; InvalidSpecError, naming `field`, the path and every bad line, unless all lines are right.

        A file without a line is wrong, too. `parse` makes an item of a line's text, and raises ValueError for a bad
        line. `field` is the variable that names the file.
        """
        self.path = path
        self._parse = parse
        self._field = field
        self._stamp: tuple[int, ...] | None = None
        self._is_settled = False
        self._items: tuple[T, ...] = ()
        self._wrong: list[str] = []
        items, wrong = self._read()
        if wrong or not items:
            wrong = wrong or [f"{path} has no line"]
            violations = [Violation(field=field, value=str(path), message=text) for text in wrong]
            raise InvalidSpecError(violations, reason="SECRET_FILE_INVALID", remedy="mount the secret, or correct it")
        self._items = items

    def items(self) -> tuple[T, ...]:
        """Return the parsed lines of the file as it is now; it is read again only if it has changed.

        Malformed lines are logged and left out. A file that is missing or cannot be read has no lines.
        """
        if self._is_settled and self._stamp == _stamp(self.path):
            return self._items
        items, wrong = self._read()
        # Logged when it changes, and not at each call for as long as the file stays wrong.
        if (items, wrong) != (self._items, self._wrong):
            fields = {"field": self._field, "path": str(self.path), "lines": len(items)}
            if wrong:
                logger.error(
                    "a secret file is wrong; what is wrong in it is left out", extra={**fields, "wrong": wrong}
                )
            else:
                logger.info("a secret file has changed", extra=fields)
        self._items, self._wrong = items, wrong
        return items

    def _read(self) -> tuple[tuple[T, ...], list[str]]:
        """Read the file; return the items of the lines that parse, and in words what is wrong with the other lines.

        Remembers the file's stamp, by which `items` notices a change.
        """
        # The stamp is taken before the read: a file that changes meanwhile is read again at the next call.
        self._stamp, self._is_settled = _stamp(self.path), False
        try:
            with self.path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            text = raw.decode()
        except OSError as error:
            return (), [f"{self.path} cannot be read: {error.strerror or error}"]
        except UnicodeDecodeError:
            return (), [f"{self.path} is not text"]
        if len(raw) > MAX_FILE_BYTES:
            return (), [f"{self.path} has more than {MAX_FILE_BYTES} bytes"]
        # Settled: the stamp of before and after the read agree, and a later write must give another one.
        is_old = self._stamp is not None and time.time() - self._stamp[0] / 1e9 > _RACY_S
        self._is_settled = is_old and self._stamp == _stamp(self.path)
        items: list[T] = []
        wrong: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                items.append(self._parse(line.strip()))
            except ValueError as error:
                wrong.append(f"line {number} {error}")
        return tuple(items), wrong


def _stamp(path: Path) -> tuple[int, ...] | None:
    """Return times, size and identity of a file, which differ when it has changed; None if it is missing."""
    try:
        stat = os.stat(path)  # follows links: Kubernetes swaps one when a secret changes
    except OSError:
        return None
    return (stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino, stat.st_dev)


class TokensFile:
    """The tokens that a server accepts, as hashes."""

    def __init__(self, path: Path, *, field: str, clock: Callable[[], float] = time.time) -> None:
        """Read the tokens file; InvalidSpecError, naming the variable `field`, if it does not exist or has a bad line.

        `clock` gives seconds since 1970, by which tokens expire.
        """
        self._file = WatchedFile(path, parse_line, field=field)
        self._clock = clock

    def find(self, token: str) -> AcceptedToken | None:
        """Return the file's entry for a token; None if it is unknown or expired.

        Every line is compared, in constant time: how long it takes says nothing of the token.
        """
        return _match(token_digest(token), self._file.items(), now=self._clock())


class WorkersFile:
    """The workers' shared token: what this process sends to others, and what it accepts from them."""

    def __init__(self, path: Path, *, field: str) -> None:
        """Read the file of the workers' tokens.

        InvalidSpecError, naming the variable `field`, if it is missing or has a bad line.
        """
        self._path = path
        self._file = WatchedFile(path, parse_secret, field=field)

    def find(self, token: str) -> AcceptedToken | None:
        """Return an entry named "worker" if `token` is a line of the file; else None."""
        accepted = [AcceptedToken(digest=token_digest(item), name="worker") for item in self._file.items()]
        return _match(token_digest(token), accepted, now=0.0)

    def find_engine(self, token: str) -> AcceptedToken | None:
        """Return an entry named "env worker" if `token` is the one that env workers derive from a line of the file;
        else None.
        """
        accepted = [AcceptedToken(digest=token_digest(one), name="env worker") for one in self.engine_tokens()]
        return _match(token_digest(token), accepted, now=0.0)

    def engine_tokens(self) -> tuple[str, ...]:
        """Return the token that env workers show to engines (`engine_token`) for each line of the file."""
        return tuple(engine_token(item) for item in self._file.items())


class SecretFile:
    """The token that a client sends: the first line of a file."""

    def __init__(self, path: Path, *, field: str) -> None:
        """Read the file of a client's token.

        InvalidSpecError, naming the variable `field`, if it is missing or holds no token.
        """
        self._path = path
        self._field = field
        self._file = WatchedFile(path, parse_secret, field=field)

    def read(self) -> str:
        """Return the current token; UnavailableError while the file is gone or empty."""
        items = self._file.items()
        if not items:
            raise UnavailableError(
                f"{self._field}: {self._path} holds no token any more",
                reason="TOKEN_GONE",
                remedy="mount the secret again",
            )
        return items[0]


def _match(digest: bytes, accepted: Sequence[AcceptedToken], *, now: float) -> AcceptedToken | None:
    """Return the entry with this sha256 that has not expired at `now` (seconds since 1970), the last if several; else
    None.

    Every entry is compared, in constant time.
    """
    found: AcceptedToken | None = None
    # Without an early return: the time must not show which entry matches.
    for candidate in accepted:
        is_same = hmac.compare_digest(candidate.digest, digest)
        if is_same and (candidate.expires is None or now < candidate.expires):
            found = candidate
    return found
