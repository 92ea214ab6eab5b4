"""Secrets do not reach a log: URL passwords, bearer tokens, `password=…` pairs, and values of secret variables."""

import functools
import json
import math
import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

MASK = "***"
MAX_CHARS = 256 << 10
"""Most characters of one text that `masked` gives."""
MAX_SECRET_CHARS = 4096
"""Longest secret that is found where a text is cut."""
_MIN_SECRET_CHARS = 8  # shorter values ("1", "true") would blot out ordinary text

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
"""What `keep_secret` was told, as `secrets_of` gives it."""


def keep_secret(value: str) -> None:
    """From now on `redact` masks this value of a file: of a URL the password, of another text all of it."""
    global known_secrets
    name = "URL" if "://" in value else "SECRET"
    # One tuple for another: log lines of other threads are being masked meanwhile.
    known_secrets = _longest_first({*known_secrets, *secrets_of({name: value})})


def secrets_of(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Values that must not be shown: those of variables with secret names, and passwords inside URLs; longest first.

    Each value comes with its forms inside a JSON string and inside a Python repr, which is how logs quote it.
    """
    found: set[str] = set()
    for name, value in environ.items():
        if is_secret_name(name):
            found.add(value)
        for match in _URL_PASSWORD.finditer(value):
            found.update((match["secret"], unquote(match["secret"])))
    secret = {value for value in found if len(value) >= _MIN_SECRET_CHARS}
    quoted = {form[1:-1] for value in secret for form in (json.dumps(value), repr(value))}
    return _longest_first(secret | quoted)


@functools.lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether what has this name, a variable, a header or a key of a config, must not be shown."""
    return _SECRET_NAME.search(_BETWEEN_WORDS.sub("_", name).upper()) is not None


def redact(text: str, *, secrets: tuple[str, ...] | None = None) -> str:
    """The text with every secret masked.

    `secrets` are known values, by default those of this process's environment; those of `keep_secret` come on top.
    """
    given = secrets_of(os.environ) if secrets is None else secrets
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
    """At most so many characters of the redacted text, then an ellipsis. Cut before, a secret would lose its end, and
    what is left of it would not be known for one."""
    if len(text) <= limit:
        return redact(text, secrets=secrets)
    return f"{redact(text[: limit + MAX_SECRET_CHARS], secrets=secrets)[:limit]}…"


def redacted_end(text: str, limit: int, *, secrets: tuple[str, ...] | None = None) -> str:
    """The last characters of the redacted text; see `redacted_beginning`."""
    return redact(text[-(limit + MAX_SECRET_CHARS) :], secrets=secrets)[-limit:]


def secret_spans(text: str, *, secrets: tuple[str, ...]) -> list[tuple[int, int]]:
    """Where `redact` would mask something, as begins and ends; they may overlap."""
    found = []
    for secret in {*secrets, *known_secrets}:
        at = text.find(secret)
        while at >= 0:
            found.append((at, at + len(secret)))
            at = text.find(secret, at + len(secret))
    found += [match.span("secret") for match in _URL_PASSWORD.finditer(text)]
    found += [match.span() for match in _TOKEN.finditer(text)]
    found += [(match.end("head"), match.end()) for pattern in (_BEARER, _PAIR) for match in pattern.finditer(text)]
    return found


def masked(value: Any, secrets: tuple[str, ...]) -> Any:
    """The plain value without secrets: neither in its texts, nor under names of secrets. Texts have an end, numbers are
    finite or None."""
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
    return tuple(sorted(values, key=lambda value: (-len(value), value)))
