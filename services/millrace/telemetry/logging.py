"""Logs: one line per event, the same fields everywhere, and secrets masked before they are written.

    setup("trainer")
    logger = logging.getLogger(__name__)  # the standard library's
    with bind(run="reverse-text-7f3a", step=12):
        logger.info("step completed", extra={"reward": 0.31})

    plain:  2025-01-31T12:00:00.123Z INFO trainer step completed run=reverse-text-7f3a step=12 reward=0.31
    JSON:   {"ts": "…", "level": "INFO", "service": "trainer", "msg": "step completed", "logger": "…", "run": "…", …}

It is the standard library's logging, because grpc, torch and vLLM use it too. Secrets are masked in the finished line,
so neither a traceback nor an `extra` can carry one out.
"""

import contextlib
import functools
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import RotatingFileHandler
from typing import Any, TextIO
from urllib.parse import unquote

from millrace.errors import InvalidSpecError, Violation

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
FILE_VARIABLE, FILE_BYTES = "MILLRACE_LOG_FILE", 64 << 20
"""The variable with a file that gets the lines, too, and the file's largest size; `FILE.1` has older lines."""
FILE_ONLY = "is_file_only"
"""Key of `extra` for a line that is not written to stderr, where the same is shown in another way."""
_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", FILE_ONLY}
_QUIET = ("aiohttp.access", "asyncio", "boto3", "botocore", "urllib3", "s3transfer", "filelock", "httpx", "httpcore")
_FIELDS: ContextVar[Mapping[str, Any]] = ContextVar("millrace_log_fields", default={})  # noqa: B039 - never mutated
_WINDOW_S, _LINES_PER_WINDOW = 60.0, 20
"""A message may be logged so often within a minute; of more only the 32nd, the 64th, … are written."""
_MAX_MESSAGES, _KEY_CHARS = 1000, 200
_NUMBER = re.compile(r"\d+")
_BOOLEANS = frozenset({"1", "true", "yes", "on"})


@contextlib.contextmanager
def bind(**fields: Any) -> Iterator[None]:
    """Add fields to every line that this task, and those that it starts, logs inside the block.

    Nested blocks add up.
    """
    token = _FIELDS.set({**_FIELDS.get(), **fields})
    try:
        yield
    finally:
        # An abandoned stream's generator is closed in another context than it began in: there is nothing to reset.
        with contextlib.suppress(ValueError):
            _FIELDS.reset(token)


def bound(name: str) -> Any:
    """Return the value of a field that `bind` added to the lines of this task; None if there is none of that name."""
    return _FIELDS.get().get(name)


def setup(
    service: str,
    *,
    level: str | None = None,
    json_lines: bool | None = None,
    stream: TextIO | None = None,
    environ: Mapping[str, str] | None = None,
) -> None:
    """Configure the root logger of this process, whose lines name `service`; a second call replaces the first.

    Level and format (`json_lines`) come from `MILLRACE_LOG_LEVEL` and `MILLRACE_LOG_JSON` of `environ` if they are
    None. Lines go to `stream` (None: stderr), and to the file that `MILLRACE_LOG_FILE` names. Raises InvalidSpecError
    for a wrong level.
    """
    environ = os.environ if environ is None else environ
    level = (level or environ.get("MILLRACE_LOG_LEVEL") or "INFO").upper()
    if level not in LEVELS:
        wrong = Violation(field="MILLRACE_LOG_LEVEL", value=level, message=f"must be one of {', '.join(LEVELS)}")
        raise InvalidSpecError([wrong], reason="SETTINGS_INVALID")
    if json_lines is None:
        json_lines = environ.get("MILLRACE_LOG_JSON", "").lower() in _BOOLEANS
    secrets = secrets_of(environ)
    handlers: list[logging.Handler] = [logging.StreamHandler(stream or sys.stderr)]
    handlers[0].addFilter(lambda record: not getattr(record, FILE_ONLY, False))
    if path := environ.get(FILE_VARIABLE):
        handlers.append(RotatingFileHandler(path, maxBytes=FILE_BYTES, backupCount=1, encoding="utf-8"))
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
        # The streams of the others are not ours to close: they are stderr, or the caller's.
        if isinstance(old, RotatingFileHandler):
            old.close()
    for handler in handlers:
        handler.setFormatter(JsonFormatter(service, secrets) if json_lines else PlainFormatter(service, secrets))
        # A filter for each handler: it counts, and a shared one would count a line once per handler.
        handler.addFilter(RateLimit())
        root.addHandler(handler)
    root.setLevel(level)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(True)


