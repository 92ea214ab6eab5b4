"""Object store: one synchronous protocol, for a local directory and for any S3-compatible server."""

import urllib.parse
from pathlib import Path

from millrace.errors import InvalidSpecError, Violation
from millrace.storage.base import ObjectInfo, ObjectStore

__all__ = ["ObjectInfo", "ObjectStore", "open_store"]


# From the URL of an object store to the store.


def open_store(url: str) -> ObjectStore:
    """Open the store that a URL names; nothing is requested yet, but a local directory is created.

    `file:///absolute/directory` or
    `s3://bucket[/prefix]?endpoint=http://host:port&region=us-east-1&addressing=virtual`. Credentials come from the
    `AWS_*` environment only, never from the URL. InvalidSpecError if the URL is malformed.
    """
    parts = urllib.parse.urlsplit(url)
    query = urllib.parse.parse_qs(parts.query, keep_blank_values=True)
    match parts.scheme:
        case "file":
            if parts.netloc or not parts.path.startswith("/") or query:
                raise _bad_url(url, "must be file:///absolute/directory")
            from millrace.storage.local import LocalStore

            return LocalStore(Path(urllib.parse.unquote(parts.path)))
        case "s3":
            unknown, endpoint = set(query) - {"endpoint", "region", "addressing"}, query.get("endpoint", [""])[0]
            addressing = query.get("addressing", [None])[0]
            unknown |= {addressing} - {None, "path", "virtual"}
            if not parts.hostname or parts.username or unknown or "@" in urllib.parse.urlsplit(endpoint).netloc:
                options = "endpoint=http://host:port&region=name&addressing=path|virtual"
                raise _bad_url(url, f"must be s3://bucket[/prefix][?{options}]")
            # Only here, because boto3 takes 0.4 s to import.
            from millrace.storage.s3 import S3Store

            return S3Store(
                bucket=parts.netloc,
                prefix=urllib.parse.unquote(parts.path).strip("/"),
                endpoint=endpoint or None,
                region=query.get("region", [""])[0] or None,
                addressing=addressing,  # type: ignore[arg-type] - one of the two, as seen above
            )
        case _:
            raise _bad_url(url, "must begin with file:// or s3://")


def _bad_url(url: str, problem: str) -> InvalidSpecError:
    """Make the error for a malformed URL, which is shown without a password; `problem` says what it must be."""
    shown = urllib.parse.urlsplit(url)
    query = "" if "@" in urllib.parse.unquote(shown.query) else shown.query
    # A password in a URL must not reach a log.
    safe = shown._replace(netloc=shown.netloc.rpartition("@")[2], query=query).geturl()
    return InvalidSpecError([Violation(field="MILLRACE_STORE_URL", value=safe, message=problem, source="environment")])
