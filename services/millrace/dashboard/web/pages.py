"""The files that browsers get: read once, from the package alone."""

import hashlib
from dataclasses import dataclass
from importlib import resources

_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticFile:
    """One file."""

    body: bytes
    content_type: str
    etag: str


def load() -> dict[str, StaticFile]:
    """Every file by its name."""
    found: dict[str, StaticFile] = {}
    for entry in resources.files("millrace.dashboard").joinpath("static").iterdir():
        ending = entry.name[entry.name.rfind(".") :]
        if ending in _TYPES:
            body = entry.read_bytes()
            found[entry.name] = StaticFile(
                body=body,
                content_type=f"{_TYPES[ending]}; charset=utf-8",
                etag=f'"{hashlib.sha256(body).hexdigest()[:16]}"',
            )
    return found