class RateLimit(logging.Filter):
    """Limits repeated warnings and errors: the first lines of each minute are written, then few.

    Messages that differ only in numbers count as one. A line that is written after others were left out has their
    number as `left_out`.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Make a filter that has seen no line; `clock` gives monotonic seconds."""
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], _Seen] = {}
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the line is written: always below WARNING, else unless its message has come often this minute.

        After the first lines of a minute only those are written whose count is a power of two. A line that follows
        others that were left out gets their number as the field `left_out`.
        """
        if record.levelno < logging.WARNING:
            return True
        key = record.name, record.levelno, _NUMBER.sub("#", str(record.msg)[:_KEY_CHARS])
        with self._lock:  # a handler asks its filters before it takes its own
            now, seen = self._clock(), self._seen.pop(key, None)
            if seen is None or now - seen.began >= _WINDOW_S:
                seen = _Seen(began=now, left_out=seen.left_out if seen else 0)
            self._seen[key] = seen
            if len(self._seen) > _MAX_MESSAGES:
                del self._seen[next(iter(self._seen))]
            seen.count += 1
        # A power of two has one bit: it and the number before it have none in common.
        if seen.count > _LINES_PER_WINDOW and seen.count & (seen.count - 1):
            seen.left_out += 1
            return False
        # Attributes of a record that are not standard become fields of its line.
        if seen.left_out:
            record.left_out, seen.left_out = seen.left_out, 0
        return True


@dataclass(slots=True)
class _Seen:
    """One message in the current minute."""

    began: float
    left_out: int = 0
    count: int = 0


class _Formatter(logging.Formatter):
    """Base of the formatters: collects the fields of a record, and masks secrets in the finished line."""

    def __init__(self, service: str, secrets: tuple[str, ...]) -> None:
        """Take the name of the service in each line, and the values to mask."""
        super().__init__()
        self.service = service
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line, with secrets masked."""
        return self.mask(self.line(record))

    def line(self, record: logging.LogRecord) -> str:
        """Return the record's line before secrets are masked."""
        raise NotImplementedError

    def mask(self, text: str) -> str:
        """Return the text with secrets masked."""
        return redact(text, secrets=self._secrets)

    def time(self, record: logging.LogRecord) -> str:
        """Return the record's time: UTC with milliseconds, RFC 3339."""
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"

    def fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """Return the bound fields and the record's own, which replace bound ones of the same name."""
        own = {key: value for key, value in record.__dict__.items() if key not in _STANDARD}
        return {**_FIELDS.get(), **own}

    def traceback(self, record: logging.LogRecord) -> str:
        """Return the record's traceback as text; "" without one."""
        parts = []
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return "\n".join(parts)


class PlainFormatter(_Formatter):
    """Lines as `time level service message key=value …`, for people."""

    def line(self, record: logging.LogRecord) -> str:
        """Return `time level service message key=value …` on one line, then the traceback on lines of its own."""
        message = record.getMessage().replace("\n", "\\n")  # one event stays one line
        pairs = "".join(f" {key}={_plain(value)}" for key, value in self.fields(record).items())
        text = f"{self.time(record)} {record.levelname} {self.service} {message}{pairs}"
        traceback = self.traceback(record)
        return f"{text}\n{traceback}" if traceback else text


class JsonFormatter(_Formatter):
    """One JSON object per line for log collectors."""

    def line(self, record: logging.LogRecord) -> str:
        """Return the record as a JSON object; a field with the name of a standard key gets the prefix `field_`."""
        entry: dict[str, Any] = {
            "ts": self.time(record),
            "level": record.levelname,
            "service": self.service,
            "msg": self.mask(record.getMessage()),
            "logger": record.name,
        }
        for key, value in self.fields(record).items():
            entry[f"field_{key}" if key in entry else key] = self._masked(value)
        if traceback := self.traceback(record):
            entry["exc"] = self.mask(traceback)
        return json.dumps(entry, ensure_ascii=False)

    def format(self, record: logging.LogRecord) -> str:
        """Return the record's line.

        Its parts are masked, because masking the finished object could break its quotes.
        """
        return self.line(record)

    def _masked(self, value: Any) -> Any:
        """Return a value of a field as plain data for JSON, with secrets masked in its texts and keys.

        Numbers that are not finite become texts, tuples lists, and values of other types `str(value)`.
        """
        match value:
            case float() if not math.isfinite(value):
                return str(value)  # JSON has no such number, and collectors drop the line
            case None | bool() | int() | float():
                return value
            case dict():
                return {self.mask(str(key)): self._masked(part) for key, part in value.items()}
            case list() | tuple():
                return [self._masked(part) for part in value]
            case _:
                return self.mask(str(value))


def _plain(value: Any) -> str:
    """Return a value of a field as text, quoted where it has blanks or quotes, or is empty."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if not text or any(char in text for char in ' "\n\t=') else text


# Secrets do not reach a log: URL passwords, bearer tokens, `password=…` pairs, and values of secret variables.

MASK = "***"
MAX_CHARS = 256 << 10
"""Most characters of one text that `masked` returns."""
MAX_SECRET_CHARS = 4096
"""Longest secret that is found where a text is cut."""
_MIN_SECRET_CHARS = 8  # shorter values ("1", "true") would mask ordinary text

# redis://user:password@host: everything from the colon up to the last @ before a slash or blank.
_URL_PASSWORD = re.compile(r"(?P<head>\b[A-Za-z][A-Za-z0-9+.-]*://[^\s/:@'\"]*:)(?P<secret>[^\s/'\"]+)@")
_BEARER = re.compile(r"(?P<head>\b[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}")
_TOKEN = re.compile(r"\bmrt_[A-Za-z0-9_-]{16,}")  # what `millrace token new` makes
_PAIR = re.compile(
    r"(?P<head>(?:\b|_)(?:password|passwd|api[_-]?key|(?:aws_)?secret_access_key|(?:aws_)?session_token|x-amz-signature"
    r"|x-amz-security-token)[\"']?\s*[=:]\s*[\"']?)[^\s&\"',;]+",
    re.IGNORECASE,
)
_SECRET_NAME = re.compile(
    r"(SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY|CREDENTIALS?|(^|_)(TOKEN|AUTHORIZATION))$"
)
_BETWEEN_WORDS = re.compile(r"-|(?<=[a-z0-9])(?=[A-Z])")  # of X-API-Key, and of accessToken


known_secrets: tuple[str, ...] = ()
"""The values given to `keep_secret`, in the form of `secrets_of`."""


def keep_secret(value: str) -> None:
    """Have `redact` mask a value from now on: the password in it if it is a URL, else all of it."""
    global known_secrets
    name = "URL" if "://" in value else "SECRET"
    # One tuple for another: log lines of other threads are being masked meanwhile.
    known_secrets = _longest_first({*known_secrets, *secrets_of({name: value})})


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the values to mask, longest first: those of variables with secret names, and passwords in URLs.

    Each value is also there as it is inside a JSON string and a Python repr, which is how logs quote it. Values shorter
    than 8 characters are left out.
    """
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret_name(name):
            found.add(value)
        # Passwords in URLs are percent-encoded, and programs show them decoded, too.
        for match in _URL_PASSWORD.finditer(value):
            found.update((match["secret"], unquote(match["secret"])))
    secret = {value for value in found if len(value) >= _MIN_SECRET_CHARS}
    quoted = {form[1:-1] for value in secret for form in (json.dumps(value), repr(value))}
    return _longest_first(secret | quoted)


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Return whether the value of a variable, header or config key of this name must not be shown."""
    return _SECRET_NAME.search(_BETWEEN_WORDS.sub("_", name).upper()) is not None


def redact(text: str, *, secrets: tuple[str, ...] | None = None) -> str:
    """Return the text with every secret masked: known values, passwords of URLs, tokens, and `password=…` pairs.

    `secrets` are known values, by default those of this process's environment; those of `keep_secret` are masked, too.
    """
    given = secrets_of(os.environ) if secrets is None else secrets
    # A secret that is part of a longer one would leave the rest of that one to be read.
    for secret in _longest_first({*given, *known_secrets}) if known_secrets else given:
        text = text.replace(secret, MASK)
    # A pattern costs ten times as much as the look whether it can match at all; most texts are names and states.
    if "://" in text:
        text = _URL_PASSWORD.sub(rf"\g<head>{MASK}@", text)
    if "earer" in text:
        text = _BEARER.sub(rf"\g<head>{MASK}", text)
    if "mrt_" in text:
        text = _TOKEN.sub(MASK, text)
    if "=" in text or ":" in text:
        text = _PAIR.sub(rf"\g<head>{MASK}", text)
    return text


def redacted_beginning(text: str, limit: int, *, secrets: tuple[str, ...] | None = None) -> str:
    """Return at most `limit` characters of the redacted text, with an ellipsis if there are more.

    `secrets` are known values to mask, by default those of this process's environment. The text is redacted before it
    is cut, because the beginning of a secret would not be recognised.
    """
    if len(text) <= limit:
        return redact(text, secrets=secrets)
    return f"{redact(text[: limit + MAX_SECRET_CHARS], secrets=secrets)[:limit]}…"


def redacted_end(text: str, limit: int, *, secrets: tuple[str, ...] | None = None) -> str:
    """Return at most the last `limit` characters of the text, redacted before it is cut.

    `secrets` are known values to mask, by default those of this process's environment.
    """
    return redact(text[-(limit + MAX_SECRET_CHARS) :], secrets=secrets)[-limit:]


def secret_spans(text: str, *, secrets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Return the ranges (begin, end) of a text that `redact` would mask with these known secrets, in no order.

    They may overlap.
    """
    found = []
    for secret in {*secrets, *known_secrets}:
        at = text.find(secret)
        while at >= 0:
            found.append((at, at + len(secret)))
            # A secret may be in the text several times.
            at = text.find(secret, at + len(secret))
    found += [match.span("secret") for match in _URL_PASSWORD.finditer(text)]
    found += [match.span() for match in _TOKEN.finditer(text)]
    found += [(match.end("head"), match.end()) for pattern in (_BEARER, _PAIR) for match in pattern.finditer(text)]
    return found


def masked(value: Any, secrets: tuple[str, ...]) -> Any:
    """Return plain data for JSON with secrets masked: those in texts, and all values under secret names.

    Texts are cut at MAX_CHARS, and numbers that are not finite become None.
    """
    match value:
        case str():
            text = redacted_beginning(value, MAX_CHARS, secrets=secrets)
            return text.encode(errors="replace").decode() if not text.isascii() else text
        case dict():
            return {str(name): _field(str(name), item, secrets) for name, item in value.items()}
        case list() | tuple():
            return [masked(item, secrets) for item in value]
        case float():
            return value if math.isfinite(value) else None
        case _:
            return value


def _field(name: str, value: Any, secrets: tuple[str, ...]) -> Any:
    """Return the value of a field called `name` with secrets masked: all texts in it, if the name is a secret one."""
    if value and isinstance(value, str | list | dict) and is_secret_name(name):
        match value:
            case str():
                return MASK
            case list():
                return [_field(name, item, secrets) for item in value]
            case _:
                return {str(key): _field(name, item, secrets) for key, item in value.items()}
    return masked(value, secrets)


def _longest_first(values: set[str]) -> tuple[str, ...]:
    """Return the values sorted by length, the longest first, so that no part of a longer one is masked before."""
    return tuple(sorted(values, key=lambda value: (-len(value), value)))
